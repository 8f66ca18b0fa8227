#include "ddp/comm/reports/failure_monitor.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "ddp/comm/meeting/store_meeting.h"
#include "ddp/comm/reports/report_log.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"
#include "ddp/health/group_health.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::testing::Contains;
using ::testing::Not;

constexpr absl::Duration kDeadline = absl::Seconds(60);

class FailureMonitorTest : public ::testing::Test {
 protected:
  const std::shared_ptr<FakeGroupStore> store_ = std::make_shared<FakeGroupStore>();
};

TEST_F(FailureMonitorTest, AReportReachesThePeers) {
  FailureMonitor zero(store_, {.rank = 0, .size = 2});
  FailureMonitor one(store_, {.rank = 1, .size = 2});
  EXPECT_FALSE(one.failed());
  one.Report("disk full");
  one.Report("a second one");
  EXPECT_EQ(one.failure()->ToString(), "rank 1 failed: disk full");
  EXPECT_EQ(zero.AwaitFailure(kDeadline)->ToString(), "rank 1 failed: disk full");
  const GroupError error =
      zero.Health([](auto& health) { return health.OnWaitEnded("a barrier"); });
  EXPECT_EQ(error.message, "rank 0: stopped in a barrier, because rank 1 failed: disk full");
}

// A report of an earlier incarnation is ignored; one of a later incarnation is kept until then.
TEST_F(FailureMonitorTest, AReportBelongsToItsIncarnation) {
  Membership zero{.rank = 0, .size = 2};
  Membership one{.rank = 1, .size = 2};
  FailureMonitor ahead(store_, zero);
  FailureMonitor behind(store_, one);
  zero.incarnation = one.incarnation = 1;
  ahead.Begin(zero);
  ahead.Report("of incarnation 1");
  ASSERT_EQ(ahead.failure()->reason, "of incarnation 1");
  behind.Report("of incarnation 0");
  EXPECT_EQ(behind.failure()->reason, "of incarnation 0");
  behind.Begin(one);
  ASSERT_TRUE(behind.AwaitFailure(kDeadline).has_value());
  EXPECT_EQ(behind.failure()->reason, "of incarnation 1");
  const auto raise = [](auto& health) { return health.Raise(); };
  EXPECT_FALSE(behind.Health(raise));
  EXPECT_TRUE(behind.Health(raise));
  zero.incarnation = one.incarnation = 2;
  ahead.Begin(zero);
  behind.Begin(one);
  EXPECT_FALSE(ahead.failed());
  EXPECT_FALSE(behind.failed());
}

TEST_F(FailureMonitorTest, AllRanksNameTheFirstFailureThatWasFound) {
  // Rank 2 has found a failure; rank 0 has not read that yet, because its wake key is missing.
  store_->Set("log/0", "failure 0 3 its process has ended");
  FailureMonitor zero(store_, {.rank = 0, .size = 4});
  zero.ReportFound({.rank = 2, .reason = "its connection broke"});
  EXPECT_EQ(zero.failure()->ToString(), "rank 3 failed: its process has ended");
}

// The ranks of one host see a death in shared memory: none waits for the store before it throws.
TEST_F(FailureMonitorTest, AFailureThatAllSeeIsKnownBeforeItIsReported) {
  FailureMonitor zero(store_, {.rank = 0, .size = 3});
  FailureMonitor one(store_, {.rank = 1, .size = 3});
  store_->ForgetCallers();
  zero.ReportSeen({.rank = 2, .reason = "its process has ended"});
  EXPECT_EQ(zero.failure()->ToString(), "rank 2 failed: its process has ended");
  EXPECT_THAT(store_->Callers(), Not(Contains(std::this_thread::get_id())));
  EXPECT_EQ(one.AwaitFailure(kDeadline)->ToString(), "rank 2 failed: its process has ended");
  zero.ReportSeen({.rank = 1, .reason = "a second failure"});
  EXPECT_EQ(zero.failure()->rank, 2);
}

TEST_F(FailureMonitorTest, AReportEndsTheMeeting) {
  FailureMonitor zero(store_, {.rank = 0, .size = 2});
  FailureMonitor one(store_, {.rank = 1, .size = 2});
  StoreMeeting meeting(store_, "barrier/0/0", {.rank = 0, .size = 2});
  std::thread peer([&] { one.Report("will not come"); });
  EXPECT_FALSE(zero.Attend(meeting, "", kDeadline).has_value());
  peer.join();
  // A failure that is known already ends a later meeting at once.
  StoreMeeting later(store_, "barrier/0/1", {.rank = 0, .size = 2});
  EXPECT_FALSE(zero.Attend(later, "", absl::ZeroDuration()).has_value());
}

class AtSeven : public PositionSource {
 public:
  int64_t launched() const override { return 7; }
  std::string Answer() const override { return "at 7"; }
};

TEST_F(FailureMonitorTest, AnswersWithThePositionOfItsIncarnation) {
  FailureMonitor zero(store_, {.rank = 0, .size = 2, .incarnation = 1});
  FailureMonitor one(store_, {.rank = 1, .size = 2, .incarnation = 1});
  const auto answer = [&] {
    const auto question = zero.log().AskWhere(zero.membership().incarnation, INT64_MAX);
    EXPECT_TRUE(question.has_value());
    while (!zero.log().ReadAnswers(*question).silent.empty()) std::this_thread::yield();
    return zero.log().ReadAnswers(*question).by_rank.at(1);
  };
  EXPECT_EQ(answer(), "");
  one.SetPositionSource(std::make_shared<AtSeven>());
  EXPECT_EQ(answer(), "at 7");
  zero.Begin(zero.membership().Next());  // rank 1 is in the earlier incarnation
  EXPECT_EQ(answer(), "");
  one.Leave();
  EXPECT_EQ(store_->Get(ReportLog::StandingKey(1)), "left 1 7");
}

TEST_F(FailureMonitorTest, ALostStoreCausesNoException) {
  auto zero = std::make_unique<FailureMonitor>(store_, Membership{.rank = 0, .size = 2});
  store_->SetLost(true);
  zero->ReportFound({.rank = 1, .reason = "its connection broke"});
  EXPECT_EQ(zero->failure()->rank, 1);
  zero->Begin(zero->membership().Next());
  zero->Report("disk full");
  EXPECT_TRUE(zero->failed());
  zero.reset();
}

// The report of an unwinding thread is queued, and reaches the peers all the same.
TEST_F(FailureMonitorTest, AnUnwindingThreadDoesNotCallTheStore) {
  FailureMonitor zero(store_, {.rank = 0, .size = 2});
  try {
    FailureMonitor one(store_, {.rank = 1, .size = 2});
    struct Reporter {
      FailureMonitor& monitor;
      ~Reporter() { monitor.Report("an exception ended its loop"); }
    };
    const Reporter reporter{one};
    store_->ForgetCallers();
    throw std::runtime_error("unwinds");
  } catch (const std::runtime_error&) {
    EXPECT_THAT(store_->Callers(), Not(Contains(std::this_thread::get_id())));
  }
  EXPECT_EQ(zero.AwaitFailure(kDeadline)->reason, "an exception ended its loop");
}

}  // namespace
}  // namespace ddp::internal
