#ifndef DDP_REDUCER_DELAYED_ALL_REDUCE_H_
#define DDP_REDUCER_DELAYED_ALL_REDUCE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/communicator.h"
#include "ddp/reducer/buckets/parameter_uses.h"

namespace ddp::internal {

class ModelGroup;

// Averages the gradients of some parameters outside of the buckets, in one all-reduce that the
// gradient of another parameter, the trigger, starts. Implements
// DistributedDataParallelOptions::delay_all_reduce_named_params. Owned by a ModelSynchronizer.
//
// The gradients are parts of one flat tensor. One that the program has removed or replaced, also
// between forward and backward, becomes a part again with its value, before the all-reduce. The
// all-reduce starts on the backward's thread, and the backward ends after it is complete. A delayed
// gradient that comes while the all-reduce is in progress throws ReductionError: it would be
// missing in the average, and change memory that other ranks read. When another model of this
// process reduces one of the parameters too, the all-reduce works on a copy, and the gradients
// change at the end of the backward. Thread-compatible.
class DelayedAllReduce {
 public:
  // The start of the all-reduce. It may start at the trigger only when the trigger has the same
  // place among the buckets on every rank. Otherwise it starts after the buckets.
  enum class When {
    kAtTrigger,       // Complete() waits for it
    kAfterBuckets,    // in Complete()
    kAtTriggerAlone,  // there are no buckets: a callback of the backward waits
  };

  // Throws ConfigurationError when one of `parameters` requires no gradient, or when they differ in
  // type or device. Their gradients must be dense.
  DelayedAllReduce(std::vector<std::pair<std::string, at::Tensor>> parameters,
                   const at::Tensor& trigger, std::shared_ptr<ModelGroup> group, When start);

  // Removes its hooks from the trigger and the parameters.
  ~DelayedAllReduce();
  DelayedAllReduce(const DelayedAllReduce&) = delete;
  DelayedAllReduce& operator=(const DelayedAllReduce&) = delete;

  // Called after a forward. `synchronize`: whether the next backward is averaged. Sets the
  // gradients to zero after an average.
  void EndForward(bool synchronize);

  void set_start(When start) { start_ = start; }

  // Called at the end of a pass, on every rank with inputs. The gradients are averages when it
  // returns. `divisor` is used only when the all-reduce starts in this call.
  void Complete(int divisor);

  // Sets the function that announces an all-reduce from the trigger to a Join, and returns the
  // divisor. Unset: the divisor is the world size.
  void set_announce(std::function<int()> announce) { announce_ = std::move(announce); }

  // Takes part in an all-reduce of the other ranks with zeros, on a joined rank.
  void Shadow();

  // Starts again over `group`, with gradients of zero in new memory.
  void Reset(std::shared_ptr<ModelGroup> group);

 private:
  void PointGradients();   // at zeros in new memory
  void GatherGradients();  // into the flat tensor, where they are not its parts
  void OnTrigger();
  void OnDelayed(size_t parameter);
  [[noreturn]] void FailSecondGradient(const std::string& name);
  [[noreturn]] void Fail(const std::string& problem);
  bool shared() const;
  void Start(int divisor);
  void Finish();

  const std::vector<std::pair<std::string, at::Tensor>> parameters_;
  const at::Tensor trigger_;
  const ParameterUses uses_;
  std::shared_ptr<ModelGroup> group_;
  std::function<int()> announce_;
  at::Tensor flat_;
  unsigned hook_ = 0;            // of the trigger
  std::vector<unsigned> hooks_;  // of the parameters
  When start_;
  bool synchronize_ = false;
  bool averaged_ = false;
  std::vector<uint8_t> came_;  // by parameter: its gradient has come since the last forward
  at::Tensor average_;         // in progress, or complete: `flat_`, or a copy
  Communicator::Pending pending_;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_DELAYED_ALL_REDUCE_H_
