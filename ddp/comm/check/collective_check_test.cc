#include "ddp/comm/check/collective_check.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "ddp/comm/check/collective_record.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/membership.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kDeadline = absl::Seconds(60);

CollectiveRecord Sum(int64_t elements) {
  return {.operation = "all-reduce (sum)",
          .what = "an all-reduce",
          .dtype = "Float",
          .shape = absl::StrCat("[", elements, "]"),
          .layout = "Strided",
          .device = "cpu"};
}

class CollectiveCheckTest : public ::testing::Test {
 protected:
  std::unique_ptr<CollectiveCheck> Check(int rank, absl::Duration timeout) {
    const Membership self{.rank = rank, .size = 2};
    monitors_.push_back(std::make_shared<FailureMonitor>(store_, self));
    return std::make_unique<CollectiveCheck>(store_, monitors_.back(), self, timeout);
  }

  const std::shared_ptr<FakeGroupStore> store_ = std::make_shared<FakeGroupStore>();
  std::vector<std::shared_ptr<FailureMonitor>> monitors_;
};

TEST_F(CollectiveCheckTest, ADifferenceIsOneTextOnEveryRank) {
  const auto zero = Check(0, kDeadline);
  const auto one = Check(1, kDeadline);
  CollectiveCheck::Result other;
  std::thread peer([&] {
    EXPECT_EQ(one->Run(Sum(4)).error, "");
    other = one->Run(Sum(5));
  });
  EXPECT_EQ(zero->Run(Sum(4)).error, "");
  const CollectiveCheck::Result mine = zero->Run(Sum(4));
  peer.join();
  EXPECT_THAT(mine.error, AllOf(HasSubstr("Detected mismatch"), HasSubstr("differ in shape")));
  EXPECT_EQ(other.error, mine.error);
}

// Each comparison removes the keys of the one before.
TEST_F(CollectiveCheckTest, TheStoreDoesNotGrow) {
  const auto zero = Check(0, kDeadline);
  const auto one = Check(1, kDeadline);
  constexpr int kRounds = 5;
  std::thread peer([&] {
    for (int i = 0; i < kRounds; ++i) EXPECT_EQ(one->Run(Sum(4)).error, "");
  });
  for (int i = 0; i < kRounds; ++i) EXPECT_EQ(zero->Run(Sum(4)).error, "");
  peer.join();
  for (const std::string& key : store_->Keys()) {
    EXPECT_TRUE(!absl::StartsWith(key, "check/") || absl::StartsWith(key, "check/0/4/")) << key;
  }
}

TEST_F(CollectiveCheckTest, ATimeoutNamesTheMissing) {
  const auto zero = Check(0, absl::ZeroDuration());
  EXPECT_THAT(zero->Run(Sum(4)).error,
              HasSubstr("rank 1 did not come to collective 0 within 0; the others run"));
}

TEST_F(CollectiveCheckTest, AFailureReportEndsTheWait) {
  const auto zero = Check(0, kDeadline);
  const auto one = Check(1, kDeadline);
  monitors_[1]->Report("disk full");
  ASSERT_TRUE(monitors_[0]->AwaitFailure(kDeadline).has_value());
  const CollectiveCheck::Result result = zero->Run(Sum(4));
  EXPECT_TRUE(result.peer_failed);
  EXPECT_EQ(result.error, "");
}

}  // namespace
}  // namespace ddp::internal
