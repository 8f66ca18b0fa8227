#include "ddp/comm/abandoned_backends.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/time/time.h"
#include "ddp/comm/reports/wake_signal.h"

namespace ddp::internal {
namespace {

// How long the exit of the process waits for operations that were told to end. They need about a
// millisecond.
constexpr absl::Duration kExitPatience = absl::Seconds(1);

bool AllCompleted(const std::vector<c10::intrusive_ptr<c10::ivalue::Future>>& futures) {
  return std::all_of(futures.begin(), futures.end(),
                     [](const auto& future) { return future->completed(); });
}

bool HasEnded(const AbandonedBackends::Entry& entry) {
  return !entry.for_good && AllCompleted(entry.futures);
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
  const auto signal = std::make_shared<WakeSignal>();
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> unfinished;
  {
    MutexLock lock(mutex_);
    for (const Entry& entry : entries_) {
      if (entry.end_operations == nullptr) continue;
      for (const auto& future : entry.futures) {
        future->addCallback([signal](c10::ivalue::Future&) { signal->Notify(); });
        unfinished.push_back(future);
      }
      entry.end_operations(*entry.backend);
    }
  }
  signal->Wait([&] { return AllCompleted(unfinished); }, kExitPatience);
  Sweep();
}

}  // namespace ddp::internal
