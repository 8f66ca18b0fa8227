#include "elastic/checkpoint/inspect/prune.h"

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/inspect/example_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Fate = PruneDecision::Fate;
using State = ListedCheckpoint::State;

std::vector<Fate> Decide(const std::vector<State>& newest_first, int keep_last) {
  std::vector<ListedCheckpoint> checkpoints;
  for (const State state : newest_first) {
    checkpoints.emplace_back();
    checkpoints.back().state = state;
  }
  std::vector<Fate> fates;
  for (const PruneDecision& decision : DecidePrune(checkpoints, keep_last)) {
    fates.push_back(decision.fate);
  }
  return fates;
}

TEST(DecidePruneTest, CountsCompleteCheckpointsOnly) {
  EXPECT_THAT(Decide({}, 1), ElementsAre());
  EXPECT_THAT(Decide({State::kComplete}, 1), ElementsAre(Fate::kKeep));
  EXPECT_THAT(Decide({State::kIncomplete, State::kComplete, State::kDamaged, State::kComplete,
                      State::kUnreadable, State::kComplete},
                     2),
              ElementsAre(Fate::kLeave, Fate::kKeep, Fate::kLeave, Fate::kKeep, Fate::kLeave,
                          Fate::kRemove));
}

class PruneTest : public ::testing::Test {
 protected:
  PruneTest() {
    EXPECT_TRUE(files_.MakeDirectory("jobs").ok());
    EXPECT_TRUE(files_.SyncDirectory("/").ok());
  }

  static std::string NameOf(int64_t step) { return FolderName({.step = step, .generation = 1}); }

  void Write(int64_t step) {
    WriteExample(files_, "jobs", {.id = {.step = step, .generation = 1}});
  }

  void Damage(int64_t step) {
    files_.Corrupt(absl::StrCat("jobs/", NameOf(step), "/model-00001-of-00002.safetensors"),
                   [](std::string& content) { content.back() ^= 1; });
  }

  PruneResult DoPrune(const PruneOptions& options) {
    absl::StatusOr<PruneResult> result = Prune(files_, "jobs", options);
    EXPECT_TRUE(result.ok()) << result.status();
    return std::move(result).value_or(PruneResult{});
  }

  // Of a folder with two checkpoints.
  static int64_t CallsOfADryRun() {
    testing::MemoryFileSystem files;
    EXPECT_TRUE(files.MakeDirectory("jobs").ok());
    for (const int64_t step : {2, 3}) {
      WriteExample(files, "jobs", {.id = {.step = step, .generation = 1}});
    }
    const int64_t before = files.calls();
    EXPECT_TRUE(Prune(files, "jobs", {.keep_last = 1, .dry_run = true}).ok());
    return files.calls() - before;
  }

  std::vector<std::string> Names() { return files_.ListDirectory("jobs").value(); }

  testing::MemoryFileSystem files_;
};

TEST_F(PruneTest, RemovesOlderOnesWholly) {
  for (const int64_t step : {1, 2, 3, 4}) Write(step);
  const PruneResult result = DoPrune({.keep_last = 2});
  EXPECT_TRUE(result.all_removed());
  EXPECT_THAT(Names(), UnorderedElementsAre(NameOf(3), NameOf(4)));
  files_.PowerCut(testing::MemoryFileSystem::Loss::kEverythingUnsynced);
  EXPECT_THAT(Names(), UnorderedElementsAre(NameOf(3), NameOf(4)));
}

TEST_F(PruneTest, ADryRunRemovesNothing) {
  for (const int64_t step : {1, 2}) Write(step);
  const PruneResult result = DoPrune({.keep_last = 1, .dry_run = true});
  EXPECT_EQ(result.entries[1].decision.fate, Fate::kRemove);
  EXPECT_THAT(Names(), UnorderedElementsAre(NameOf(1), NameOf(2)));
}

// A damaged checkpoint whose manifest and sizes look right must not push out the one that can be
// restored.
TEST_F(PruneTest, TheNewestReadableOneStays) {
  for (const int64_t step : {1, 2, 3, 4}) Write(step);
  Damage(3);
  Damage(4);
  const PruneResult result = DoPrune({.keep_last = 1});
  EXPECT_EQ(result.entries[0].decision.fate, Fate::kLeave);
  EXPECT_THAT(result.entries[0].decision.reason, HasSubstr("tensor fc.weight"));
  EXPECT_THAT(Names(), UnorderedElementsAre(NameOf(2), NameOf(3), NameOf(4)));
}

