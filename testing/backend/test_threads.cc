#include "testing/backend/test_threads.h"

#include <glog/logging.h>
#include <gtest/gtest.h>

#include <exception>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace ddp::testing {
namespace {

constexpr absl::Duration kDeadline = absl::Minutes(2);

// The ranks whose threads have not returned. Thread-safe.
class RunningRanks {
 public:
  explicit RunningRanks(int count) {
    for (int rank = 0; rank < count; ++rank) running_.insert(rank);
  }

  void Remove(int rank) {
    MutexLock lock(mutex_);
    running_.erase(rank);
    changed_.NotifyAll();
  }

  // Blocks until there are none.
  void AwaitNone() {
    const MonotonicClock clock;
    const absl::Time deadline = clock.Now() + kDeadline;
    MutexLock lock(mutex_);
    while (!running_.empty()) {
      const absl::Duration left = deadline - clock.Now();
      CHECK(left > absl::ZeroDuration())
          << "these ranks have not returned after " << absl::FormatDuration(kDeadline) << ": "
          << absl::StrJoin(running_, ", ");
      changed_.WaitFor(mutex_, left);
    }
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::set<int> running_ ABSL_GUARDED_BY(mutex_);
};

void RunAndReport(const std::function<void()>& body, const std::string& who) {
  SCOPED_TRACE(who);
  try {
    body();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an exception ended " << who << ": " << error.what();
  }
}

// A case of one world size.
class SizedTest : public ::testing::Test {
 public:
  SizedTest(std::function<void(int)> run, int size) : run_(std::move(run)), size_(size) {}

 private:
  void TestBody() override { run_(size_); }

  const std::function<void(int)> run_;
  const int size_;
};

}  // namespace

void RunThreads(int count, const std::function<void(int)>& body,
                const std::function<void()>& conduct) {
  RunningRanks running(count);
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      RunAndReport([&] { body(rank); }, absl::StrCat("rank ", rank));
      running.Remove(rank);
    });
  }
  if (conduct) RunAndReport(conduct, "the conductor");
  running.AwaitNone();
  for (std::thread& thread : threads) thread.join();
}

namespace internal {

bool RegisterSizedTest(const char* suite, const char* name, const char* file, int line,
                       const std::vector<int>& sizes, const std::function<void(int)>& run) {
  CHECK(!sizes.empty()) << name << " has no case";
  for (const int size : sizes) {
    CHECK_GE(size, 1) << name;
    const std::string suffix = sizes.size() > 1 ? absl::StrCat("On", size) : "";
    // The type of the fixture is that of TEST, so that a suite can have both.
    ::testing::RegisterTest(suite, absl::StrCat(name, suffix).c_str(), nullptr, nullptr, file, line,
                            [run, size]() -> ::testing::Test* { return new SizedTest(run, size); });
  }
  return true;
}

}  // namespace internal
}  // namespace ddp::testing
