#include "ddp/rpc/failure/failure_notice.h"

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/common/membership.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_group_store.h"

namespace ddp::rpc::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using GroupFailure = FailureNotice::GroupFailure;

constexpr int kRounds = 200;

// The notice of one worker, and what it has told. Like Workers, it is used and ended by different
// threads.
class Worker {
 public:
  Worker(const std::shared_ptr<FakeGroupStore>& store, int rank)
      : notice_(std::make_shared<FailureNotice>(
            store->Clone(), ddp::internal::Membership{.rank = rank, .size = 2},
            [this](const GroupFailure& failure) { OnFailure(failure); })) {}

  std::shared_ptr<FailureNotice> notice() const {
    const MutexLock lock(mutex_);
    return notice_;
  }
  void End() {
    std::shared_ptr<FailureNotice> ended;  // destroyed without the lock
    const MutexLock lock(mutex_);
    ended.swap(notice_);
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
  std::shared_ptr<FailureNotice> notice_ ABSL_GUARDED_BY(mutex_);
};

// A watchdog's thread reports until the worker ends.
TEST(FailureNoticeTest, AReportMayMeetTheEnd) {
  for (int round = 0; round < kRounds; ++round) {
    const auto store = std::make_shared<FakeGroupStore>();
    Worker worker(store, 0);
    Worker peer(store, 1);
    std::atomic<bool> started = false;
    std::thread watchdog([&] {
      while (const auto notice = worker.notice()) {
        notice->Report({.rank = 0, .reason = "the watchdog barks"});
        started = true;
      }
    });
    if (round % 2 == 0) {
      EXPECT_EQ(peer.Await(), "the watchdog barks");
    } else {
      while (!started) std::this_thread::yield();
    }
    worker.End();
    watchdog.join();
    EXPECT_EQ(worker.told(), 1);
    peer.End();
    EXPECT_LE(peer.told(), 1);
  }
}

TEST(FailureNoticeTest, AllWorkersKnowTheSameFirstFailure) {
  for (int round = 0; round < kRounds; ++round) {
    const auto store = std::make_shared<FakeGroupStore>();
    Worker first(store, 0);
    Worker second(store, 1);
    std::string found;
    std::thread thread([&] {
      found = second.notice()->ReportFound({.rank = 0, .reason = "worker 0 is gone"}).reason;
    });
    const std::string own =
        first.notice()->ReportFound({.rank = 1, .reason = "worker 1 is gone"}).reason;
    thread.join();
    EXPECT_EQ(own, found);
    EXPECT_EQ(first.Await(), found);
    EXPECT_EQ(second.Await(), found);
    EXPECT_EQ(first.told(), 1);
    EXPECT_EQ(second.told(), 1);
  }
}

}  // namespace
}  // namespace ddp::rpc::internal
