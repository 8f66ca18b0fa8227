// Tests the removal of expired checkpoints: which of the folder's entries go, deaths of the process
// at every call, and readers.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/format/checkpoint_id.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/save_load/test_process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::ddp::testing::MemoryFileSystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Loss = MemoryFileSystem::Loss;

constexpr RetentionPolicy kLastOne = {.keep_last = 1};

std::string Folder(int64_t step, uint64_t generation = 1) {
  return absl::StrCat(kRoot, "/", FolderName({step, generation}));
}

// Returns the steps of the checkpoints, newest first.
std::vector<int64_t> Steps(FileSystem& file_system) {
  const absl::StatusOr<std::vector<CheckpointId>> ids =
      CheckpointStorage(&file_system, kRoot).List();
  EXPECT_TRUE(ids.ok()) << ids.status();
  std::vector<int64_t> steps;
  for (const CheckpointId& id : *ids) steps.push_back(id.step);
  return steps;
}

TEST(RetentionSweepTest, TheLastThreeStayOverGenerationsAndOneLineSaysSo) {
  MemoryFileSystem file_system;
  ::testing::internal::CaptureStderr();
  TestProcess first(&file_system, 1, RetentionPolicy());
  for (int64_t step = 1; step <= 4; ++step) ASSERT_TRUE(first.Save(step).ok());
  EXPECT_THAT(Steps(file_system), ElementsAre(4, 3, 2));
  ASSERT_TRUE(first.Save(5).ok());
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("(keep_last is 3); the first: step-000000000001.g0001"));
  EXPECT_EQ(log.find("keep_last"), log.rfind("keep_last")) << log;

  TestProcess second(&file_system, 2, RetentionPolicy());
  ASSERT_TRUE(second.Save(6).ok());
  EXPECT_THAT(Names(file_system),
              ElementsAre(".owner", "step-000000000004.g0001", "step-000000000005.g0001",
                          "step-000000000006.g0002"));
  EXPECT_EQ(second.LoadedStep(), 6);
}

TEST(RetentionSweepTest, OnlyFinishedCheckpointsOfThisRunGo) {
  MemoryFileSystem file_system;
  TestProcess keeps_all(&file_system, 1);
  for (int64_t step = 1; step <= 6; ++step) ASSERT_TRUE(keeps_all.Save(step).ok());
  // Step 1 gets the manifest of another run, step 2 a damaged one, step 3 a foreign file; step 4
  // becomes a link.
  const std::string manifest = *file_system.Content(Folder(1) + "/MANIFEST.json");
  Manifest other = *ParseManifest(manifest);
  other.run_id = "letters";
  file_system.Corrupt(Folder(1) + "/MANIFEST.json",
                      [&other](std::string& text) { text = EncodeManifest(other); });
  file_system.Corrupt(Folder(2) + "/MANIFEST.json", [](std::string& text) { text.pop_back(); });
  ASSERT_TRUE(file_system.CreateFile(Folder(3) + "/notes.txt").ok());
  ASSERT_TRUE(file_system.Rename(Folder(4), "/elsewhere").ok());
  file_system.MakeLink(Folder(4), "/elsewhere");

  TestProcess keeps_one(&file_system, 2, kLastOne);
  ASSERT_TRUE(keeps_one.Save(7).ok());
  EXPECT_THAT(Steps(file_system), ElementsAre(7, 4, 3, 2, 1));
  EXPECT_TRUE(Exists(file_system, Folder(3) + "/MANIFEST.json"));
  EXPECT_TRUE(Exists(file_system, "/elsewhere/MANIFEST.json"));
}

TEST(RetentionSweepTest, AHigherStepThatIsThereAlreadyDoesNotTakeThePlaceOfTheNewOne) {
  MemoryFileSystem file_system;
  TestProcess keeps_all(&file_system, 1);
  for (const int64_t step : {900, 901, 902}) ASSERT_TRUE(keeps_all.Save(step).ok());
  TestProcess process(&file_system, 2, kLastOne);
  ASSERT_TRUE(process.Save(1).ok());
  ASSERT_TRUE(process.Save(2).ok());
  EXPECT_THAT(Steps(file_system), ElementsAre(902, 901, 900, 2));
}

