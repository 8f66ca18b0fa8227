#include "testing/accelerator/device_operators.h"

#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/operator_fallback.h"

namespace ddp::testing {
namespace {

using at::Tensor;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

const c10::impl::VirtualGuardImpl& Guard() {
  static const c10::impl::VirtualGuardImpl guard(kDevice);
  return guard;
}

bool OnDevice(const Tensor& tensor) { return tensor.device().type() == kDevice; }

Tensor Empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> type,
             std::optional<c10::Layout> layout, std::optional<c10::Device> device,
             std::optional<bool> pinned, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, c10::GetAllocator(kDevice), kKeys,
                                   c10::dtype_or_default(type), format);
}

Tensor EmptyStrided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                    std::optional<c10::ScalarType> type, std::optional<c10::Layout> layout,
                    std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(kDevice), kKeys,
                                           c10::dtype_or_default(type));
}

void EnsureBytes(const Tensor& tensor, size_t bytes) {
  if (bytes > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  }
}

const Tensor& Resize(const Tensor& self, c10::IntArrayRef sizes,
                     std::optional<c10::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  EnsureBytes(self, at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(),
                                                               self.storage_offset()));
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& SetStorage(Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                   c10::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(storage), offset, sizes, strides);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (strides.data() == nullptr) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  EnsureBytes(self, at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                                     offset));
  return self;
}

Tensor& SetEmpty(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kDevice),
                       /*resizable=*/true);
  return SetStorage(self, std::move(storage), 0, {0}, {});
}

// As cudaMemcpyPeerAsync between two devices: the copy runs on the source's stream, after all that
// the target's stream holds, and the target's stream goes on after the copy.
void CopyBetweenDevices(const Tensor& from, const Tensor& to) {
  const c10::Stream source = Guard().getStream(from.device());
  const c10::Stream target = Guard().getStream(to.device());
  c10::Event ready(kDevice);
  ready.record(target);
  ready.block(source);
  LaunchOn(from.device(), "copy between devices",
           [from = KernelView(from), to = KernelView(to)] { to.copy_(from); });
  c10::Event copied(kDevice);
  copied.record(source);
  copied.block(target);
}

// A copy from or to the host. The host waits, unless its memory is pinned and the copy is
// `non_blocking`; the memory then rests after its Free() until the copy is done, as CUDA's does.
void CopyWithHost(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Tensor& host = OnDevice(from) ? to : from;
  const c10::Device device = OnDevice(from) ? from.device() : to.device();
  const StreamPlace stream = CurrentStream(device);
  LaunchOn(device, "copy", [from = KernelView(from), to = KernelView(to)] { to.copy_(from); });
  if (non_blocking && host.is_pinned()) {
    Accelerator().RecordUse(host.storage().data(), stream);
  } else {
    Accelerator().Synchronize(stream);
  }
}

Tensor CopyFrom(const Tensor& from, const Tensor& to, bool non_blocking) {
  const at::NoGradGuard guard;
  if (!OnDevice(from) || !OnDevice(to)) {
    CopyWithHost(from, to, non_blocking);
  } else if (from.device() != to.device()) {
    CopyBetweenDevices(from, to);
  } else {
    LaunchOn(to.device(), "copy",
             [from = KernelView(from), to = KernelView(to)] { to.copy_(from); });
  }
  return to;
}

void RecordStream(Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

// As dropout on the CPU. For other devices LibTorch has another one, which draws other numbers.
Tensor Dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  return input * at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

// LibTorch lets set_data(), and so Module::to(), replace a CPU tensor by one on a device that it
// knows. This is such a device.
bool HasCompatibleShallowCopyType(const Tensor& self, const Tensor& from) {
  return self.layout() == from.layout();
}

}  // namespace

void RegisterDeviceOperators() {
  const auto library = [](std::optional<c10::DispatchKey> key, const char* name) {
    return new torch::Library(torch::Library::IMPL, name, key, __FILE__, __LINE__);
  };
  library(c10::DispatchKey::PrivateUse1, "_")
      ->fallback(torch::CppFunction::makeFromBoxedFunction<&RunOnDevice>());
  torch::Library& own = *library(c10::DispatchKey::PrivateUse1, "aten");
  own.impl("empty.memory_format", Empty);
  own.impl("empty_strided", EmptyStrided);
  own.impl("as_strided", at::native::as_strided_tensorimpl);
  own.impl("view", at::native::view);
  own.impl("view_as_real", at::native::view_as_real);
  own.impl("view_as_complex", at::native::view_as_complex);
  own.impl("_reshape_alias", at::native::_reshape_alias);
  own.impl("unfold", at::native::unfold);
  own.impl("resize_", Resize);
  own.impl("set_", SetEmpty);
  own.impl("set_.source_Tensor", at::native::set_tensor_);
  own.impl("set_.source_Storage",
           TORCH_FN(static_cast<Tensor& (*)(Tensor&, c10::Storage)>(at::native::set_)));
  own.impl("set_.source_Storage_storage_offset", SetStorage);
  own.impl("_copy_from", CopyFrom);
  own.impl("record_stream", RecordStream);
  own.impl("_has_compatible_shallow_copy_type", HasCompatibleShallowCopyType);
  library(c10::DispatchKey::AutogradPrivateUse1, "aten")->impl("dropout", Dropout);
  // Composites whose parts would not compute the CPU's bits, or whose Meta shapes are wrong.
  for (const char* name : {"convolution", "convolution_backward", "mse_loss"}) {
    own.impl(name, torch::CppFunction::makeFromBoxedFunction<&RunOnDevice>());
  }
}

}  // namespace ddp::testing
