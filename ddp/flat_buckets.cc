#include "ddp/flat_buckets.h"

#include <cstring>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "ddp/gradient_kernels.h"

namespace ddp {
namespace {

bool IsPlain(const at::Tensor& parameter) {
  return parameter.is_cpu() && parameter.is_non_overlapping_and_dense() &&
         (parameter.scalar_type() == at::kFloat || parameter.scalar_type() == at::kDouble);
}

}  // namespace

FlatBuckets::FlatBuckets(BucketPlan plan, std::vector<at::Tensor> parameters, int divisor,
                         bool gradient_as_view)
    : plan_(std::move(plan)),
      parameters_(std::move(parameters)),
      factor_(1.0 / divisor),
      gradient_as_view_(gradient_as_view),
      slots_(parameters_.size()) {
  at::NoGradGuard no_grad;
  for (const BucketPlan::Bucket& bucket : plan_.buckets()) {
    int64_t count = 0;
    for (const int index : bucket.parameters) {
      Slot& slot = slots_[index];
      slot.bucket = static_cast<int>(flats_.size());
      slot.offset = count;
      slot.count = parameters_[index].numel();
      slot.plain = IsPlain(parameters_[index]);
      count += slot.count;
    }
    // Zeroed, so that memory which no gradient has reached yet holds numbers.
    flats_.push_back(at::zeros({count}, parameters_[bucket.parameters.front()].options()));
    for (const int index : bucket.parameters) {
      const at::Tensor& parameter = parameters_[index];
      Slot& slot = slots_[index];
      const at::Tensor view =
          parameter.is_non_overlapping_and_dense()
              ? flats_.back().as_strided(parameter.sizes(), parameter.strides(), slot.offset)
              : flats_.back().narrow(0, slot.offset, slot.count).view(parameter.sizes());
      // For autograd a tensor of its own: zero_grad(false) detaches in place, which a view refuses.
      slot.view = view.variable_data();
      at::Tensor& gradient = parameters_[index].mutable_grad();
      if (gradient_as_view_ && gradient.defined()) {
        slot.view.copy_(gradient);
        gradient = slot.view;
      }
    }
  }
}

bool FlatBuckets::SameLayout(const Slot& slot, const at::Tensor& gradient) {
  return slot.plain && gradient.layout() == at::kStrided && gradient.is_cpu() &&
         gradient.scalar_type() == slot.view.scalar_type() &&
         gradient.strides() == slot.view.strides() && gradient.sizes() == slot.view.sizes();
}

bool FlatBuckets::IsView(const Slot& slot, const at::Tensor& gradient) const {
  return gradient.is_alias_of(slot.view) &&
         gradient.storage_offset() == slot.view.storage_offset() &&
         gradient.strides() == slot.view.strides();
}

void FlatBuckets::Scale(Slot& slot, const at::Tensor& gradient) const {
  if (SameLayout(slot, gradient)) {
    if (gradient.scalar_type() == at::kFloat) {
      ScaleCopy(static_cast<const float*>(gradient.const_data_ptr()), static_cast<float>(factor_),
                slot.count, static_cast<float*>(slot.view.mutable_data_ptr()));
    } else {
      ScaleCopy(static_cast<const double*>(gradient.const_data_ptr()), factor_, slot.count,
                static_cast<double*>(slot.view.mutable_data_ptr()));
    }
    return;
  }
  at::NoGradGuard no_grad;
  if (IsView(slot, gradient)) {
    slot.view.mul_(factor_);
  } else {
    at::mul_out(slot.view, gradient.detach(), at::scalar_tensor(factor_, slot.view.options()));
  }
}

void FlatBuckets::CopyIn(int parameter) {
  Slot& slot = slots_[parameter];
  at::Tensor& gradient = parameters_[parameter].mutable_grad();
  if (!gradient.defined()) {
    at::NoGradGuard no_grad;
    slot.view.zero_();
    return;
  }
  TORCH_CHECK_TYPE(gradient.scalar_type() == slot.view.scalar_type(),
                   "expected a gradient of type ", slot.view.scalar_type(), ", got ",
                   gradient.scalar_type());
  Scale(slot, gradient);
  if (gradient_as_view_ && !gradient.is_same(slot.view)) gradient = slot.view;
}

void FlatBuckets::CopyOut(int bucket) {
  at::NoGradGuard no_grad;
  for (const int index : plan_.buckets()[bucket].parameters) {
    const Slot& slot = slots_[index];
    at::Tensor& gradient = parameters_[index].mutable_grad();
    if (!gradient.defined()) {
      gradient = gradient_as_view_ ? slot.view : slot.view.clone();
    } else if (!IsView(slot, gradient)) {
      if (SameLayout(slot, gradient)) {
        std::memcpy(gradient.mutable_data_ptr(), slot.view.const_data_ptr(),
                    slot.count * slot.view.element_size());
      } else {
        gradient.copy_(slot.view);
      }
    }
  }
}

}  // namespace ddp