TEST(RetentionSweepTest, ACheckpointThatIsReadStaysUntilALaterCommit) {
  MemoryFileSystem file_system;
  TestProcess process(&file_system, 1, kLastOne);
  ASSERT_TRUE(process.Save(1).ok());
  const CheckpointStorage reader(&file_system, kRoot);
  absl::StatusOr<std::unique_ptr<FileLock>> lock = reader.LockForReading({1, 1});
  ASSERT_TRUE(lock.ok() && *lock != nullptr) << lock.status();
  ASSERT_TRUE(process.Save(2).ok());
  EXPECT_THAT(Steps(file_system), ElementsAre(2, 1));
  lock->reset();
  ASSERT_TRUE(process.Save(3).ok());
  EXPECT_THAT(Steps(file_system), ElementsAre(3));
}

// Between any two calls of a restore, the job saves a newer checkpoint and removes all others.
TEST(RetentionSweepTest, ARestoreDuringARemovalReadsAWholeCheckpoint) {
  for (int64_t call = 1;; ++call) {
    MemoryFileSystem file_system;
    TestProcess writer(&file_system, 1, kLastOne);
    ASSERT_TRUE(writer.Save(1).ok());
    TestProcess reader(&file_system, 2);
    const int64_t first = file_system.calls();
    bool saved = false;
    file_system.RunBeforeCall(first + call, [&] {
      saved = true;
      EXPECT_TRUE(writer.Save(2).ok());
    });
    const int64_t step = reader.LoadedStep();
    ASSERT_TRUE(step == 1 || (saved && step == 2)) << "call " << call << ": step " << step;
    if (!saved) break;
  }
}

// The process dies at every call of a save that removes the checkpoint before, with one of several
// losses of unsynced data. The next one dies too.
TEST(RetentionSweepTest, DeathAtEveryCallLeavesAWholeCheckpointAndNoLeftovers) {
  for (const Loss loss :
       {Loss::kNothing, Loss::kEverythingUnsynced, Loss::kUnsyncedContent, Loss::kUnsyncedNames}) {
    bool died = true;
    for (int64_t call = 1; died; ++call) {
      MemoryFileSystem file_system;
      TestProcess process(&file_system, 1, kLastOne);
      ASSERT_TRUE(process.Save(1).ok());
      const int64_t last_call = file_system.calls() + call;
      file_system.FailFromCall(last_call, absl::InternalError("dead"));
      const bool committed = process.Save(2).ok();
      died = file_system.calls() >= last_call;
      file_system.PowerCut(loss);
      TestProcess next(&file_system, 2, kLastOne);
      const int64_t step = next.LoadedStep();
      ASSERT_TRUE(step == 2 || (step == 1 && !committed)) << "call " << call << " step " << step;
      const auto loaded = next.Load();
      ASSERT_TRUE(loaded.ok() && loaded->has_value());
      ASSERT_TRUE((*loaded)->passed_over.empty()) << "half of a checkpoint: call " << call;

      file_system.FailFromCall(file_system.calls() + 1 + call % 31, absl::InternalError("dead"));
      (void)next.Save(3).ok();
      file_system.PowerCut(loss);
      TestProcess last(&file_system, 3, kLastOne);
      ASSERT_GE(last.LoadedStep(), step) << "call " << call;
      ASSERT_TRUE(last.Save(4).ok());
      ASSERT_THAT(Names(file_system), ElementsAre(".owner", "step-000000000004.g0003"))
          << "call " << call;
    }
  }
}

// Every single call of the removal fails once: the save succeeds, and the next one tidies up.
TEST(RetentionSweepTest, AFailedRemovalIsNoFailureOfTheSave) {
  for (int64_t call = 1;; ++call) {
    MemoryFileSystem file_system;
    TestProcess process(&file_system, 1, kLastOne);
    ASSERT_TRUE(process.Save(1).ok());
    const int64_t failing = file_system.calls() + call;
    file_system.FailCall(failing, absl::InternalError("no answer"));
    const bool saved = process.Save(2).ok();
    if (file_system.calls() < failing) break;
    if (saved) {
      EXPECT_EQ(process.LoadedStep(), 2);
    }
    ASSERT_TRUE(process.Save(3).ok());
    ASSERT_TRUE(process.Save(4).ok());
    ASSERT_THAT(Names(file_system), ElementsAre(".owner", "step-000000000004.g0001")) << call;
  }
}

}  // namespace
}  // namespace ddp::elastic
