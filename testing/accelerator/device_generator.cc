#include "testing/accelerator/device_generator.h"

#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ddp::testing {
namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(c10::Device device, at::Generator cpu)
      : GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  const at::Generator& cpu() const { return cpu_; }

  void set_current_seed(uint64_t seed) override { impl().set_current_seed(seed); }
  void set_offset(uint64_t offset) override { impl().set_offset(offset); }
  uint64_t get_offset() const override { return impl().get_offset(); }
  uint64_t current_seed() const override { return impl().current_seed(); }
  uint64_t seed() override { return impl().seed(); }
  void set_state(const c10::TensorImpl& state) override { impl().set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl().get_state(); }

 private:
  c10::GeneratorImpl& impl() const { return *cpu_.unsafeGetGeneratorImpl(); }
  c10::GeneratorImpl* clone_impl() const override {
    return new DeviceGenerator(device(), cpu_.clone());
  }

  const at::Generator cpu_;
};

}  // namespace

at::Generator MakeDeviceGenerator(c10::Device device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

at::Generator CpuGeneratorOf(const at::Generator& generator) {
  const auto* impl = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl != nullptr, "a generator of ", generator.device(), " on the simulated device");
  return impl->cpu();
}

const at::Generator& DefaultGenerator(c10::Device device) {
  static const auto& generators = *[] {
    auto* made = new std::vector<at::Generator>;
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
    for (c10::DeviceIndex i = 0; i < guard.deviceCount(); ++i) {
      made->push_back(MakeDeviceGenerator({c10::DeviceType::PrivateUse1, i}));
    }
    return made;
  }();
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  return generators.at(device.has_index() ? device.index() : guard.getDevice().index());
}

}  // namespace ddp::testing
