#include "ddp/reducer/flat_buckets.h"

#include <cstring>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "ddp/common/logging.h"
#include "ddp/reducer/gradient_kernels.h"

namespace ddp::internal {
namespace {

bool IsPlain(const at::Tensor& parameter) {
  const at::ScalarType type = c10::toRealValueType(parameter.scalar_type());
  return parameter.is_cpu() && parameter.is_non_overlapping_and_dense() &&
         (type == at::kFloat || type == at::kDouble);
}

at::TensorOptions FlatOptions(const at::Tensor& parameter) {
  return at::TensorOptions()
      .dtype(c10::toRealValueType(parameter.scalar_type()))
      .device(parameter.device());
}

// Returns the part of `flat` for `parameter`, as a tensor of its own and not as a view for
// autograd: zero_grad(false) detaches in place, which a view refuses.
at::Tensor ViewOf(const at::Tensor& flat, const at::Tensor& parameter, int64_t offset,
                  int64_t count) {
  at::Tensor part = flat.narrow(0, offset, count);
  if (parameter.is_complex()) part = at::view_as_complex(part.view({count / 2, 2}));
  const at::Tensor view = parameter.is_non_overlapping_and_dense()
                              ? part.as_strided(parameter.sizes(), parameter.strides())
                              : part.view(parameter.sizes());
  return view.variable_data();
}

at::Tensor NoEntries(const at::Tensor& parameter) {
  const at::Tensor indices =
      at::empty({1, 0}, at::TensorOptions().dtype(at::kLong).device(parameter.device()));
  std::vector<int64_t> shape = parameter.sizes().vec();
  shape[0] = 0;
  return at::sparse_coo_tensor(indices, at::empty(shape, parameter.options()), parameter.sizes());
}

}  // namespace

FlatBuckets::FlatBuckets(BucketPlan plan, std::vector<at::Tensor> parameters,
                         std::vector<bool> sparse, Options options)
    : plan_(std::move(plan)),
      parameters_(std::move(parameters)),
      options_(std::move(options)),
      buckets_(plan_.buckets().size()),
      slots_(parameters_.size()) {
  for (int b = 0; b < count(); ++b) {
    Bucket& bucket = buckets_[b];
    for (const int index : plan_.buckets()[b].parameters) {
      Slot& slot = slots_[index];
      slot.bucket = b;
      slot.sparse = sparse[index];
      slot.offset = bucket.count;
      slot.count = parameters_[index].numel() * (parameters_[index].is_complex() ? 2 : 1);
      slot.plain = IsPlain(parameters_[index]);
      bucket.count += slot.count;
    }
    if (!options_.lazy) Materialize(b);
  }
}

void FlatBuckets::Materialize(int b) {
  const std::vector<int>& members = plan_.buckets()[b].parameters;
  Bucket& bucket = buckets_[b];
  if (bucket.flat.defined() || slots_[members.front()].sparse) return;
  at::NoGradGuard no_grad;
  const at::TensorOptions options = FlatOptions(parameters_[members.front()]);
  // Zeroed, so that memory without a gradient holds valid numbers.
  bucket.flat = options_.allocate ? options_.allocate(bucket.count, options)
                                  : at::zeros({bucket.count}, options);
  for (const int index : members) {
    Slot& slot = slots_[index];
    slot.view = ViewOf(bucket.flat, parameters_[index], slot.offset, slot.count);
    at::Tensor& gradient = parameters_[index].mutable_grad();
    if (options_.gradient_as_view && gradient.defined()) {
      slot.view.copy_(gradient);
      gradient = slot.view;
    }
  }
}

bool FlatBuckets::SameLayout(const Slot& slot, const at::Tensor& gradient) {
  return slot.plain && gradient.layout() == at::kStrided && gradient.is_cpu() &&
         gradient.scalar_type() == slot.view.scalar_type() &&
         gradient.strides() == slot.view.strides() && gradient.sizes() == slot.view.sizes() &&
         !gradient.is_conj() && !gradient.is_neg();
}

bool FlatBuckets::IsView(const Slot& slot, const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.is_alias_of(slot.view) &&
         gradient.storage_offset() == slot.view.storage_offset() &&
         gradient.strides() == slot.view.strides();
}

void FlatBuckets::Scale(Slot& slot, const at::Tensor& gradient) const {
  if (SameLayout(slot, gradient)) {
    if (c10::toRealValueType(gradient.scalar_type()) == at::kFloat) {
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
    if (factor_ != 1) slot.view.mul_(factor_);
    return;
  }
  WarnOfStrides(slot, gradient);
  const at::ScalarType factor_type = c10::toRealValueType(slot.view.scalar_type());
  at::mul_out(slot.view, gradient.detach(),
              at::scalar_tensor(factor_, slot.view.options().dtype(factor_type)));
}

void FlatBuckets::WarnOfStrides(Slot& slot, const at::Tensor& gradient) const {
  if (slot.warned || gradient.strides() == slot.view.strides()) return;
  slot.warned = true;
  LOG(WARNING) << "a gradient of shape " << gradient.sizes() << " has strides "
               << gradient.strides() << ", its parameter " << slot.view.strides()
               << ": copying it into its bucket is slow, the result is right";
}

void FlatBuckets::CopyIn(int parameter) {
  Slot& slot = slots_[parameter];
  if (slot.sparse) return CopyInSparse(parameter);
  Bucket& bucket = buckets_[slot.bucket];
  if (!bucket.flat.defined()) Materialize(slot.bucket);
  at::Tensor& gradient = parameters_[parameter].mutable_grad();
  if (!gradient.defined()) {
    if (slot.plain) {
      std::memset(slot.view.mutable_data_ptr(), 0, slot.count * bucket.flat.element_size());
    } else {
      at::NoGradGuard no_grad;
      slot.view.zero_();
    }
    return;
  }
  TORCH_CHECK_TYPE(gradient.layout() == at::kStrided,
                   "got a sparse gradient where a dense one was expected: only an Embedding or "
                   "EmbeddingBag with sparse=true may have one");
  TORCH_CHECK_TYPE(gradient.scalar_type() == slot.view.scalar_type(),
                   "expected a gradient of type ", slot.view.scalar_type(), ", got ",
                   gradient.scalar_type());
  if (gradient.requires_grad()) {
    LOG_EVERY_N(WARNING, 1000)
        << "a backward with create_graph is reduced: the averaged gradients are cut off from the "
           "graph, and gradients of gradients are not averaged";
  }
  if (options_.batched_copy && !SameLayout(slot, gradient) && !gradient.requires_grad()) {
    bucket.deferred.push_back(parameter);
    return;
  }
  Scale(slot, gradient);
  if (options_.gradient_as_view && !gradient.is_same(slot.view)) gradient = slot.view;
}

void FlatBuckets::FinishCopyIn(int b) {
  Bucket& bucket = buckets_[b];
  if (bucket.deferred.empty()) return;
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const int parameter : bucket.deferred) {
    from.push_back(parameters_[parameter].grad());
    to.push_back(slots_[parameter].view);
  }
  at::_foreach_copy_(to, from);
  if (bucket.deferred.size() == plan_.buckets()[b].parameters.size()) {
    bucket.flat.mul_(factor_);
  } else {
    at::_foreach_mul_(to, factor_);
  }
  if (options_.gradient_as_view) {
    for (const int parameter : bucket.deferred) {
      parameters_[parameter].mutable_grad() = slots_[parameter].view;
    }
  }
  bucket.deferred.clear();
}

void FlatBuckets::CopyInSparse(int parameter) {
  at::NoGradGuard no_grad;
  const at::Tensor& gradient = parameters_[parameter].grad();
  at::Tensor& flat = buckets_[slots_[parameter].bucket].flat;
  if (!gradient.defined()) {
    flat = NoEntries(parameters_[parameter]).coalesce();
    return;
  }
  TORCH_CHECK_TYPE(
      gradient.is_sparse(),
      "got a dense gradient where an embedding with sparse=true promised a sparse one");
  // coalesce() may return the gradient itself; mul() always returns a new tensor.
  flat = gradient.detach().coalesce().mul(factor_);
}

void FlatBuckets::Zero(int b) {
  at::NoGradGuard no_grad;
  const int first = plan_.buckets()[b].parameters.front();
  if (slots_[first].sparse) {
    buckets_[b].flat = NoEntries(parameters_[first]).coalesce();
    return;
  }
  Materialize(b);
  buckets_[b].flat.zero_();
}

int FlatBuckets::CopyOut(int b, const at::Tensor& result, const uint8_t* untouched) {
  at::NoGradGuard no_grad;
  Bucket& bucket = buckets_[b];
  const std::vector<int>& members = plan_.buckets()[b].parameters;
  if (slots_[members.front()].sparse) {
    if (untouched == nullptr || !untouched[members.front()]) {
      parameters_[members.front()].mutable_grad() = result.detach();
    }
    Discard(b);
    return -1;
  }
  if (!result.is_same(bucket.flat) && !(result.is_alias_of(bucket.flat) &&
                                        result.storage_offset() == bucket.flat.storage_offset())) {
    bucket.flat.copy_(result);
  }
  for (const int index : members) {
    const bool mine = untouched == nullptr || !untouched[index];
    if (mine && !CopyOutDense(index)) return index;
  }
  Discard(b);
  return -1;
}

void FlatBuckets::Discard(int b) {
  const std::vector<int>& members = plan_.buckets()[b].parameters;
  if (!options_.lazy && !slots_[members.front()].sparse) return;
  buckets_[b].flat.reset();
  for (const int index : members) slots_[index].view.reset();
}

bool FlatBuckets::CopyOutDense(int parameter) {
  const Slot& slot = slots_[parameter];
  at::Tensor& gradient = parameters_[parameter].mutable_grad();
  if (!gradient.defined()) {
    gradient = options_.gradient_as_view ? slot.view : slot.view.clone();
    return true;
  }
  if (IsView(slot, gradient)) return true;
  if (options_.gradient_as_view) return false;
  if (gradient.requires_grad()) {
    gradient = slot.view.clone();  // detached from the graph; CopyIn() has logged that
  } else if (slot.count > 0 && SameLayout(slot, gradient)) {  // an empty tensor's pointer is null
    std::memcpy(gradient.mutable_data_ptr(), slot.view.const_data_ptr(),
                slot.count * (slot.view.element_size() / (slot.view.is_complex() ? 2 : 1)));
  } else {
    gradient.copy_(slot.view);
  }
  return true;
}

}  // namespace ddp::internal
