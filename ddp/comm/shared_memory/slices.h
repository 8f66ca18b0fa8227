#ifndef DDP_COMM_SHARED_MEMORY_SLICES_H_
#define DDP_COMM_SHARED_MEMORY_SLICES_H_

#include <algorithm>
#include <cstddef>

namespace ddp::internal {

// The part of an array that one member reduces.
struct Slice {
  size_t begin = 0;
  size_t count = 0;
};

// Divides an array of `count` elements of `element_bytes` among `size` members: about equally, and
// at multiples of a cache line.
inline Slice SliceOf(size_t count, size_t element_bytes, int member, int size) {
  const size_t line = 64 / element_bytes;
  const size_t share = ((count + size - 1) / size + line - 1) / line * line;
  const size_t begin = std::min(count, share * member);
  return {.begin = begin, .count = std::min(share, count - begin)};
}

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_SLICES_H_
