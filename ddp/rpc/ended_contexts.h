#ifndef DDP_RPC_ENDED_CONTEXTS_H_
#define DDP_RPC_ENDED_CONTEXTS_H_

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/container/flat_hash_set.h"
#include "base/mutex.h"

namespace ddp::rpc::internal {

// The autograd contexts that have ended on this worker, the newest of them. A call of such a
// context may still come or run here, when its caller has not waited for the answer. LibTorch makes
// a context for the call, and nobody would end that one.
//
// Free of LibTorch. Thread-safe.
class EndedContexts {
 public:
  static constexpr size_t kKept = 4096;

  // Call it before the context is released.
  void Add(int64_t context) {
    MutexLock lock(mutex_);
    if (!contexts_.insert(context).second) return;
    order_.push_back(context);
    if (order_.size() <= kKept) return;
    contexts_.erase(order_.front());
    order_.pop_front();
  }

  // Call it after a call of the context.
  bool Contains(int64_t context) const {
    MutexLock lock(mutex_);
    return contexts_.contains(context);
  }

 private:
  mutable Mutex mutex_;
  absl::flat_hash_set<int64_t> contexts_ ABSL_GUARDED_BY(mutex_);
  std::deque<int64_t> order_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_ENDED_CONTEXTS_H_
