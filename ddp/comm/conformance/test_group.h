// A group of connected ranks of one TestedBackend, which are threads of the test.
#ifndef DDP_COMM_CONFORMANCE_TEST_GROUP_H_
#define DDP_COMM_CONFORMANCE_TEST_GROUP_H_

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/conformance/test_backends.h"
#include "testing/backend/test_threads.h"

namespace ddp::internal {

// Blocks until the operation has ended. Throws its error: also for a Work made of a future, whose
// wait() throws nothing.
inline void Await(const c10::intrusive_ptr<c10d::Work>& work) {
  work->wait();
  if (!work->isSuccess()) std::rethrow_exception(work->exception());
}

// One rank of a group. Used by one thread at a time.
class TestRank {
 public:
  TestRank(const TestedBackend& kind, BackendPtr backend)
      : rank(backend->getRank()),
        size(backend->getSize()),
        claims_(kind.claims),
        backend_(backend) {
    if (kind.add_traits != nullptr) kind.add_traits(traits_);
  }

  // Starts an operation: returns launch(backend).
  template <typename Launch>
  c10::intrusive_ptr<c10d::Work> Start(const Launch& launch) const {
    if (traits_.launch_mutex == nullptr) return launch(*backend_);
    MutexLock lock(*traits_.launch_mutex);
    return launch(*backend_);
  }

  // To be called when all operations are complete, before and after one that must be alone.
  void Settle() const {
    while (traits_.settled != nullptr && !traits_.settled(*backend_)) std::this_thread::yield();
  }

  c10::intrusive_ptr<c10d::Work> StartSum(const at::Tensor& tensor) const {
    return Start([&](c10d::Backend& backend) {
      std::vector<at::Tensor> tensors = {tensor};
      return backend.allreduce(tensors);
    });
  }

  // Ends the operations in progress with errors. Nothing is started afterwards.
  void Abort() {
    if (traits_.end_operations != nullptr) {
      traits_.end_operations(*backend_);
    } else {
      backend_->abort();
    }
  }

  // Destroys the backend as ddp/ does it.
  void Destroy() {
    if (traits_.end_operations != nullptr) traits_.end_operations(*backend_);
    backend_.reset();
  }

  void SetTimeout(absl::Duration timeout) const {
    backend_->setTimeout(absl::ToChronoMilliseconds(timeout));
  }

  const Claims& claims() const { return claims_; }

  const int rank;
  const int size;

 private:
  const Claims claims_;
  BackendPtr backend_;
  BackendTraits traits_;
};

// The tensors are small, and every rank is a thread: threads of ATen's own would only be in the
// way.
inline void UseOneThread() { at::set_num_threads(1); }

class TestGroup {
 public:
  // Connects the ranks by a store of their own.
  TestGroup(const TestedBackend& kind, int size)
      : TestGroup(kind, size, c10::make_intrusive<c10d::HashStore>()) {}

  // Connects the ranks by `store`.
  TestGroup(const TestedBackend& kind, int size, const c10::intrusive_ptr<c10d::Store>& store)
      : maker_(kind.new_group(nullptr)), ranks_(size) {
    testing::RunThreads(size, [&](int rank) {
      UseOneThread();
      ranks_[rank] =
          std::make_unique<TestRank>(kind, maker_({.store = store, .rank = rank, .size = size}));
    });
  }

  int size() const { return static_cast<int>(ranks_.size()); }

  TestRank& rank(int rank) { return *ranks_.at(rank); }

  // Runs `body` in a thread of each rank.
  void Run(const std::function<void(TestRank&)>& body) {
    testing::RunThreads(size(), [&](int rank) {
      UseOneThread();
      body(*ranks_[rank]);
    });
  }

 private:
  const RankMaker maker_;
  std::vector<std::unique_ptr<TestRank>> ranks_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_CONFORMANCE_TEST_GROUP_H_
