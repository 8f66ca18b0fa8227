// Fuzzes the parser of MANIFEST.json. An accepted manifest must be consistent, and its text,
// written and read again, must give an equal manifest.
#include "elastic/checkpoint/format/manifest.h"

#include <glog/logging.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/strict_json.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "nlohmann/json.hpp"
#include "testing/fuzz_target.h"

namespace ddp::elastic {
namespace {

constexpr char kSeal[] = ",\n\"manifest_xxh3_128\": \"";

// Returns `body` with a last line whose hash matches, as an attacker would write it.
std::string Sealed(absl::string_view body) {
  const ContentHash hash = ContentHash::Of(body.data(), body.size());
  return absl::StrCat(body, kSeal, hash.Hex(), "\"\n}\n");
}

void CheckError(const absl::Status& status) {
  CHECK(absl::IsDataLoss(status) || absl::IsUnimplemented(status)) << status;
  CHECK(testing::IsOneLine(status.message())) << status;
}

void CheckRecords(const std::vector<FileRecord>& files, const std::vector<TensorRecord>& tensors) {
  std::map<std::string, uint64_t> sizes;
  for (const FileRecord& file : files) {
    CHECK(sizes.emplace(file.name, file.bytes).second) << file.name;
    CHECK(file.name.find('/') == std::string::npos && file.name.front() != '.') << file.name;
  }
  std::set<std::pair<std::string, std::string>> names;
  for (const TensorRecord& tensor : tensors) {
    CHECK(names.emplace(tensor.file, tensor.name).second) << tensor.name;
    CHECK(sizes.contains(tensor.file)) << tensor.file;
    CHECK(tensor.offset <= sizes[tensor.file] && tensor.bytes <= sizes[tensor.file] - tensor.offset)
        << tensor.name;
    CHECK(TensorBytes(tensor.type.dtype, tensor.type.shape) == tensor.bytes) << tensor.name;
  }
}

void CheckText(const std::string& text) {
  const absl::StatusOr<Manifest> manifest = ParseManifest(text);
  if (!manifest.ok()) return CheckError(manifest.status());
  CheckRecords(manifest->files, manifest->tensors);
  CHECK_GE(manifest->id.step, 0);
  CHECK_GE(manifest->world_size, 1);
  if (manifest->optimizer.has_value()) {
    const nlohmann::json steps = (*ParseStrictJson(text))["optimizer"]["steps"];
    CHECK(steps == nlohmann::json(manifest->optimizer->steps)) << steps;
  }
  const absl::Status written = CheckManifest(*manifest);
  CHECK(written.ok()) << written;
  (void)StateHash(manifest->tensors);
}

void CheckReport(const std::string& text) {
  const absl::StatusOr<WrittenRecords> records = ParseRecords(text);
  if (!records.ok()) return CheckError(records.status());
  CheckRecords(records->files, records->tensors);
  const auto again = ParseRecords(EncodeRecords(*records));
  CHECK(again.ok()) << again.status();
  CHECK(again->files == records->files && again->tensors == records->tensors);
}

Manifest Example() {
  Manifest manifest;
  manifest.id = {1200, 7};
  manifest.sampler = SamplerState{.seed = ~uint64_t{0},
                                  .dataset_size = 1000,
                                  .global_batch_size = 64,
                                  .cursor = 128,
                                  .order_version = 1};
  OptimizerRecord optimizer{
      .type = "AdamW", .groups = {}, .steps = {{"w", 12}, {std::string("w\0", 2), 3}}};
  optimizer.groups.push_back(
      {{"w"}, {{"lr", 0.1}, {"betas", std::vector<double>{0.9, 0.99}}, {"amsgrad", false}}});
  manifest.optimizer = optimizer;
  manifest.bucket_layout = {{"w"}, {}};
  manifest.aliases = {{"v", "w"}};
  manifest.files = {{"m.safetensors", 4120, ContentHash::Of("file")}};
  manifest.tensors = {
      {"w", "m.safetensors", {Dtype::kF32, {2, 3}}, 4096, 24, ContentHash::Of("w")}};
  manifest.run_id = "a \"b\"";
  return manifest;
}

}  // namespace
}  // namespace ddp::elastic

namespace ddp::testing {

// The first byte selects the kind of the rest: a manifest, a manifest without its last line, or a
// rank's records.
void FuzzOne(absl::string_view bytes) {
  FuzzInput input(bytes);
  const uint8_t kind = input.TakeByte() % 3;
  if (kind == 0) return elastic::CheckText(std::string(input.rest()));
  if (kind == 1) return elastic::CheckText(elastic::Sealed(input.rest()));
  elastic::CheckReport(std::string(input.rest()));
}

std::vector<std::string> FuzzSeeds() {
  const elastic::Manifest example = elastic::Example();
  const std::string text = elastic::EncodeManifest(example);
  const std::string body = text.substr(0, text.find(elastic::kSeal));
  const std::string bare = elastic::EncodeManifest({});
  return {absl::StrCat(std::string(1, '\0'), text), absl::StrCat("\x01", body),
          absl::StrCat("\x01", bare.substr(0, bare.find(elastic::kSeal))),
          absl::StrCat("\x02", elastic::EncodeRecords({example.files, example.tensors}))};
}

}  // namespace ddp::testing
