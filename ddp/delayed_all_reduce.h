#ifndef DDP_DELAYED_ALL_REDUCE_H_
#define DDP_DELAYED_ALL_REDUCE_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/communicator.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

// Averages the gradients of some parameters outside of the buckets, all at once, when the gradient
// of one other parameter comes: DistributedDataParallelOptions::delay_all_reduce_named_params.
//
// The gradients are parts of one flat tensor from the beginning. The all-reduce starts on the
// backward's thread, and the backward does not end before it is complete. Thread-compatible.
class DelayedAllReduce {
 public:
  // When the all-reduce starts. Only where the trigger comes at the same place among the buckets on
  // every rank may it start there; otherwise it waits for them.
  enum class When {
    kAtTrigger,       // and Complete() waits for it
    kAfterBuckets,    // in Complete()
    kAtTriggerAlone,  // there are no buckets: a callback of the backward waits for it
  };

  // `parameters` are dense, of one type and on one device. Throws ConfigurationError else.
  DelayedAllReduce(std::vector<std::pair<std::string, at::Tensor>> parameters,
                   const at::Tensor& trigger, std::shared_ptr<ProcessGroup> group, When start);

  // Takes its hook back.
  ~DelayedAllReduce();
  DelayedAllReduce(const DelayedAllReduce&) = delete;
  DelayedAllReduce& operator=(const DelayedAllReduce&) = delete;

  // After a forward: whether the next backward is to be averaged. The first time after an average
  // the gradients become zero, as a new iteration's.
  void EndForward(bool synchronize);

  void set_start(When start) { start_ = start; }

  // At the end of a pass, on every rank: the gradients are averages when it returns.
  void Complete(int divisor);

  // Under a Join, where there are no buckets: called before the all-reduce, gives what sums are
  // divided by. Unset: world size.
  void set_announce(std::function<int()> announce) { announce_ = std::move(announce); }

  // Takes part in an all-reduce of the others with zeros.
  void Shadow();

  void Reset(std::shared_ptr<ProcessGroup> group);

 private:
  void PointGradients();
  void OnTrigger();
  void Start(int divisor);
  void Finish();

  const std::vector<std::pair<std::string, at::Tensor>> parameters_;
  const at::Tensor trigger_;
  std::shared_ptr<ProcessGroup> group_;
  std::function<int()> announce_;
  at::Tensor flat_;
  unsigned hook_ = 0;
  When start_;
  bool synchronize_ = false;
  bool averaged_ = false;
  Communicator::Pending pending_;
};

}  // namespace ddp::internal

#endif  // DDP_DELAYED_ALL_REDUCE_H_
