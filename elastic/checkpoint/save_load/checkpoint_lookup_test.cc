#include "elastic/checkpoint/save_load/checkpoint_lookup.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "elastic/checkpoint/folder/checkpoint_owner.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
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
using ::testing::HasSubstr;

const absl::Status kPassing = absl::ResourceExhaustedError("Too many open files");

class CheckpointLookupTest : public ::testing::Test {
 protected:
  // Saves a checkpoint of generation 1. `token`: of the job; empty: unknown.
  void Save(const std::string& token) {
    CheckpointStorage storage(&file_system_, kRoot,
                              [token] { return absl::StatusOr<std::string>(token); });
    SoloGroup group;
    ASSERT_TRUE(
        SaveCheckpoint(file_system_, storage, group, {.owner = Owner(1)}, TestState(1).Contents(1))
            .ok());
  }

  // Looks as generation 2 of the same run ID.
  absl::StatusOr<bool> Look(AskRendezvous ask = nullptr) {
    return HoldsOwnCheckpoints(storage_, Owner(2), ask, AtOnce());
  }

  MemoryFileSystem file_system_;
  const CheckpointStorage storage_{&file_system_, kRoot};
};

TEST_F(CheckpointLookupTest, AFolderThatDoesNotExistHoldsNothing) {
  EXPECT_FALSE(HasCheckpoint(storage_, AtOnce()).value());
  EXPECT_EQ(NewestRunId(storage_, AtOnce()).value(), "");
  EXPECT_FALSE(Look().value());
}

TEST_F(CheckpointLookupTest, AnObstacleThatPassesIsNoError) {
  Save("");
  file_system_.FailCall(file_system_.calls() + 1, kPassing);
  const absl::StatusOr<bool> has = HasCheckpoint(storage_, AtOnce());
  ASSERT_TRUE(has.ok()) << has.status();
  EXPECT_TRUE(*has);
  for (int64_t call = 1;; ++call) {
    const int64_t before = file_system_.calls();
    file_system_.FailCall(before + call, kPassing);
    const absl::StatusOr<bool> own = Look();
    if (file_system_.calls() < before + call) break;
    ASSERT_TRUE(own.ok()) << "call " << call << ": " << own.status();
    EXPECT_TRUE(*own);
  }
}

TEST_F(CheckpointLookupTest, AnObstacleThatStaysIsAnError) {
  Save("");
  file_system_.FailFromCall(file_system_.calls() + 1, kPassing);
  EXPECT_EQ(HasCheckpoint(storage_, AtOnce()).status(), kPassing);
  EXPECT_EQ(NewestRunId(storage_, AtOnce()).status(), kPassing);
  EXPECT_EQ(Look().status(), kPassing);
}

TEST_F(CheckpointLookupTest, TheTokenDecides) {
  Save("first");
  EXPECT_TRUE(Look([] { return absl::StatusOr<std::string>("first"); }).value());
  EXPECT_FALSE(Look([] { return absl::StatusOr<std::string>("second"); }).value());
}

TEST_F(CheckpointLookupTest, AnUnknownTokenIsAskedForAgainAndIsThenAnError) {
  Save("first");
  int asked = 0;
  const auto own = Look([&asked]() -> absl::StatusOr<std::string> {
    if (++asked < 4) return absl::UnavailableError("connection refused");
    return "first";
  });
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_TRUE(*own);
  EXPECT_EQ(asked, 4);
  const absl::Status silent =
      Look([] {
        return absl::StatusOr<std::string>(absl::UnavailableError("connection refused"));
      }).status();
  EXPECT_TRUE(absl::IsUnavailable(silent)) << silent;
  EXPECT_THAT(std::string(silent.message()),
              AllOf(HasSubstr("/jobs/digits holds checkpoints of generation 1 (nonce1)"),
                    HasSubstr("connection refused"),
                    HasSubstr("start the job again when it answers, or let the job resume")));
}

TEST_F(CheckpointLookupTest, AnOwnerWithoutATokenIsComparedByItsInstance) {
  Save("");
  const auto never = []() -> absl::StatusOr<std::string> {
    ADD_FAILURE() << "asked";
    return "first";
  };
  EXPECT_TRUE(Look(never).value());
}

TEST_F(CheckpointLookupTest, AGenerationThatIsOverIsToldAtOnce) {
  Save("first");
  int asked = 0;
  const absl::Status over = Look([&asked]() -> absl::StatusOr<std::string> {
                              ++asked;
                              return absl::FailedPreconditionError("generation 3 has begun");
                            }).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(over)) << over;
  EXPECT_THAT(std::string(over.message()),
              AllOf(HasSubstr("generation 2 (nonce2)"), HasSubstr("generation 3 has begun")));
  EXPECT_EQ(asked, 1);
}

}  // namespace
}  // namespace ddp::elastic
