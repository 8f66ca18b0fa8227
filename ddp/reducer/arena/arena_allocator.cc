#include "ddp/reducer/arena/arena_allocator.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>

#include "ddp/comm/arena/arena.h"

namespace ddp::internal {
namespace {

std::atomic<int> armed{0};

class ArenaAllocator final : public c10::Allocator {
 public:
  // The allocator of the process. The first call makes it, on top of LibTorch's present allocator.
  // Never destroyed: tensors may outlive all statics.
  static ArenaAllocator& OfProcess() {
    static ArenaAllocator& allocator = *new ArenaAllocator(*c10::GetCPUAllocator());
    return allocator;
  }

  void Install() {
    // LibTorch does not tell the priority of the present allocator, and ignores a lower one.
    for (int priority = 0; priority <= std::numeric_limits<uint8_t>::max(); ++priority) {
      c10::SetCPUAllocator(this, static_cast<uint8_t>(priority));
      if (installed()) return;
    }
  }

  bool installed() const { return c10::GetCPUAllocator() == this; }

  c10::DataPtr allocate(size_t bytes) override {
    if (armed.load(std::memory_order_relaxed) > 0) {
      if (void* const block = arena_.Allocate(bytes)) {
        c10::profiledCPUMemoryReporter().New(block, bytes);
        return {block, block, &Delete, c10::Device(c10::DeviceType::CPU)};
      }
    }
    c10::DataPtr data = previous_.allocate(bytes);
    // raw_deleter() promises one deleter for all memory. An allocator that breaks the same promise
    // keeps its deleter.
    if (previous_deleter_ != nullptr) {
      std::ignore = data.compare_exchange_deleter(previous_deleter_, &Delete);
    }
    return data;
  }

  // Null when the previous allocator has no deleter for addresses.
  c10::DeleterFnPtr raw_deleter() const override {
    return previous_deleter_ == nullptr ? nullptr : &Delete;
  }

  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return arena_.Contains(data.get(), 1) ? data.get() == data.get_context()
                                          : previous_.is_simple_data_ptr(data);
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  explicit ArenaAllocator(c10::Allocator& previous)
      : arena_(Arena::OfProcess()),
        previous_(previous),
        previous_deleter_(previous.raw_deleter()) {}

  // Deletes memory of either kind. Memory exists only after the construction in OfProcess().
  static void Delete(void* data) {
    const ArenaAllocator& allocator = OfProcess();
    if (!allocator.arena_.Contains(data, 1)) {
      allocator.previous_deleter_(data);
      return;
    }
    c10::profiledCPUMemoryReporter().Delete(data);
    allocator.arena_.Free(data);
  }

  Arena& arena_;
  c10::Allocator& previous_;
  const c10::DeleterFnPtr previous_deleter_;
};

}  // namespace

bool InstallArenaAllocator() {
  if (!Arena::OfProcess().status().ok()) return false;
  ArenaAllocator& allocator = ArenaAllocator::OfProcess();
  // Once: the allocator must not become the previous one of an allocator that calls it.
  static const bool done = [&] {
    allocator.Install();
    return true;
  }();
  return done && allocator.installed();
}

void ArmArenaAllocator() { armed.fetch_add(1, std::memory_order_relaxed); }

void DisarmArenaAllocator() { armed.fetch_sub(1, std::memory_order_relaxed); }

}  // namespace ddp::internal
