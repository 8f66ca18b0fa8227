#include "ddp/comm/arena/deferred_frees.h"

#include <unistd.h>

#include <utility>

namespace ddp::internal {

DeferredFrees::DeferredFrees() : process_(::getpid()) {}

DeferredFrees& DeferredFrees::OfProcess() {
  static DeferredFrees& frees = *new DeferredFrees();
  return frees;
}

void DeferredFrees::Add(std::function<bool()> unused, std::function<void()> free) {
  if (::getpid() != process_) return;
  {
    MutexLock lock(mutex_);
    kept_.push_back({.unused = std::move(unused), .free = std::move(free)});
  }
  Sweep();
}

void DeferredFrees::Sweep() {
  if (::getpid() != process_) return;  // the lock may be that of a thread of the parent
  MutexLock lock(mutex_);
  std::erase_if(kept_, [](const Kept& kept) {
    const bool over = kept.unused();
    if (over) kept.free();
    return over;
  });
}

}  // namespace ddp::internal
