#include "ddp/comm/reports/renewal.h"

#include <memory>
#include <optional>
#include <thread>

#include "absl/time/time.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;

constexpr absl::Duration kDeadline = absl::Seconds(60);
constexpr Membership kZero{.rank = 0, .size = 2};
constexpr Membership kOne{.rank = 1, .size = 2};

class RenewalTest : public ::testing::Test {
 protected:
  std::optional<GroupFailure> Meet(FailureMonitor& monitor, absl::Duration timeout) {
    return MeetForRenewal(store_, monitor.log(), monitor.membership().Next(), timeout);
  }

  const std::shared_ptr<FakeGroupStore> store_ = std::make_shared<FakeGroupStore>();
};

TEST_F(RenewalTest, EndsWhenAllRanksHaveCome) {
  FailureMonitor zero(store_, kZero);
  FailureMonitor one(store_, kOne);
  std::thread peer([&] { EXPECT_FALSE(Meet(one, kDeadline).has_value()); });
  EXPECT_FALSE(Meet(zero, kDeadline).has_value());
  peer.join();
}

TEST_F(RenewalTest, ARankThatLeftIsGone) {
  FailureMonitor zero(store_, kZero);
  std::make_unique<FailureMonitor>(store_, kOne).reset();
  const auto gone = Meet(zero, kDeadline);
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->ToString(), "rank 1 failed: it has left the process group");
}

// Every rank gets the answer of the first one that gave up, however late it comes.
TEST_F(RenewalTest, ARankThatDoesNotComeIsGoneAfterTheTimeout) {
  FailureMonitor zero(store_, kZero);
  FailureMonitor one(store_, kOne);
  const auto gone = Meet(zero, absl::ZeroDuration());
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->ToString(),
            "rank 1 failed: rank 1 did not come back within 0 after a failure, although the "
            "process is alive");
  EXPECT_EQ(Meet(one, kDeadline)->reason, gone->reason);
}

// The process of rank 1 has ended: no thread of it answers the questions of rank 0.
TEST_F(RenewalTest, ARankWithoutASignOfLifeIsGone) {
  FailureMonitor zero(store_, kZero);
  const auto gone = Meet(zero, kDeadline);
  ASSERT_TRUE(gone.has_value());
  EXPECT_EQ(gone->rank, 1);
  EXPECT_EQ(gone->reason,
            "no sign of life from rank 1 for 3s: the process has died, or the host is out of "
            "reach");
}

// Rank 0 came before the store failed; its second call must not arrive again.
TEST_F(RenewalTest, ACallMayBeRepeated) {
  FailureMonitor zero(store_, kZero);
  FailureMonitor one(store_, kOne);
  store_->Set("renewal/1/0", "");
  store_->Add("renewal/1/count", 1);
  std::thread peer([&] { EXPECT_FALSE(Meet(one, kDeadline).has_value()); });
  EXPECT_FALSE(Meet(zero, kDeadline).has_value());
  peer.join();
  EXPECT_EQ(store_->Get("renewal/1/count"), "2");
}

TEST_F(RenewalTest, ThrowsWhatTheStoreThrows) {
  FailureMonitor zero(store_, kZero);
  store_->SetLost(true);
  EXPECT_ANY_THROW(Meet(zero, kDeadline));
}

}  // namespace
}  // namespace ddp::internal
