#include "testing/accelerator/device_hooks.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "testing/accelerator/accelerator.h"
#include "testing/accelerator/device_allocator.h"
#include "testing/accelerator/device_generator.h"

namespace ddp::testing {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

class DeviceHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }

  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex getCurrentDevice() const override { return Guard().getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kDevice, device});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kDevice, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  bool isPinnedPtr(const void* pointer) const override { return Accelerator().IsPinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_; }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    const std::optional<int> device = Accelerator().DeviceOf(pointer);
    TORCH_CHECK(device, "no memory of a simulated device");
    return SimulatedDevice(*device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return DefaultGenerator({kDevice, device});
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return MakeDeviceGenerator({kDevice, device < 0 ? getCurrentDevice() : device});
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::Allocator* allocator = storage.allocator();
    c10::DataPtr grown = allocator->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) allocator->copy_data(grown.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }

 private:
  static c10::impl::VirtualGuardImpl Guard() { return c10::impl::VirtualGuardImpl(kDevice); }

  c10::Allocator* const pinned_ = MakePinnedAllocator();
};

}  // namespace

at::PrivateUse1HooksInterface* MakeDeviceHooks() { return new DeviceHooks; }

}  // namespace ddp::testing
