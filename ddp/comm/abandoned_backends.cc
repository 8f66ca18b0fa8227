#include "ddp/comm/abandoned_backends.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/time/time.h"
#include "base/clock.h"

namespace ddp::internal {
namespace {

// How long the exit of the process waits for operations that were told to end. They need about a
// millisecond.
constexpr absl::Duration kExitPatience = absl::Seconds(1);

// Counts futures that are not complete. Thread-safe. Owned by a std::shared_ptr, which the futures
// hold too.
class Countdown : public std::enable_shared_from_this<Countdown> {
 public:
  void Add(c10::ivalue::Future& future) {
    {
      MutexLock lock(mutex_);
      ++left_;
    }
    future.addCallback([self = shared_from_this()](c10::ivalue::Future&) {
      MutexLock lock(self->mutex_);
      --self->left_;
      self->changed_.NotifyAll();
    });
  }

  void Wait(absl::Duration limit) {
    const MonotonicClock clock;
    const absl::Time end = clock.Now() + limit;
    MutexLock lock(mutex_);
    while (left_ > 0 && clock.Now() < end) (void)changed_.WaitFor(mutex_, end - clock.Now());
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  int left_ ABSL_GUARDED_BY(mutex_) = 0;
};

bool HasEnded(const AbandonedBackends::Entry& entry) {
  return !entry.for_good && std::all_of(entry.futures.begin(), entry.futures.end(),
                                        [](const auto& future) { return future->completed(); });
}

}  // namespace

AbandonedBackends& AbandonedBackends::Instance() {
  static auto* const instance = new AbandonedBackends();
  return *instance;
}

void AbandonedBackends::Add(Entry entry) {
  {
    MutexLock lock(mutex_);
    entries_.push_back(std::move(entry));
  }
  // For each entry, because a global object may add one during the exit. Handlers run before the
  // global objects of LibTorch are destroyed: these are older.
  std::atexit([] { Instance().EndAll(); });
}

void AbandonedBackends::Sweep() {
  std::vector<Entry> ended;  // destroyed without the lock: destruction joins backend threads
  MutexLock lock(mutex_);
  const auto over = std::partition(entries_.begin(), entries_.end(),
                                   [](const Entry& entry) { return !HasEnded(entry); });
  std::move(over, entries_.end(), std::back_inserter(ended));
  entries_.erase(over, entries_.end());
}

void AbandonedBackends::EndAll() {
  const auto unfinished = std::make_shared<Countdown>();
  {
    MutexLock lock(mutex_);
    for (const Entry& entry : entries_) {
      if (entry.end_operations == nullptr) continue;
      for (const auto& future : entry.futures) unfinished->Add(*future);
      entry.end_operations(*entry.backend);
    }
  }
  unfinished->Wait(kExitPatience);
  Sweep();
}

}  // namespace ddp::internal
