#include "elastic/checkpoint/inspect/report.h"

#include <cmath>

#include "absl/status/status.h"
#include "elastic/checkpoint/inspect/example_checkpoint.h"
#include "elastic/checkpoint/inspect/stored_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class ReportTest : public ::testing::Test {
 protected:
  ReportTest() { EXPECT_TRUE(files_.MakeDirectory("jobs").ok()); }

  std::string Write(int64_t step, ExampleCheckpoint example = {}) {
    example.id = {.step = step, .generation = 7};
    return WriteExample(files_, "jobs", example);
  }

  FolderListing List() { return ListFolder(files_, "jobs").value(); }

  testing::MemoryFileSystem files_;
};

TEST_F(ReportTest, AListing) {
  Write(1200);
  const std::string incomplete = Write(1300);
  ASSERT_TRUE(files_.RemoveFile(incomplete + "/MANIFEST.json").ok());
  ASSERT_TRUE(files_.MakeDirectory("jobs/.tmp-step-000000001400.g0007.abc").ok());
  EXPECT_EQ(ListingTable("jobs", List(), 1'000'000 + 7200),
            "  STEP  GENERATION  RUN     WORLD SIZE  TENSORS  BYTES    AGE    STATE\n"
            "  1300  7           -       -           -        -        -      incomplete\n"
            "  1200  7           digits  4           5        16.5 kB  2.0 h  complete\n"
            "incomplete: jobs/step-000000001300.g0007/MANIFEST.json is missing\n"
            "unfinished: .tmp-step-000000001400.g0007.abc\n");
  const Json json = Json::parse(ListingJson("jobs", List()));
  EXPECT_EQ(json["folder"], "jobs");
  EXPECT_EQ(json["checkpoints"][0]["state"], "incomplete");
  EXPECT_FALSE(json["checkpoints"][0].contains("run_id"));
  EXPECT_EQ(json["checkpoints"][1]["saved_unix_seconds"], 1'000'000);
  EXPECT_EQ(json["checkpoints"][1]["bytes"], 16452);
  EXPECT_EQ(json["unfinished"][0], ".tmp-step-000000001400.g0007.abc");
}

TEST_F(ReportTest, AnEmptyFolder) {
  EXPECT_EQ(ListingTable("jobs", List(), 0), "No checkpoint is in jobs.\n");
  EXPECT_EQ(ListingJson("jobs", List()),
            "{\"folder\":\"jobs\",\"checkpoints\":[],\"unfinished\":[]}\n");
}

TEST_F(ReportTest, AManifest) {
  const std::string folder = Write(1200);
  const Manifest manifest = ReadManifestOf(files_, folder).value();
  const std::string text = ManifestTable(folder, manifest);
  EXPECT_THAT(text, AllOf(HasSubstr("step 1200 of epoch 2, generation 7 of run \"digits\""),
                          HasSubstr("saved 1970-01-12 13:46:40 UTC by a job of world size 4"),
                          HasSubstr("1280 of 60000 samples, global batches of 64"),
                          HasSubstr("optimizer: SGD\n    group 0: 2 parameters, lr 0.1, nesterov"),
                          HasSubstr("tied: head.weight is fc.weight"),
                          HasSubstr("fc.weight                        F32    [2, 3]  24 B")));
  const Json json = Json::parse(ManifestJson(folder, manifest));
  EXPECT_EQ(json["folder"], folder);
  EXPECT_EQ(json["manifest"]["tensors"].size(), 5);
  EXPECT_EQ(json["manifest"]["optimizer"]["param_groups"][0]["options"]["lr"], 0.1);
}

TEST_F(ReportTest, NamesCannotSteerTheTerminal) {
  Write(1, {.run_id = "\x1b[2Jdigits\n"});
  EXPECT_THAT(ListingTable("jobs", List(), 0),
              AllOf(HasSubstr("?[2Jdigits?"), Not(HasSubstr("\x1b"))));
}

