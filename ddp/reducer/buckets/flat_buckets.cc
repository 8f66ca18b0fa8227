#include "ddp/reducer/buckets/flat_buckets.h"

#include <cstring>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/view_as_complex.h>

#include "ddp/common/logging.h"
#include "ddp/reducer/buckets/gradient_context.h"
#include "ddp/reducer/buckets/gradient_kernels.h"

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

FlatBuckets::FlatBuckets(Setup setup, Options options)
    : GradientBuckets(std::move(setup)),
      options_(options),
      buckets_(plan().buckets().size()),
      slots_(parameter_count()) {
  for (int b = 0; b < count(); ++b) {
    Bucket& bucket = buckets_[b];
    for (const int index : members(b)) {
      Slot& slot = slots_[index];
      slot.bucket = b;
      slot.sparse = sparse(index);
      slot.offset = bucket.count;
      slot.count = parameter(index).numel() * (parameter(index).is_complex() ? 2 : 1);
      slot.plain = IsPlain(parameter(index));
      bucket.count += slot.count;
    }
    if (!options_.lazy) Materialize(b);
  }
}

GradientBuckets::Factory FlatBuckets::MakerOf(Options options) {
  return
      [options](Setup setup) { return std::make_unique<FlatBuckets>(std::move(setup), options); };
}

void FlatBuckets::Materialize(int b) {
  Bucket& bucket = buckets_[b];
  if (bucket.flat.defined() || sparse(members(b).front())) return;
  at::NoGradGuard no_grad;
  const at::TensorOptions options = FlatOptions(parameter(members(b).front()));
  // Zeroed, so that memory without a gradient holds valid numbers.
  bucket.flat = communicator().AllocateBuffer(bucket.count, options);
  for (const int index : members(b)) {
    Slot& slot = slots_[index];
    slot.view = ViewOf(bucket.flat, parameter(index), slot.offset, slot.count);
    const at::Tensor& gradient = GradientOf(parameter(index));
    if (options_.gradient_as_view && gradient.defined()) {
      slot.view.copy_(gradient);
      SetGradientOf(parameter(index), slot.view);
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

void FlatBuckets::CopyIn(int index) {
  Slot& slot = slots_[index];
  if (slot.sparse) return CopyInSparse(index);
  Bucket& bucket = buckets_[slot.bucket];
  if (!bucket.flat.defined()) Materialize(slot.bucket);
  const at::Tensor& gradient = GradientOf(parameter(index));
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
    bucket.deferred.push_back(index);
    return;
  }
  Scale(slot, gradient);
  if (options_.gradient_as_view && !gradient.is_same(slot.view)) {
    SetGradientOf(parameter(index), slot.view);
  }
}

void FlatBuckets::FinishCopyIn(int b) {
  Bucket& bucket = buckets_[b];
  if (bucket.deferred.empty()) return;
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const int index : bucket.deferred) {
    from.push_back(GradientOf(parameter(index)));
    to.push_back(slots_[index].view);
  }
  at::_foreach_copy_(to, from);
  if (bucket.deferred.size() == members(b).size()) {
    bucket.flat.mul_(factor_);
  } else {
    at::_foreach_mul_(to, factor_);
  }
  if (options_.gradient_as_view) {
    for (const int index : bucket.deferred) {
      SetGradientOf(parameter(index), slots_[index].view);
    }
  }
  bucket.deferred.clear();
}

void FlatBuckets::CopyInSparse(int index) {
  at::NoGradGuard no_grad;
  const at::Tensor& gradient = GradientOf(parameter(index));
  at::Tensor& flat = buckets_[slots_[index].bucket].flat;
  if (!gradient.defined()) {
    flat = NoEntries(parameter(index)).coalesce();
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
  const int first = members(b).front();
  if (sparse(first)) {
    buckets_[b].flat = NoEntries(parameter(first)).coalesce();
    return;
  }
  Materialize(b);
  buckets_[b].flat.zero_();
}

void FlatBuckets::Launch(int b) {
  Bucket& bucket = buckets_[b];
  if (bucket.count == 0) return;
  bucket.sum = communicator().AllReduce(bucket.flat, {"the all-reduce of gradient bucket", b});
}

void FlatBuckets::Wait(int b) { communicator().Wait(buckets_[b].sum); }

int FlatBuckets::CopyOut(int b, const at::Tensor& result, const uint8_t* untouched) {
  at::NoGradGuard no_grad;
  Bucket& bucket = buckets_[b];
  at::Tensor reduced = result;
  // An empty bucket was not launched.
  if (!reduced.defined()) reduced = bucket.sum.tensor.defined() ? bucket.sum.tensor : bucket.flat;
  const int first = members(b).front();
  if (sparse(first)) {
    if (untouched == nullptr || !untouched[first]) {
      SetGradientOf(parameter(first), reduced.detach());
    }
    Discard(b);
    return -1;
  }
  if (!reduced.is_same(bucket.flat) &&
      !(reduced.is_alias_of(bucket.flat) &&
        reduced.storage_offset() == bucket.flat.storage_offset())) {
    bucket.flat.copy_(reduced);
  }
  for (const int index : members(b)) {
    const bool mine = untouched == nullptr || !untouched[index];
    if (mine && !CopyOutDense(index)) return index;
  }
  Discard(b);
  return -1;
}

void FlatBuckets::Discard(int b) {
  buckets_[b].sum = {};
  if (!options_.lazy && !sparse(members(b).front())) return;
  buckets_[b].flat.reset();
  for (const int index : members(b)) slots_[index].view.reset();
}

bool FlatBuckets::CopyOutDense(int index) {
  const Slot& slot = slots_[index];
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (!gradient.defined()) {
    SetGradientOf(parameter(index), options_.gradient_as_view ? slot.view : slot.view.clone());
    return true;
  }
  if (IsView(slot, gradient)) return true;
  if (options_.gradient_as_view) return false;
  if (gradient.requires_grad()) {
    SetGradientOf(parameter(index),
                  slot.view.clone());  // detached from the graph; CopyIn() has logged that
  } else if (slot.count > 0 && SameLayout(slot, gradient)) {  // an empty tensor's pointer is null
    std::memcpy(gradient.mutable_data_ptr(), slot.view.const_data_ptr(),
                slot.count * (slot.view.element_size() / (slot.view.is_complex() ? 2 : 1)));
  } else {
    gradient.copy_(slot.view);
  }
  return true;
}

}  // namespace ddp::internal
