#include "elastic/checkpoint/format/manifest.h"

#include <functional>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/strict_json.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

Manifest Example() {
  Manifest manifest;
  manifest.id = {1200, 7};
  manifest.epoch = 3;
  manifest.sampler = SamplerState{.seed = ~uint64_t{0},
                                  .epoch = 3,
                                  .dataset_size = 1000,
                                  .global_batch_size = 64,
                                  .cursor = 128,
                                  .drop_last = true,
                                  .order_version = 1};
  OptimizerRecord optimizer;
  optimizer.type = "AdamW";
  optimizer.groups.push_back(
      {{"fc.weight", "fc.bias"},
       {{"lr", 0.1}, {"betas", std::vector<double>{0.9, 0.999}}, {"amsgrad", false}}});
  optimizer.steps = {{"fc.weight", 1200}, {"fc.bias", 1200}};
  manifest.optimizer = optimizer;
  manifest.bucket_layout = {{"fc.bias"}, {"fc.weight"}};
  manifest.aliases = {{"decoder.weight", "fc.weight"}};
  manifest.world_size = 4;
  manifest.files = {{"model-00001-of-00001.safetensors", 4096 + 32, ContentHash::Of("file")}};
  manifest.tensors = {{"fc.weight",
                       "model-00001-of-00001.safetensors",
                       {Dtype::kF32, {2, 3}},
                       4096,
                       24,
                       ContentHash::Of("w")},
                      {"fc.bias",
                       "model-00001-of-00001.safetensors",
                       {Dtype::kF32, {2}},
                       4120,
                       8,
                       ContentHash::Of("b")}};
  manifest.state_hash = StateHash(manifest.tensors);
  manifest.run_id = "digits \"quoted\"";
  manifest.generation_nonce = "c0ffee";
  manifest.torch_version = "2.11.0";
  manifest.saved_unix_seconds = 1'800'000'000;
  return manifest;
}

// Returns `text` with a last line whose hash matches, as an attacker would write it.
std::string Resealed(const std::string& text) {
  const std::string body = text.substr(0, text.find(",\n\"manifest_xxh3_128\""));
  return absl::StrCat(body, ",\n\"manifest_xxh3_128\": \"", ContentHash::Of(body).Hex(), "\"\n}\n");
}

std::string ErrorAfter(const std::string& from, const std::string& to) {
  const std::string text = EncodeManifest(Example());
  EXPECT_THAT(text, HasSubstr(from));
  const auto manifest = ParseManifest(Resealed(absl::StrReplaceAll(text, {{from, to}})));
  return manifest.ok() ? "" : std::string(manifest.status().message());
}

TEST(ManifestTest, EverythingComesBack) {
  const auto parsed = ParseManifest(EncodeManifest(Example()));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, Example());
}

TEST(ManifestTest, WhatIsOptionalMayBeMissing) {
  Manifest manifest = Example();
  manifest.sampler.reset();
  manifest.optimizer.reset();
  manifest.bucket_layout.clear();
  const auto parsed = ParseManifest(EncodeManifest(manifest));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, manifest);
}

TEST(ManifestTest, AMetricComesBackAndIsAFiniteNumber) {
  Manifest manifest = Example();
  manifest.metric = -0.125;
  const std::string text = EncodeManifest(manifest);
  const auto parsed = ParseManifest(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, manifest);
  const auto lie = ParseManifest(
      Resealed(absl::StrReplaceAll(text, {{"\"metric\": -0.125", "\"metric\": \"low\""}})));
  EXPECT_THAT(lie.status().message(), HasSubstr("\"metric\" is no finite number"));
  manifest.metric = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(CheckManifest(manifest).ok());
  manifest.metric.reset();
  EXPECT_EQ(EncodeManifest(manifest), EncodeManifest(Example()));
}

TEST(ManifestTest, IsJsonWithTheHashInTheLastField) {
  const std::string text = EncodeManifest(Example());
  const nlohmann::ordered_json json = nlohmann::ordered_json::parse(text);
  EXPECT_EQ((--json.end()).key(), "manifest_xxh3_128");
  EXPECT_EQ(json["step"], 1200);
  EXPECT_EQ(json["optimizer"]["param_groups"][0]["options"]["betas"][1], 0.999);
  EXPECT_EQ(json["sampler"]["seed"], ~uint64_t{0});
}

TEST(ManifestTest, EveryFlippedBitIsSeen) {
  const std::string text = EncodeManifest(Example());
  for (size_t byte = 0; byte < text.size(); ++byte) {
    std::string damaged = text;
    damaged[byte] ^= static_cast<char>(1 << (byte % 8));
    ASSERT_EQ(ParseManifest(damaged).status().code(), absl::StatusCode::kDataLoss)
        << "byte " << byte;
  }
}

TEST(ManifestTest, EveryTruncationIsSeen) {
  const std::string text = EncodeManifest(Example());
  for (size_t length = 0; length < text.size(); ++length) {
    ASSERT_FALSE(ParseManifest(text.substr(0, length)).ok()) << length;
  }
  EXPECT_FALSE(ParseManifest(text + "\n").ok());
}