TEST_F(ReportTest, AVerification) {
  const std::string folder = Write(1);
  Verification good = VerifyCheckpoint(files_, folder).value();
  EXPECT_EQ(VerificationTable({good}),
            "jobs/step-000000000001.g0007: undamaged (5 tensors in 4 files, 16.5 kB read)\n");
  Verification bad = good;
  bad.damages = {{.file = "a", .place = "tensor t", .message = "m"},
                 {.file = "b", .place = "", .message = "is missing"}};
  EXPECT_EQ(VerificationTable({bad}),
            "jobs/step-000000000001.g0007: 2 damages (5 tensors in 4 files, 16.5 kB read)\n"
            "  a: tensor t: m\n  b: is missing\n");
  const Json json = Json::parse(VerificationJson({good, bad}));
  EXPECT_EQ(json["checkpoints"][0]["undamaged"], true);
  EXPECT_EQ(json["checkpoints"][1]["damages"][0]["place"], "tensor t");
}

TEST_F(ReportTest, ADifference) {
  const std::string a = Write(1);
  const std::string b = Write(2, {.weight = {1, 2, 3, 4, 5, 7}});
  const CheckpointDifference difference = CompareCheckpoints(files_, a, b).value();
  EXPECT_EQ(DifferenceTable(difference),
            "A: jobs/step-000000000001.g0007\n"
            "B: jobs/step-000000000002.g0007\n"
            "  TENSOR     PART   IN A        IN B        DIFFERENT ELEMENTS  LARGEST DIFFERENCE\n"
            "  fc.weight  model  F32 [2, 3]  F32 [2, 3]  1 of 6              1\n"
            "field step: 1 in A, 2 in B\n"
            "1 tensor and 1 field differ, 4 tensors are equal.\n");
  const Json json = Json::parse(DifferenceJson(difference));
  EXPECT_EQ(json["equal"], false);
  EXPECT_EQ(json["tensors"][0]["largest_difference"], 1);
  EXPECT_EQ(json["fields"][0]["b"], 2);
  EXPECT_THAT(DifferenceTable(CompareCheckpoints(files_, a, a).value()),
              HasSubstr("The states are equal: 5 tensors."));
}

TEST_F(ReportTest, JsonHasNoNan) {
  CheckpointDifference difference;
  const TensorType type;
  difference.tensors = {
      {.part = "model", .name = "w", .a = type, .b = type, .largest = std::nan("")}};
  EXPECT_EQ(Json::parse(DifferenceJson(difference))["tensors"][0]["largest_difference"], "nan");
}

TEST_F(ReportTest, APrune) {
  for (const int64_t step : {1, 2}) Write(step);
  PruneResult result = Prune(files_, "jobs", {.keep_last = 1, .dry_run = true}).value();
  EXPECT_EQ(PruneTable(result),
            "jobs/step-000000000002.g0007: kept\n"
            "jobs/step-000000000001.g0007: would be deleted\n"
            "1 checkpoint would be deleted, 16.5 kB.\n");
  result.dry_run = false;
  EXPECT_THAT(PruneTable(result), HasSubstr("1 checkpoint deleted, 16.5 kB."));
  result.entries[1].removed = absl::InternalError("the disk has failed");
  EXPECT_THAT(PruneTable(result), HasSubstr(": not deleted: the disk has failed\n0 checkpoints"));
  const Json json = Json::parse(PruneJson(result));
  EXPECT_EQ(json["checkpoints"][0]["fate"], "keep");
  EXPECT_EQ(json["checkpoints"][1]["fate"], "delete");
  EXPECT_EQ(json["checkpoints"][1]["deleted"], false);
  EXPECT_EQ(json["checkpoints"][1]["error"], "the disk has failed");
}

TEST(BytesTextTest, PowersOfAThousand) {
  EXPECT_EQ(BytesText(999), "999 B");
  EXPECT_EQ(BytesText(1000), "1.0 kB");
  EXPECT_EQ(BytesText(999'999), "1.0 MB");
  EXPECT_EQ(BytesText(12'340'000'000), "12.3 GB");
}

}  // namespace
}  // namespace ddp::elastic
