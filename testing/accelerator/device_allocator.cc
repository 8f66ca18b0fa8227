#include "testing/accelerator/device_allocator.h"

#include <cstring>
#include <utility>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "testing/accelerator/accelerator.h"

namespace ddp::testing {
namespace {

void Free(void* pointer) { Accelerator().Free(pointer); }

c10::Device CurrentDevice() {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1).getDevice();
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device = CurrentDevice();
    void* memory = Accelerator().Allocate(CurrentStream(device), bytes);
    return {memory, memory, &Free, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const Runtime& runtime = Accelerator();
    LaunchOn(CurrentDevice(), "copy_data",
             [to = runtime.KernelView(to), from = runtime.KernelView(from), bytes] {
               std::memcpy(to, from, bytes);
             });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < Runtime::kDevices; ++device) Accelerator().EmptyCache(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Accelerator().RecordUse(data.get(), PlaceOf(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const BlockCache::Use use = Accelerator().MemoryUse(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = static_cast<int64_t>(use.allocated);
    stats.allocated_bytes[0].peak = static_cast<int64_t>(use.most_allocated);
    stats.reserved_bytes[0].current = static_cast<int64_t>(use.reserved);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}  // none are accumulated
  void resetPeakStats(c10::DeviceIndex) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the peak of the simulated device is that of its life");
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t all = Accelerator().options().memory_limit;
    return {all - Accelerator().MemoryUse(device).reserved, all};
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = Accelerator().AllocatePinned(bytes);
    return {memory, memory, &Free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::Allocator* MakeDeviceAllocator() { return new Allocator; }
c10::Allocator* MakePinnedAllocator() { return new PinnedAllocator; }

}  // namespace ddp::testing
