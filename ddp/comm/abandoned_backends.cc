#include "ddp/comm/abandoned_backends.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <utility>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "absl/time/time.h"
#include "base/mutex.h"
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

bool HasEnded(const AbandonedBackend& backend) {
  return !backend.for_good && AllCompleted(backend.futures);
}

// One object for the process, because the exit of the process has to find it. Never destroyed.
struct Kept {
  Mutex mutex;
  std::vector<AbandonedBackend> backends ABSL_GUARDED_BY(mutex);

  static Kept& Instance() {
    static auto* const instance = new Kept();
    return *instance;
  }
};

// Ends the operations of all backends, and frees those that have ended within a second.
void EndAll() {
  Kept& kept = Kept::Instance();
  const auto signal = std::make_shared<WakeSignal>();
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> unfinished;
  {
    MutexLock lock(kept.mutex);
    for (const AbandonedBackend& one : kept.backends) {
      if (one.end_operations == nullptr) continue;
      for (const auto& future : one.futures) {
        future->addCallback([signal](c10::ivalue::Future&) { signal->Notify(); });
        unfinished.push_back(future);
      }
      one.end_operations(*one.backend);
    }
  }
  signal->Wait([&] { return AllCompleted(unfinished); }, kExitPatience);
  FreeEndedBackends();
}

}  // namespace

void Abandon(AbandonedBackend backend) {
  {
    Kept& kept = Kept::Instance();
    MutexLock lock(kept.mutex);
    kept.backends.push_back(std::move(backend));
  }
  // For each backend, because a global object may add one during the exit. Handlers run before the
  // global objects of LibTorch are destroyed: these are older.
  std::atexit(&EndAll);
}

void FreeEndedBackends() {
  Kept& kept = Kept::Instance();
  std::vector<AbandonedBackend> ended;  // destroyed without the lock: this joins backend threads
  MutexLock lock(kept.mutex);
  const auto over = std::partition(kept.backends.begin(), kept.backends.end(),
                                   [](const AbandonedBackend& one) { return !HasEnded(one); });
  std::move(over, kept.backends.end(), std::back_inserter(ended));
  kept.backends.erase(over, kept.backends.end());
}

}  // namespace ddp::internal
