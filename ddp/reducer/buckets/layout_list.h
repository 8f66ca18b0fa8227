#ifndef DDP_REDUCER_BUCKETS_LAYOUT_LIST_H_
#define DDP_REDUCER_BUCKETS_LAYOUT_LIST_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace ddp::internal {

// The sizes and strides of many tensors in one array. A comparison of many tensors in the order of
// the list reads memory in one direction, and allocates nothing. Thread-compatible.
class LayoutList {
 public:
  // Adds the sizes and strides of a strided tensor. Its number is the count of earlier ones.
  void Add(const at::Tensor& tensor) {
    entries_.push_back({.first = numbers_.size(), .dimensions = static_cast<size_t>(tensor.dim())});
    numbers_.insert(numbers_.end(), tensor.sizes().begin(), tensor.sizes().end());
    numbers_.insert(numbers_.end(), tensor.strides().begin(), tensor.strides().end());
  }

  void Clear() {
    entries_.clear();
    numbers_.clear();
  }

  // Starts to load what Matches(number) reads. `number` may be beyond the end.
  void Prefetch(size_t number) const {
    if (number >= entries_.size()) return;
    __builtin_prefetch(&entries_[number]);
    __builtin_prefetch(numbers_.data() + entries_[number].first);
  }

  c10::IntArrayRef sizes(size_t number) const {
    return {numbers_.data() + entries_[number].first, entries_[number].dimensions};
  }
  c10::IntArrayRef strides(size_t number) const {
    const Entry& entry = entries_[number];
    return {numbers_.data() + entry.first + entry.dimensions, entry.dimensions};
  }

  // Returns true when the strided `tensor` has the sizes and strides of the tensor `number`.
  bool Matches(size_t number, const at::Tensor& tensor) const {
    const Entry& entry = entries_[number];
    const c10::IntArrayRef sizes = tensor.sizes();
    if (sizes.size() != entry.dimensions) return false;
    const int64_t* const first = numbers_.data() + entry.first;
    const c10::IntArrayRef strides = tensor.strides();
    return std::equal(sizes.begin(), sizes.end(), first) &&
           std::equal(strides.begin(), strides.end(), first + entry.dimensions);
  }

 private:
  struct Entry {
    size_t first = 0;
    size_t dimensions = 0;
  };

  std::vector<Entry> entries_;
  std::vector<int64_t> numbers_;  // of each tensor: the sizes, then the strides
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_LAYOUT_LIST_H_
