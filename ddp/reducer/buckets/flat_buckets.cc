#include "ddp/reducer/buckets/flat_buckets.h"

#include <algorithm>
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

#include "ddp/common/host_tensor.h"
#include "ddp/common/logging.h"
#include "ddp/reducer/buckets/gradient_check.h"
#include "ddp/reducer/buckets/gradient_context.h"
#include "ddp/reducer/buckets/gradient_kernels.h"

namespace ddp::internal {
namespace {

bool HasPlainLayout(const at::Tensor& parameter) {
  const at::ScalarType type = c10::toRealValueType(parameter.scalar_type());
  return parameter.is_cpu() && parameter.is_non_overlapping_and_dense() &&
         (type == at::kFloat || type == at::kDouble);
}

// Returns true when elements of this type count ranks exactly.
bool CountsExactly(const at::Tensor& parameter) {
  const at::ScalarType type = c10::toRealValueType(parameter.scalar_type());
  return type == at::kFloat || type == at::kDouble;
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

}  // namespace

FlatBuckets::FlatBuckets(Setup setup, Options options)
    : GradientBuckets(std::move(setup)),
      options_(options),
      buckets_(plan().buckets().size()),
      slots_(parameter_count()),
      views_(parameter_count()),
      slot_of_(parameter_count()) {
  if (sums_map() && count() > 0) {
    const int last = members(count() - 1).front();
    carries_map_ = !sparse(last) && CountsExactly(parameter(last));
  }
  int next_slot = 0;
  for (int b = 0; b < count(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.first_slot = next_slot;
    bucket.batched = options_.batched_copy || !parameter(members(b).front()).is_cpu();
    for (const int index : members(b)) {
      slot_of_[index] = next_slot;
      Slot& slot = slots_[next_slot++];
      slot.parameter = index;
      slot.bucket = b;
      slot.sparse = sparse(index);
      slot.count = parameter(index).numel() * (parameter(index).is_complex() ? 2 : 1);
      slot.type = parameter(index).scalar_type();
      slot.plain = !slot.sparse && HasPlainLayout(parameter(index));
      layouts_.Add(parameter(index));
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
  const bool with_map = carries_map_ && b + 1 == count();
  const int64_t elements = bucket.count + (with_map ? static_cast<int64_t>(parameter_count()) : 0);
  // Zeroed, so that memory without a gradient holds valid numbers.
  bucket.flat = communicator().AllocateBuffer(elements, options);
  if (with_map) {
    bucket.with_map = bucket.flat;
    bucket.flat = bucket.with_map.narrow(0, 0, bucket.count).variable_data();
  }
  int64_t offset = 0;
  int index_of_slot = bucket.first_slot;
  for (const int index : members(b)) {
    Slot& slot = slots_[index_of_slot];
    at::Tensor& view = views_[index_of_slot++];
    view = ViewOf(bucket.flat, parameter(index), offset, slot.count);
    offset += slot.count;
    if (slot.plain && slot.count > 0) slot.data = view.mutable_data_ptr();
    const at::Tensor& gradient = GradientOf(parameter(index));
    if (options_.gradient_as_view && gradient.defined() && !shared(index)) {
      view.copy_(gradient);
      SetGradientOf(parameter(index), view);
    }
  }
}

bool FlatBuckets::IsPlain(int number, const at::Tensor& gradient) const {
  const Slot& slot = slots_[number];
  return slot.data != nullptr && gradient.layout() == at::kStrided && gradient.is_cpu() &&
         gradient.scalar_type() == slot.type && layouts_.Matches(number, gradient) &&
         !gradient.is_conj() && !gradient.is_neg();
}

bool FlatBuckets::IsView(int number, const at::Tensor& gradient) const {
  const at::Tensor& view = views_[number];
  return gradient.layout() == at::kStrided && gradient.is_alias_of(view) &&
         gradient.storage_offset() == view.storage_offset() && gradient.strides() == view.strides();
}

void FlatBuckets::ScalePlain(const Slot& slot, const at::Tensor& gradient) const {
  if (c10::toRealValueType(slot.type) == at::kFloat) {
    ScaleCopy(static_cast<const float*>(gradient.const_data_ptr()), static_cast<float>(factor_),
              slot.count, static_cast<float*>(slot.data));
  } else {
    ScaleCopy(static_cast<const double*>(gradient.const_data_ptr()), factor_, slot.count,
              static_cast<double*>(slot.data));
  }
}

void FlatBuckets::Scale(int number, const at::Tensor& gradient) {
  if (IsPlain(number, gradient)) return ScalePlain(slots_[number], gradient);
  at::NoGradGuard no_grad;
  at::Tensor& view = views_[number];
  if (IsView(number, gradient)) {
    if (factor_ != 1) view.mul_(factor_);
    return;
  }
  WarnOfStrides(number, gradient);
  const at::ScalarType factor_type = c10::toRealValueType(view.scalar_type());
  at::mul_out(view, gradient.detach(),
              at::scalar_tensor(factor_, view.options().dtype(factor_type)));
}

void FlatBuckets::WarnOfStrides(int number, const at::Tensor& gradient) {
  Slot& slot = slots_[number];
  const at::Tensor& view = views_[number];
  if (slot.warned || gradient.strides() == view.strides()) return;
  slot.warned = true;
  LOG(WARNING) << "a gradient of shape " << gradient.sizes() << " has strides "
               << gradient.strides() << ", its parameter " << view.strides()
               << ": copying it into its bucket is slow, the result is right";
}

// After the first pass, gradients come in plan order. Between two of them the backward replaces
// what the caches held, so the memory for the next gradient starts to load now.
void FlatBuckets::PrefetchAfter(int number) const {
  const size_t next = static_cast<size_t>(number) + 1;
  if (next >= slots_.size()) return;
  __builtin_prefetch(slots_[next].data, /*write=*/1);
  layouts_.Prefetch(next);
  __builtin_prefetch(&slots_[std::min(next + 1, slots_.size() - 1)]);
}

// A shared gradient leaves the flat tensor: the other model's hook has yet to read it.
void FlatBuckets::ChooseView(Slot& slot, int number) {
  slot.as_view = !shared(slot.parameter);
  if (slot.as_view || !views_[number].defined()) return;
  const at::Tensor& gradient = GradientOf(parameter(slot.parameter));
  if (gradient.defined() && IsView(number, gradient)) {
    SetGradientOf(parameter(slot.parameter), gradient.clone());
  }
}

// The hot path. A gradient that the loop without ATen can access touches its slot and its own
// tensor, and no view.
void FlatBuckets::CopyIn(int index, const at::Tensor& /*input*/) {
  const int number = slot_of_[index];
  PrefetchAfter(number);
  Slot& slot = slots_[number];
  if (options_.gradient_as_view) ChooseView(slot, number);
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (!gradient.defined() || !IsPlain(number, gradient) || gradient.requires_grad()) {
    return CopyInSlowly(number);
  }
  ScalePlain(slot, gradient);
  if (slot.as_view && !gradient.is_same(views_[number])) {
    SetGradientOf(parameter(index), views_[number]);
  }
}

void FlatBuckets::CopyInSlowly(int number) {
  const Slot& slot = slots_[number];
  const int index = slot.parameter;
  if (slot.sparse) return CopyInSparse(index);
  Bucket& bucket = buckets_[slot.bucket];
  if (!bucket.flat.defined()) Materialize(slot.bucket);
  at::Tensor& view = views_[number];
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (!gradient.defined()) {
    if (slot.data != nullptr) {
      std::memset(slot.data, 0, slot.count * bucket.flat.element_size());
    } else {
      at::NoGradGuard no_grad;
      view.zero_();
    }
    return;
  }
  CheckDenseGradient(gradient, view);  // mixed precision lends the parameter another type
  if (bucket.batched && !IsPlain(number, gradient) && !gradient.requires_grad()) {
    bucket.deferred.push_back(index);
    return;
  }
  Scale(number, gradient);
  if (slot.as_view && !gradient.is_same(view)) {
    SetGradientOf(parameter(index), view);
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
    to.push_back(views_[slot_of_[index]]);
  }
  at::_foreach_copy_(to, from);
  if (factor_ == 1) {
    // The copy is all.
  } else if (bucket.deferred.size() == members(b).size()) {
    bucket.flat.mul_(factor_);
  } else {
    at::_foreach_mul_(to, factor_);
  }
  for (const int index : bucket.deferred) {
    const int number = slot_of_[index];
    if (slots_[number].as_view) SetGradientOf(parameter(index), views_[number]);
  }
  bucket.deferred.clear();
}

void FlatBuckets::CopyInSparse(int index) {
  at::NoGradGuard no_grad;
  const at::Tensor& gradient = GradientOf(parameter(index));
  at::Tensor& flat = buckets_[slots_[slot_of_[index]].bucket].flat;
  if (!gradient.defined()) {
    flat = SparseZeros(parameter(index));
    return;
  }
  CheckSparseGradient(gradient);
  // coalesce() may return the gradient itself; mul() always returns a new tensor.
  flat = gradient.detach().coalesce().mul(factor_);
}

void FlatBuckets::Zero(int b) {
  at::NoGradGuard no_grad;
  const int first = members(b).front();
  if (sparse(first)) {
    buckets_[b].flat = SparseZeros(parameter(first));
    return;
  }
  Materialize(b);
  buckets_[b].flat.zero_();
}

void FlatBuckets::AttachMap(const std::vector<uint8_t>& map) {
  at::NoGradGuard no_grad;
  Bucket& bucket = buckets_.back();
  at::Tensor values =
      HostTensorFor(bucket.with_map.device(), static_cast<int64_t>(map.size()), at::kFloat);
  std::copy(map.begin(), map.end(), values.mutable_data_ptr<float>());
  const at::Tensor place = bucket.with_map.narrow(0, bucket.count, values.numel());
  place.copy_(values, /*non_blocking=*/true);
  bucket.map_attached = true;
}

std::vector<int32_t> FlatBuckets::AttachedSums() const {
  at::NoGradGuard no_grad;
  const Bucket& bucket = buckets_.back();
  const auto count = static_cast<int64_t>(parameter_count());
  const at::Tensor sums =
      communicator()
          .ToHost(bucket.sum.tensor.narrow(0, bucket.count, count), bucket.sum.what)
          .to(at::kInt);
  const int32_t* const first = sums.const_data_ptr<int32_t>();
  return {first, first + count};
}

void FlatBuckets::Launch(int b) {
  Bucket& bucket = buckets_[b];
  if (bucket.count == 0 && !bucket.map_attached) return;
  bucket.sum = communicator().AllReduce(bucket.map_attached ? bucket.with_map : bucket.flat,
                                        {"the all-reduce of gradient bucket", b});
}

void FlatBuckets::Wait(int b) { communicator().Wait(buckets_[b].sum); }

int FlatBuckets::CopyOut(int b, const at::Tensor& result, const uint8_t* untouched) {
  at::NoGradGuard no_grad;
  Bucket& bucket = buckets_[b];
  at::Tensor reduced = result;
  // An empty bucket was not launched.
  if (!reduced.defined()) reduced = bucket.sum.tensor.defined() ? bucket.sum.tensor : bucket.flat;
  if (bucket.map_attached) reduced = reduced.narrow(0, 0, bucket.count);
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
  const int end = bucket.first_slot + static_cast<int>(members(b).size());
  for (int number = bucket.first_slot; number < end; ++number) {
    const int index = slots_[number].parameter;
    const bool mine = untouched == nullptr || !untouched[index];
    if (mine && !CopyOutDense(number)) return index;
  }
  FinishCopyOut(bucket);
  Discard(b);
  return -1;
}

void FlatBuckets::FinishCopyOut(Bucket& bucket) {
  if (bucket.deferred.empty()) return;
  std::vector<at::Tensor> from;
  std::vector<at::Tensor> to;
  for (const int index : bucket.deferred) {
    from.push_back(views_[slot_of_[index]]);
    to.push_back(GradientOf(parameter(index)));
  }
  at::_foreach_copy_(to, from);
  bucket.deferred.clear();
}

void FlatBuckets::Discard(int b) {
  Bucket& bucket = buckets_[b];
  bucket.sum = {};
  bucket.map_attached = false;
  if (!options_.lazy && !sparse(members(b).front())) return;
  bucket.flat.reset();
  bucket.with_map.reset();
  const int end = bucket.first_slot + static_cast<int>(members(b).size());
  for (int number = bucket.first_slot; number < end; ++number) {
    slots_[number].data = nullptr;
    views_[number].reset();
  }
}

bool FlatBuckets::CopyOutDense(int number) {
  const Slot& slot = slots_[number];
  const at::Tensor& leaf = parameter(slot.parameter);
  const at::Tensor& gradient = GradientOf(leaf);
  if (gradient.defined() && IsPlain(number, gradient) && !gradient.requires_grad()) {
    void* const data = gradient.mutable_data_ptr();
    if (data == slot.data) return true;
    if (slot.as_view) return false;
    std::memcpy(data, slot.data, slot.count * c10::elementSize(c10::toRealValueType(slot.type)));
    return true;
  }
  const at::Tensor& view = views_[number];
  if (!gradient.defined()) {
    SetGradientOf(leaf, slot.as_view ? view : view.clone());
    return true;
  }
  if (IsView(number, gradient)) return true;
  if (slot.as_view) return false;
  if (gradient.requires_grad()) {
    SetGradientOf(leaf, view.clone());  // detached from the graph; CopyIn() has logged that
  } else if (buckets_[slot.bucket].batched) {
    buckets_[slot.bucket].deferred.push_back(slot.parameter);
  } else {
    gradient.copy_(view);
  }
  return true;
}

}  // namespace ddp::internal