TEST(ManifestTest, LiesWithARightHashAreRefused) {
  EXPECT_THAT(ErrorAfter("\"step\": 1200", "\"step\": -1"), HasSubstr("\"step\""));
  EXPECT_THAT(ErrorAfter("\"step\": 1200", "\"step\": 1e3"), HasSubstr("\"step\""));
  EXPECT_THAT(ErrorAfter("\"step\": 1200", "\"step\": 99999999999999999999"),
              HasSubstr("\"step\""));
  EXPECT_THAT(ErrorAfter("\"step\": 1200", "\"stop\": 1200"), HasSubstr("missing"));
  EXPECT_THAT(ErrorAfter("\"step\": 1200", "\"step\": 1200,\n\"step\": 1"), HasSubstr("twice"));
  EXPECT_THAT(ErrorAfter("\"world_size\": 4", "\"world_size\": 0"), HasSubstr("world_size"));
  EXPECT_THAT(ErrorAfter("\"name\":\"model-", "\"name\":\"../model-"), HasSubstr("no file name"));
  EXPECT_THAT(ErrorAfter("\"offset\":4096", "\"offset\":4105"), HasSubstr("outside of its file"));
  EXPECT_THAT(ErrorAfter("\"offset\":4096", "\"offset\":18446744073709551615"),
              HasSubstr("outside of its file"));
  EXPECT_THAT(ErrorAfter("\"shape\":[2,3]", "\"shape\":[2,4]"), HasSubstr("shape"));
  EXPECT_THAT(ErrorAfter("\"shape\":[2,3]", "\"shape\":[-2,-3]"), HasSubstr("shape"));
  EXPECT_THAT(ErrorAfter("\"fc.weight\",\"offset\"", "\"fc.bias\",\"offset\""),
              HasSubstr("stands twice"));
  EXPECT_THAT(ErrorAfter("\"cursor\":128", "\"cursor\":\"128\""), HasSubstr("cursor"));
  EXPECT_THAT(ErrorAfter("\"amsgrad\":false", "\"amsgrad\":{}"), HasSubstr("amsgrad"));
  EXPECT_THAT(ErrorAfter("[[\"fc.bias\"],", "[5,"), HasSubstr("bucket_layout"));
  EXPECT_THAT(ErrorAfter("\"format_version\": 1", "\"format_version\": 2"),
              HasSubstr("format version 2, this program knows 1"));
}

TEST(ManifestTest, ANameMayHoldAnyCharacter) {
  Manifest manifest = Example();
  manifest.optimizer->steps = {{"fc", 1}, {std::string("fc\0\n", 4), 2}, {"", 3}};
  const auto parsed = ParseManifest(EncodeManifest(manifest));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->optimizer->steps, manifest.optimizer->steps);
  EXPECT_THAT(ErrorAfter("\"fc.bias\":1200", "\"a\\n\":-1"), HasSubstr("\"a\\n\" is no whole"));
}

TEST(ManifestTest, UnknownFieldsAreForLaterVersions) {
  EXPECT_EQ(ErrorAfter("\"step\": 1200", "\"step\": 1200,\n\"new\": {\"a\":[1]}"), "");
}

std::string CheckError(const std::function<void(Manifest&)>& change) {
  Manifest manifest = Example();
  change(manifest);
  const absl::Status status = CheckManifest(manifest);
  if (status.ok()) return "";
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(ManifestTest, WhatCannotBeReadAgainIsRefusedBeforeItIsWritten) {
  EXPECT_EQ(CheckError([](Manifest&) {}), "");
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THAT(CheckError([&](Manifest& m) { m.optimizer->groups[0].options["lr"] = nan; }),
              HasSubstr("option \"lr\" of parameter group 0 is no finite number"));
  EXPECT_THAT(CheckError([&](Manifest& m) {
                m.optimizer->groups[0].options["betas"] = std::vector<double>{0.9, infinity};
              }),
              HasSubstr("option \"betas\" of parameter group 0 is no finite number"));
  EXPECT_THAT(CheckError([](Manifest& m) { m.tensors[1].name = "fc.\xff"; }),
              HasSubstr("the name \"fc.\\xff\" is no UTF-8"));
  EXPECT_THAT(CheckError([](Manifest& m) { m.run_id = "\xc3"; }), HasSubstr("is no UTF-8"));
  EXPECT_THAT(CheckError([](Manifest& m) { m.aliases["x\xff"] = "fc.weight"; }),
              HasSubstr("is no UTF-8"));
  // CheckManifest() has no check of its own for file names; the parser finds the bad name.
  EXPECT_THAT(CheckError([](Manifest& m) { m.files[0].name = "model.bin"; }),
              HasSubstr("the manifest cannot be written"));
}

TEST(StrictJsonTest, BoundsDepth) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_THAT(std::string(ParseStrictJson(deep).status().message()), HasSubstr("16 levels"));
  EXPECT_TRUE(ParseStrictJson(std::string(16, '[') + std::string(16, ']')).ok());
}

TEST(StrictJsonTest, BuildsWhatTheTextSays) {
  const std::string text = R"({"a":[1,-2,2.5,{"b":null,"c":[[],{}]}],"d":"x","e":true})";
  const auto json = ParseStrictJson(text);
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(*json, nlohmann::json::parse(text));
}

TEST(StateHashTest, DependsOnTensorsAndNotOnTheirPlace) {
  Manifest manifest = Example();
  const ContentHash hash = StateHash(manifest.tensors);
  std::swap(manifest.tensors[0], manifest.tensors[1]);
  manifest.tensors[0].offset += 8;
  EXPECT_EQ(StateHash(manifest.tensors), hash);
  manifest.tensors[0].hash = ContentHash::Of("other");
  EXPECT_NE(StateHash(manifest.tensors), hash);
}

}  // namespace
}  // namespace ddp::elastic
