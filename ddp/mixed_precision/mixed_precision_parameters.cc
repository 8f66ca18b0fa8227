#include "ddp/mixed_precision/mixed_precision_parameters.h"

#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/strings/str_cat.h"
#include "ddp/comm_hook.h"
#include "ddp/common/error.h"
#include "ddp/common/torch_versions.h"
#include "ddp/default_hooks.h"

namespace ddp::internal {
namespace {

void CheckFloating(const char* name, const std::optional<at::ScalarType>& dtype) {
  if (!dtype.has_value() || c10::isFloatingType(*dtype)) return;
  throw ConfigurationError(absl::StrCat("MixedPrecision::", name, "=", c10::toString(*dtype),
                                        " must be a floating-point type, such as BFloat16"));
}

// Makes `tensor` use the data and type of `other`. Unlike set_data(), keeps the gradient
// accumulator, and with it the type of the gradients.
void Point(const at::Tensor& tensor, const at::Tensor& other) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(other.getIntrusivePtr());
}

}  // namespace

void CheckMixedPrecision(const MixedPrecision& config) {
  CheckFloating("param_dtype", config.param_dtype);
  CheckFloating("reduce_dtype", config.reduce_dtype);
  CheckFloating("buffer_dtype", config.buffer_dtype);
}

struct MixedPrecisionParameters::Item {
  at::Tensor tensor;
  at::Tensor whole;  // uses the full-precision storage; defined while low
  at::Tensor copy;   // in low precision
  // Owned while low: autograd would otherwise make another accumulator, of the wrong type.
  torch_versions::NodePtr accumulator;
};

MixedPrecisionParameters::MixedPrecisionParameters(const std::vector<at::Tensor>& parameters,
                                                   at::ScalarType dtype)
    : dtype_(dtype) {
  for (const at::Tensor& parameter : parameters) {
    if (parameter.is_floating_point()) items_.push_back({.tensor = parameter});
  }
}

MixedPrecisionParameters::~MixedPrecisionParameters() { Restore(); }

void MixedPrecisionParameters::BeginForward() {
  Restore();
  DropCopies();
  PointToCopies();
}

void MixedPrecisionParameters::EndForward(bool backward_may_follow) {
  Restore();
  if (!backward_may_follow) DropCopies();
}

void MixedPrecisionParameters::BeginBackward() {
  if (!low_) PointToCopies();
}

void MixedPrecisionParameters::EndBackward() {
  Restore();
  DropCopies();
}

void MixedPrecisionParameters::PointToCopies() {
  const at::NoGradGuard no_grad;
  for (Item& item : items_) {  // first everything that may throw
    item.whole.reset();
    if (item.tensor.scalar_type() == dtype_) continue;
    if (!item.copy.defined()) item.copy = item.tensor.detach().to(dtype_);
    if (item.tensor.requires_grad()) {
      item.accumulator = torch::autograd::impl::grad_accumulator(item.tensor);
    }
    item.whole = item.tensor.variable_data();
  }
  for (const Item& item : items_) {
    if (item.whole.defined()) Point(item.tensor, item.copy);
  }
  low_ = true;
}

void MixedPrecisionParameters::Restore() {
  if (!low_) return;
  for (Item& item : items_) {
    if (!item.whole.defined()) continue;
    Point(item.tensor, item.whole);
    item.whole.reset();
  }
  low_ = false;
}

void MixedPrecisionParameters::DropCopies() {
  for (Item& item : items_) item.copy.reset();
}

void CastBuffers(const std::vector<at::Tensor>& buffers, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& buffer : buffers) {
    if (!buffer.defined() || !buffer.is_floating_point()) continue;
    if (buffer.scalar_type() != dtype) Point(buffer, buffer.detach().to(dtype));
  }
}

at::Tensor CastInput(const at::Tensor& tensor, at::ScalarType dtype) {
  if (!tensor.defined() || !tensor.is_floating_point()) return tensor;
  return tensor.to(dtype);
}

CommHook reduce_dtype_hook(std::shared_ptr<ProcessGroup> group, at::ScalarType dtype) {
  return [group = std::move(group), dtype](GradBucket& bucket) {
    return AverageInType(dtype, group, bucket);
  };
}

}  // namespace ddp::internal
