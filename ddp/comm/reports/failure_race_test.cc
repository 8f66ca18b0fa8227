// Failures that become known while other threads report, or end the monitor.
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;

constexpr int kRounds = 200;

// The monitor of one rank, and what it has told. Like that of remote calls' Workers, it is used and
// ended by different threads.
class Rank {
 public:
  Rank(const std::shared_ptr<FakeGroupStore>& store, int rank)
      : monitor_(std::make_shared<FailureMonitor>(
            store->Clone(), Membership{.rank = rank, .size = 2},
            FailureMonitor::Options{
                .on_failure = [this](const GroupFailure& failure) { OnFailure(failure); }})) {}

  std::shared_ptr<FailureMonitor> monitor() const {
    const MutexLock lock(mutex_);
    return monitor_;
  }
  void End() {
    std::shared_ptr<FailureMonitor> ended;  // destroyed without the lock
    const MutexLock lock(mutex_);
    ended.swap(monitor_);
  }

  // Blocks until a failure is known. Returns its reason.
  std::string Await() {
    const MutexLock lock(mutex_);
    while (told_ == 0) {
      if (!changed_.WaitFor(mutex_, absl::Seconds(30))) return "nothing was told";
    }
    return reason_;
  }
  int told() const {
    const MutexLock lock(mutex_);
    return told_;
  }

 private:
  void OnFailure(const GroupFailure& failure) {
    const MutexLock lock(mutex_);
    ++told_;
    reason_ = failure.reason;
    changed_.NotifyAll();
  }

  mutable Mutex mutex_;
  CondVar changed_;
  int told_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string reason_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<FailureMonitor> monitor_ ABSL_GUARDED_BY(mutex_);
};

// A watchdog's thread reports until the monitor ends.
TEST(FailureRaceTest, AReportMayMeetTheEnd) {
  for (int round = 0; round < kRounds; ++round) {
    const auto store = std::make_shared<FakeGroupStore>();
    Rank rank(store, 0);
    Rank peer(store, 1);
    std::atomic<bool> started = false;
    std::thread watchdog([&] {
      while (const auto monitor = rank.monitor()) {
        monitor->Report("the watchdog barks");
        started = true;
      }
    });
    if (round % 2 == 0) {
      EXPECT_EQ(peer.Await(), "the watchdog barks");
    } else {
      while (!started) std::this_thread::yield();
    }
    rank.End();
    watchdog.join();
    EXPECT_EQ(rank.told(), 1);
    peer.End();
    EXPECT_LE(peer.told(), 1);
  }
}

TEST(FailureRaceTest, AllRanksKnowTheSameFirstFailure) {
  for (int round = 0; round < kRounds; ++round) {
    const auto store = std::make_shared<FakeGroupStore>();
    Rank first(store, 0);
    Rank second(store, 1);
    std::string found;
    std::thread thread([&] {
      second.monitor()->ReportFound({.rank = 0, .reason = "rank 0 is gone"});
      found = second.monitor()->failure()->reason;
    });
    first.monitor()->ReportFound({.rank = 1, .reason = "rank 1 is gone"});
    const std::string own = first.monitor()->failure()->reason;
    thread.join();
    EXPECT_EQ(own, found);
    EXPECT_EQ(first.Await(), found);
    EXPECT_EQ(second.Await(), found);
    EXPECT_EQ(first.told(), 1);
    EXPECT_EQ(second.told(), 1);
  }
}

}  // namespace
}  // namespace ddp::internal
