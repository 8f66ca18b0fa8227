#include "ddp/reducer/buckets/per_parameter_buckets.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {

void PerParameterBuckets::CopyIn(int index, const at::Tensor& /*input*/) {
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (!gradient.defined()) {
    reduced_[index] = at::zeros_like(parameter(index), at::MemoryFormat::Contiguous);
    return;
  }
  TORCH_CHECK_TYPE(gradient.layout() == at::kStrided && gradient.is_contiguous(),
                   "expected a dense, contiguous gradient");
  reduced_[index] = gradient.detach();  // shares the gradient's memory
  reduced_[index].mul_(factor_);
}

void PerParameterBuckets::Zero(int bucket) {
  const at::NoGradGuard no_grad;
  for (const int index : members(bucket)) {
    reduced_[index] = at::zeros_like(parameter(index), at::MemoryFormat::Contiguous);
  }
}

void PerParameterBuckets::Launch(int bucket) {
  for (const int index : members(bucket)) {
    sums_[index] = communicator().AllReduce(reduced_[index], {"the all-reduce of gradient", index});
  }
}

void PerParameterBuckets::Wait(int bucket) {
  for (const int index : members(bucket)) communicator().Wait(sums_[index]);
}

at::Tensor PerParameterBuckets::HookBuffer(int bucket) {
  const at::NoGradGuard no_grad;
  at::Tensor& buffer = hook_buffers_[bucket];
  if (buffer.defined()) return buffer;
  std::vector<at::Tensor> parts;
  for (const int index : members(bucket)) parts.push_back(reduced_[index].view({-1}));
  buffer = at::cat(parts);
  return buffer;
}

int PerParameterBuckets::CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched) {
  const at::NoGradGuard no_grad;
  int64_t offset = 0;
  for (const int index : members(bucket)) {
    at::Tensor& reduced = reduced_[index];
    if (result.defined()) {
      reduced.copy_(result.narrow(0, offset, reduced.numel()).view(reduced.sizes()));
      offset += reduced.numel();
    }
    const at::Tensor& gradient = GradientOf(parameter(index));
    if (!gradient.defined()) {
      if (untouched == nullptr || untouched[index] == 0) {
        SetGradientOf(parameter(index), reduced);
      }
    } else if (!gradient.is_alias_of(reduced)) {
      gradient.copy_(reduced);  // a hook of the program replaced it
    }
  }
  Discard(bucket);
  return -1;
}

void PerParameterBuckets::Discard(int bucket) {
  hook_buffers_[bucket].reset();
  for (const int index : members(bucket)) {
    reduced_[index].reset();
    sums_[index] = {};
  }
}

}  // namespace ddp::internal
