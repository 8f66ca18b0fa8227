#ifndef DDP_REDUCER_BUCKETS_PER_PARAMETER_BUCKETS_H_
#define DDP_REDUCER_BUCKETS_PER_PARAMETER_BUCKETS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/communicator.h"
#include "ddp/reducer/buckets/gradient_buckets.h"

namespace ddp::internal {

// Reduces each gradient where it lies: one all-reduce for each gradient, no flat tensor. For tests:
// shows that the Reducer needs nothing but GradientBuckets. Slow, and simple on purpose.
//
// A gradient that the backward left undefined is reduced as a tensor of zeros. It becomes the
// parameter's gradient unless no rank used the parameter. Gradients are dense and contiguous;
// CopyIn() throws c10::Error for others. As with gradient_as_bucket_view, a defined gradient
// becomes the average even when the parameter is untouched.
class PerParameterBuckets final : public GradientBuckets {
 public:
  explicit PerParameterBuckets(Setup setup)
      : GradientBuckets(std::move(setup)), reduced_(parameter_count()), sums_(parameter_count()) {}

  static std::unique_ptr<GradientBuckets> Make(Setup setup) {
    return std::make_unique<PerParameterBuckets>(std::move(setup));
  }

  bool lazy() const override { return true; }
  void set_factor(double factor) override { factor_ = factor; }
  void CopyIn(int index, const at::Tensor& input) override;
  void FinishCopyIn(int /*bucket*/) override {}
  void Zero(int bucket) override;
  void Launch(int bucket) override;
  void Wait(int bucket) override;
  at::Tensor HookBuffer(int bucket) override;
  int CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched) override;
  void Discard(int bucket) override;

 private:
  double factor_ = 1;
  std::vector<at::Tensor> reduced_;          // by parameter; undefined outside of a pass
  std::vector<Communicator::Pending> sums_;  // by parameter
  std::vector<at::Tensor> hook_buffers_ = std::vector<at::Tensor>(count());  // by bucket
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_PER_PARAMETER_BUCKETS_H_
