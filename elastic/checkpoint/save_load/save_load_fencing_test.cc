// Tests saves of several generations and jobs into one folder: an earlier writer, suspended at any
// call, undoes nothing of a later one. "Row N" as in save_load_test.cc.
#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/folder/checkpoint_owner.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/group/checkpoint_group.h"
#include "elastic/checkpoint/save_load/save_checkpoint.h"
#include "elastic/checkpoint/save_load/test_process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_system/memory_file_system.h"

namespace ddp::elastic {
namespace {

using ::ddp::testing::MemoryFileSystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Row 9: an earlier generation continues after a later generation has claimed the folder.
TEST(SaveLoadFencingTest, EarlierGenerationCannotCommitAfterALaterOneHasSaved) {
  MemoryFileSystem file_system;
  TestProcess earlier(&file_system, 1);
  TestProcess later(&file_system, 2);
  ASSERT_TRUE(earlier.Save(1).ok());
  ASSERT_TRUE(later.Save(2).ok());
  const absl::StatusOr<std::string> refused = earlier.Save(3);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("another generation"), HasSubstr("\"generation\":2")));
  EXPECT_EQ(later.LoadedStep(), 2);
  EXPECT_TRUE(later.Save(3).ok());
}

TEST(SaveLoadFencingTest, SaveThatIsUnderWayLosesItsFolderToALaterGeneration) {
  MemoryFileSystem file_system;
  CheckpointStorage earlier(&file_system, kRoot);
  const absl::StatusOr<std::string> folder = earlier.Begin(Owner(1), {5, 1});
  ASSERT_TRUE(folder.ok());
  ASSERT_TRUE(TestProcess(&file_system, 2).Save(4).ok());
  Manifest manifest;
  manifest.id = {5, 1};
  EXPECT_FALSE(earlier.Commit(Owner(1), *folder, manifest).ok());
  EXPECT_EQ(TestProcess(&file_system, 3).LoadedStep(), 4);
}

// Generation 1 is suspended before each of its calls in turn. Meanwhile generation 2 saves and
// begins another save. When generation 1 continues, generation 2 must lose nothing.
TEST(SaveLoadFencingTest, AStalledWriterUndoesNothingOfALaterGeneration) {
  int refused = 0;
  for (int64_t call = 1;; ++call) {
    MemoryFileSystem file_system;
    TestProcess earlier(&file_system, 1);
    TestProcess later(&file_system, 2);
    CheckpointStorage later_storage(&file_system, kRoot);
    bool stalled = false;
    bool had_committed = false;
    std::string in_progress;
    file_system.RunBeforeCall(call, [&] {
      stalled = true;
      had_committed = Exists(file_system, absl::StrCat(kRoot, "/step-000000000005.g0001"));
      ASSERT_TRUE(later.Save(4).ok()) << "call " << call;
      const auto begun = later_storage.Begin(Owner(2), {6, 2});
      ASSERT_TRUE(begun.ok()) << begun.status();
      in_progress = *begun;
    });
    const absl::StatusOr<std::string> saved = earlier.Save(5);
    if (!stalled) break;
    ASSERT_EQ(saved.ok(), had_committed) << "call " << call << ": " << saved.status();
    refused += saved.ok() ? 0 : 1;
    ASSERT_TRUE(Exists(file_system, in_progress)) << "call " << call;
    ASSERT_TRUE(later.Save(7).ok()) << "call " << call;
    ASSERT_FALSE(earlier.Save(8).ok()) << "call " << call;
    ASSERT_EQ(later.LoadedStep(), 7) << "call " << call;
  }
  EXPECT_GT(refused, 25);
}