TEST_F(PruneTest, WithoutAReadableOneNothingIsRemoved) {
  for (const int64_t step : {1, 2}) {
    Write(step);
    Damage(step);
  }
  DoPrune({.keep_last = 1});
  EXPECT_THAT(Names(), UnorderedElementsAre(NameOf(1), NameOf(2)));
}

TEST_F(PruneTest, AFolderWithSomethingElseInItStays) {
  for (const int64_t step : {1, 2}) Write(step);
  files_.MakeLink(absl::StrCat("jobs/", NameOf(1), "/notes.txt"), "jobs");
  const PruneResult result = DoPrune({.keep_last = 1});
  EXPECT_FALSE(result.all_removed());
  EXPECT_THAT(std::string(result.entries[1].removed.message()), HasSubstr("notes.txt"));
  EXPECT_THAT(Names(), UnorderedElementsAre(NameOf(1), NameOf(2)));
  EXPECT_TRUE(LookAt(files_, "jobs/" + NameOf(1), {.step = 1, .generation = 1}).state ==
              State::kComplete);
}

TEST_F(PruneTest, ACheckpointThatIsReadStays) {
  for (const int64_t step : {1, 2}) Write(step);
  {
    const absl::StatusOr<std::unique_ptr<FileLock>> reader =
        files_.LockFile(absl::StrCat("jobs/", NameOf(1), "/MANIFEST.json"), LockKind::kShared);
    ASSERT_TRUE(reader.ok()) << reader.status();
    const PruneResult result = DoPrune({.keep_last = 1});
    EXPECT_THAT(std::string(result.entries[1].removed.message()), HasSubstr("is being read"));
    EXPECT_THAT(Names(), UnorderedElementsAre(NameOf(1), NameOf(2)));
  }
  EXPECT_TRUE(DoPrune({.keep_last = 1}).all_removed());
  EXPECT_THAT(Names(), UnorderedElementsAre(NameOf(2)));
}

TEST_F(PruneTest, FoldersOfOthersStay) {
  for (const int64_t step : {1, 2}) Write(step);
  ASSERT_TRUE(files_.MakeDirectory("jobs/.del-step-000000000009.g0001.other").ok());
  ASSERT_TRUE(files_.MakeDirectory("jobs/best").ok());
  DoPrune({.keep_last = 1});
  EXPECT_THAT(Names(),
              UnorderedElementsAre(NameOf(2), ".del-step-000000000009.g0001.other", "best"));
}

// Stops a prune at every call, loses every kind of unsynced change, and prunes again. The calls
// before the first removal change nothing, so that one kind of loss does for them.
TEST_F(PruneTest, AStoppedPruneLeavesNoHalfCheckpoint) {
  using Loss = testing::MemoryFileSystem::Loss;
  for (const Loss loss :
       {Loss::kEverythingUnsynced, Loss::kUnsyncedContent, Loss::kUnsyncedNames, Loss::kNothing}) {
    for (int64_t call = loss == Loss::kNothing ? 1 : CallsOfADryRun() + 1;; ++call) {
      testing::MemoryFileSystem files;
      ASSERT_TRUE(files.MakeDirectory("jobs").ok());
      ASSERT_TRUE(files.SyncDirectory("/").ok());
      for (const int64_t step : {2, 3}) {
        WriteExample(files, "jobs", {.id = {.step = step, .generation = 1}});
      }
      const int64_t before = files.calls();
      files.FailFromCall(before + call, absl::InternalError("stopped"));
      (void)Prune(files, "jobs", {.keep_last = 1});
      const bool was_stopped = files.calls() >= before + call;
      files.PowerCut(loss);
      const absl::StatusOr<FolderListing> listing = ListFolder(files, "jobs");
      ASSERT_TRUE(listing.ok()) << listing.status();
      for (const ListedCheckpoint& checkpoint : listing->checkpoints) {
        EXPECT_EQ(checkpoint.state, State::kComplete) << call << ": " << checkpoint.reason;
      }
      ASSERT_FALSE(listing->checkpoints.empty());
      EXPECT_EQ(listing->checkpoints[0].id.step, 3);
      const absl::StatusOr<PruneResult> again = Prune(files, "jobs", {.keep_last = 1});
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_TRUE(again->all_removed()) << call;
      EXPECT_THAT(files.ListDirectory("jobs").value(), ElementsAre(NameOf(3))) << call;
      if (!was_stopped) break;
    }
  }
}

}  // namespace
}  // namespace ddp::elastic
