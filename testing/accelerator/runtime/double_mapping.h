#ifndef DDP_TESTING_ACCELERATOR_RUNTIME_DOUBLE_MAPPING_H_
#define DDP_TESTING_ACCELERATOR_RUNTIME_DOUBLE_MAPPING_H_

#include <cstddef>
#include <cstdint>

#include "base/unique_fd.h"

namespace ddp::testing {

// Memory with two addresses. Tensors have the first one, and kernels use the second one. No thread
// can ever read or write a device's memory by its first address: a host that tries faults.
//
// Pages take memory when a kernel first writes them. Throws std::system_error when the system
// refuses a mapping. Thread-compatible.
class DoubleMapping {
 public:
  enum class Kind : uint8_t {
    kDevice,
    kPinned,  // the host may use both addresses
  };

  DoubleMapping(size_t bytes, Kind kind);
  ~DoubleMapping();
  DoubleMapping(const DoubleMapping&) = delete;
  DoubleMapping& operator=(const DoubleMapping&) = delete;

  size_t size() const { return size_; }

  // Whether `pointer` is one of the first addresses.
  bool Contains(const void* pointer) const { return pointer >= base_ && pointer < base_ + size_; }
  // Requires: Contains(pointer).
  size_t OffsetOf(const void* pointer) const { return static_cast<const char*>(pointer) - base_; }

  void* Address(size_t offset) const { return base_ + offset; }
  void* KernelView(size_t offset) const { return view_ + offset; }

  // Gives whole pages back to the system; they read as zeros afterwards.
  void Discard(size_t offset, size_t bytes);

 private:
  char* Map(int protection);

  const size_t size_;
  UniqueFd file_;
  char* base_ = nullptr;
  char* view_ = nullptr;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_RUNTIME_DOUBLE_MAPPING_H_