// Generation 1 is suspended, then generation 2 too, and generation 3 saves.
TEST(SaveLoadFencingTest, TwoStalledWritersUndoNothingOfALaterGeneration) {
  bool all_done = false;
  for (int64_t first = 1; !all_done; first += 3) {
    bool first_done = false;
    for (int64_t second = 1; !first_done; second += 5) {
      MemoryFileSystem file_system;
      TestProcess one(&file_system, 1);
      TestProcess two(&file_system, 2);
      TestProcess three(&file_system, 3);
      bool one_stalled = false;
      bool two_stalled = false;
      file_system.RunBeforeCall(first, [&] {
        one_stalled = true;
        file_system.RunBeforeCall(file_system.calls() + second, [&] {
          two_stalled = true;
          ASSERT_TRUE(three.Save(3).ok());
        });
        (void)two.Save(4).ok();
      });
      (void)one.Save(5).ok();
      all_done = !one_stalled;
      first_done = !two_stalled;
      if (first_done) continue;
      ASSERT_TRUE(three.Save(6).ok()) << "calls " << first << " and " << second;
      ASSERT_FALSE(one.Save(7).ok());
      ASSERT_FALSE(two.Save(7).ok());
      ASSERT_EQ(three.LoadedStep(), 6);
    }
  }
}

TEST(SaveLoadFencingTest, AnOlderGenerationIsRefusedByNumberEvenInItsFirstSave) {
  MemoryFileSystem file_system;
  ASSERT_TRUE(TestProcess(&file_system, 2).Save(2).ok());
  const absl::StatusOr<std::string> refused = TestProcess(&file_system, 1).Save(3);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("generation 1 (nonce1)"), HasSubstr("is older than"),
                    HasSubstr("generation 2 (nonce2)")));
}

TEST(SaveLoadFencingTest, AJobThatIsStartedAnewFollowsWhateverItsNumbersAre) {
  MemoryFileSystem file_system;
  const auto save = [&file_system](CheckpointOwner owner, int64_t step, AskRendezvous ask) {
    CheckpointStorage storage(&file_system, kRoot, std::move(ask));
    SoloGroup group;
    return SaveCheckpoint(file_system, storage, group, {.owner = owner},
                          TestState(step).Contents(owner.generation));
  };
  const auto job = [](const std::string& token) {
    return [token] { return absl::StatusOr<std::string>(token); };
  };
  ASSERT_TRUE(save({"run", 7, "a", 1}, 1, job("first")).ok());
  EXPECT_FALSE(save({"run", 6, "b", 1}, 2, job("first")).ok());
  EXPECT_TRUE(save({"run", 1, "c", 1}, 3, job("second")).ok());
  EXPECT_FALSE(save({"run", 9, "d", 1}, 4, [] {
                 return absl::StatusOr<std::string>(
                     absl::FailedPreconditionError("generation 10 has begun"));
               }).ok());
  // The rendezvous does not answer: (instance, generation) decides.
  const auto silent = [] { return absl::StatusOr<std::string>(absl::UnavailableError("down")); };
  EXPECT_FALSE(save({"run", 0, "e", 1}, 5, silent).ok());
  EXPECT_TRUE(save({"run", 2, "f", 1}, 6, silent).ok());
  EXPECT_TRUE(save({"other", 1, "g", 1}, 7, silent).ok());
}

// The rendezvous starts another generation while a save writes its files.
TEST(SaveLoadFencingTest, ACommitIsAskedOfTheRendezvousToo) {
  MemoryFileSystem file_system;
  int asked = 0;
  CheckpointStorage storage(&file_system, kRoot, [&asked]() -> absl::StatusOr<std::string> {
    if (++asked == 1) return "job";
    return absl::FailedPreconditionError("generation 2 has begun");
  });
  SoloGroup group;
  const auto saved =
      SaveCheckpoint(file_system, storage, group, {.owner = Owner(1)}, TestState(1).Contents(1));
  EXPECT_THAT(std::string(saved.status().message()), HasSubstr("generation 2 has begun"));
  EXPECT_EQ(TestProcess(&file_system, 2).LoadedStep(), -1);
  EXPECT_THAT(Names(file_system), ElementsAre(".owner"));
}

TEST(SaveLoadFencingTest, OneStepOfTwoGenerationsIsTwoCheckpointsAndTheLaterLoads) {
  MemoryFileSystem file_system;
  ASSERT_TRUE(TestProcess(&file_system, 1).Save(7).ok());
  ASSERT_TRUE(TestProcess(&file_system, 2).Save(7).ok());
  const auto loaded = TestProcess(&file_system, 3).Load();
  ASSERT_TRUE(loaded.ok() && loaded->has_value());
  EXPECT_EQ((*loaded)->manifest.id.generation, 2u);
}

}  // namespace
}  // namespace ddp::elastic
