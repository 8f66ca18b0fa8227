#include "testing/accelerator/device_guard.h"

#include <array>

#include <c10/core/Allocator.h>
#include <c10/core/DeviceCapability.h>

#include "testing/accelerator/accelerator.h"

namespace ddp::testing {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, Runtime::kDevices> current_streams = {};

Event& EventOf(void* event) { return *static_cast<Event*>(event); }

class DeviceGuardImpl final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice; }
  DeviceIndex deviceCount() const noexcept override { return Runtime::kDevices; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }  // all types

  Device getDevice() const override { return {kDevice, current_device}; }
  Device exchangeDevice(Device device) const override {
    const Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.type() == kDevice && device.index() < deviceCount(), "there is no device ",
                device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }

  Stream getStream(Device device) const override {
    const DeviceIndex index = IndexOf(device);
    return MakeStream(index, current_streams.at(index));
  }
  Stream getDefaultStream(Device device) const override { return MakeStream(IndexOf(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return MakeStream(IndexOf(device), Accelerator().PoolStream(IndexOf(device)));
  }
  Stream getNewStream(Device device, int) const override {
    return MakeStream(IndexOf(device), Accelerator().NewStream(IndexOf(device)));
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream previous = getStream(stream.device());
    current_streams.at(stream.device_index()) = stream.id();
    return previous;
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    Accelerator().Record(EventOf(*event), PlaceOf(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event != nullptr) Accelerator().Block(EventOf(event), PlaceOf(stream));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Accelerator().Query(EventOf(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Accelerator().Synchronize(EventOf(event));
  }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    return Accelerator().ElapsedMs(EventOf(begin), EventOf(end));
  }
  bool queryStream(const Stream& stream) const override {
    return Accelerator().Query(PlaceOf(stream));
  }
  void synchronizeStream(const Stream& stream) const override {
    Accelerator().Synchronize(PlaceOf(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    Accelerator().SynchronizeDevice(device < 0 ? current_device : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Accelerator().RecordUse(data.get(), PlaceOf(stream));
  }

 private:
  static DeviceIndex IndexOf(Device device) {
    return device.has_index() ? device.index() : current_device;
  }
  static Stream MakeStream(DeviceIndex device, c10::StreamId id) {
    return Stream(Stream::UNSAFE, {kDevice, device}, id);
  }
};

}  // namespace

c10::impl::DeviceGuardImplInterface* MakeDeviceGuard() { return new DeviceGuardImpl; }

}  // namespace ddp::testing
