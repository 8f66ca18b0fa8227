#include "ddp/reducer/buckets/local_reduction.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include "ddp/comm/communicator.h"
#include "ddp/common/logging.h"
#include "ddp/reducer/buckets/gradient_check.h"
#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {

LocalReduction::LocalReduction(Setup setup) : GradientBuckets(std::move(setup)) {}

GradientBuckets::Factory LocalReduction::MakerOf(Factory otherwise) {
  return [otherwise = std::move(otherwise)](Setup setup) -> std::unique_ptr<GradientBuckets> {
    if (setup.communicator().size() > 1) return otherwise(std::move(setup));
    return std::make_unique<LocalReduction>(std::move(setup));
  };
}

void LocalReduction::CopyIn(int index, const at::Tensor& /*input*/) {
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (!gradient.defined()) return;
  if (sparse(index)) {
    CheckSparseGradient(gradient);
  } else {
    CheckDenseGradient(gradient, parameter(index));
  }
}

// As in larger groups, a zero_grad() does not reach the gradients until finalize_backward(). A
// gradient of several models stays: each of them returns its own.
void LocalReduction::Hold() {
  held_.resize(parameter_count());
  for (int bucket = 0; bucket < count(); ++bucket) {
    for (const int index : members(bucket)) {
      if (shared(index)) continue;
      held_[index] = GradientOf(parameter(index));
      SetGradientOf(parameter(index), {});
    }
  }
}

void LocalReduction::Return(int bucket) {
  if (held_.empty()) return;
  for (const int index : members(bucket)) {
    if (held_[index].defined()) SetGradientOf(parameter(index), std::move(held_[index]));
  }
  if (bucket + 1 == count()) held_.clear();
}

at::Tensor LocalReduction::HookBuffer(int bucket) {
  LOG(FATAL) << "a comm hook needs flat buckets, and bucket " << bucket << " has none";
  return {};
}

int LocalReduction::CopyOut(int bucket, const at::Tensor& /*result*/, const uint8_t* untouched) {
  const at::NoGradGuard no_grad;
  Return(bucket);
  for (const int index : members(bucket)) {
    if (untouched == nullptr || !untouched[index]) CopyOutOne(index);
  }
  return -1;
}

// The average is a new tensor wherever it differs from the gradient, because two gradients may
// share memory.
void LocalReduction::CopyOutOne(int index) const {
  const at::Tensor& leaf = parameter(index);
  const at::Tensor& gradient = GradientOf(leaf);
  if (!gradient.defined()) {
    return SetGradientOf(leaf, sparse(index) ? SparseZeros(leaf) : at::zeros_like(leaf));
  }
  if (factor_ == 1 && !sparse(index) && !gradient.requires_grad()) return;
  at::Tensor average = gradient.detach();
  if (sparse(index)) average = average.coalesce();
  if (factor_ != 1) average = average.mul(factor_);
  SetGradientOf(leaf, std::move(average));
}

}  // namespace ddp::internal
