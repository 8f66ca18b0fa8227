#ifndef DDP_OPTIM_GRADIENT_SCATTER_H_
#define DDP_OPTIM_GRADIENT_SCATTER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/common/grad_bucket.h"
#include "ddp/optim/shard_plan.h"

namespace ddp {
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

class ShardedParameters;

// A model's comm hook that reduce-scatters each bucket of the plan: a rank gets the average of the
// elements that it owns. Every other bucket is all-reduced. Divides as allreduce_hook does.
//
// After a scattered backward, the other elements of .grad are not averages. A further backward must
// not add to them: it throws ReductionError, after a report to the peers. A backward in a
// distributed autograd context throws ConfigurationError: an optimizer of such a context would step
// with gradients that are averages in one slice only.
//
// Owned by the model and by the optimizer. Thread-compatible, except Stop(): any thread.
class GradientScatter : public std::enable_shared_from_this<GradientScatter> {
 public:
  // `divisor` returns the divisor of the current pass; used under a Join only.
  GradientScatter(std::shared_ptr<ProcessGroup> group, std::function<int()> divisor);

  // From now on, scatters the buckets of the plan, and watches the gradients of their parameters.
  void SetPlan(const ShardedParameters& parameters);

  // The comm hook.
  static TensorFuture Hook(const std::shared_ptr<GradientScatter>& scatter, GradBucket& bucket);

  // Under a Join, gradients are all-reduced: a rank that has joined gets its part of them from
  // another rank.
  void set_under_join(bool under_join) { under_join_ = under_join; }

  // Makes every later bucket all-reduced. Called when the optimizer ends.
  void Stop() { stopped_ = true; }

 private:
  struct Bucket {
    std::vector<const c10::TensorImpl*> parameters;
    std::vector<int> numbers;
    int64_t part = 0;
  };

  const Bucket* Find(const GradBucket& bucket) const;
  TensorFuture Reduce(GradBucket& bucket);
  TensorFuture Scatter(const Bucket& plan, const at::Tensor& buffer);
  void CheckGradient(int parameter);

  const std::shared_ptr<ProcessGroup> group_;
  const std::function<int()> divisor_;
  std::vector<Bucket> buckets_;
  std::vector<at::Tensor> watched_;
  std::vector<bool> must_be_clear_;  // by parameter: its gradient was scattered
  bool under_join_ = false;
  std::atomic<bool> stopped_ = false;
};

// Returns the layout that gives the model the buckets of the plan: names of the parameters that the
// model reduces, by bucket. `names` and `tensors` are the model's.
std::vector<std::vector<std::string>> ScatterLayout(const ShardedParameters& parameters,
                                                    const std::vector<std::string>& names,
                                                    const std::vector<at::Tensor>& tensors,
                                                    const std::vector<bool>& sparse);

}  // namespace ddp::internal

#endif  // DDP_OPTIM_GRADIENT_SCATTER_H_
