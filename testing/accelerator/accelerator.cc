#include "testing/accelerator/accelerator.h"

#include <memory>
#include <utility>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include "testing/accelerator/device_allocator.h"
#include "testing/accelerator/device_guard.h"
#include "testing/accelerator/device_hooks.h"
#include "testing/accelerator/device_operators.h"

namespace ddp::testing {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Never destroyed: threads of LibTorch may use the devices until the process ends.
std::unique_ptr<Runtime>& Installed() {
  static auto& runtime = *new std::unique_ptr<Runtime>;
  return runtime;
}

void RegisterWithTorch() {
  c10::register_privateuse1_backend("sim");
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kDevice)].store(MakeDeviceGuard());
  c10::SetAllocator(kDevice, MakeDeviceAllocator());
  at::RegisterPrivateUse1HooksInterface(MakeDeviceHooks());
  RegisterDeviceOperators();
}

}  // namespace

Runtime& InstallAccelerator(const RuntimeOptions& options) {
  std::unique_ptr<Runtime>& installed = Installed();
  const bool first = installed == nullptr;
  for (int device = 0; !first && device < installed->device_count(); ++device) {
    TORCH_CHECK(installed->MemoryUse(device).allocated == 0, "a tensor of device ", device,
                " is left");
  }
  installed.reset();  // ends the streams first: their tasks may use the device
  installed = std::make_unique<Runtime>(options);
  if (first) RegisterWithTorch();
  return *installed;
}

Runtime& Accelerator() { return *Installed(); }

c10::Device SimulatedDevice(int index) { return {kDevice, static_cast<c10::DeviceIndex>(index)}; }

StreamPlace PlaceOf(const c10::Stream& stream) {
  return {.device = stream.device_index(), .stream = stream.id()};
}

StreamPlace CurrentStream(c10::Device device) {
  return PlaceOf(c10::impl::VirtualGuardImpl(kDevice).getStream(device));
}

void LaunchOn(c10::Device device, const std::string& name, std::function<void()> task) {
  Accelerator().Launch(CurrentStream(device), name, [task = std::move(task)] {
    const c10::InferenceMode mode;  // the program may be in it, and its tensors then too
    task();
  });
}

}  // namespace ddp::testing
