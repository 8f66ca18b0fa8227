// The slices of an array, and the steps of a reduction in place: which member reads and writes
// which part of whose arrays.
#ifndef DDP_COMM_SHARED_MEMORY_REDUCTION_STEPS_H_
#define DDP_COMM_SHARED_MEMORY_REDUCTION_STEPS_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <span>

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

// Members first, first + stride, and so on.
struct Members {
  int first = 0;
  int count = 1;
  int stride = 1;
};

// A member combines a slice of the arrays of some members, and writes the result to arrays of
// others.
struct ReductionStep {
  Slice slice;
  Members from;
  Members to;
};

// Members in groups of `group`, which follow each other by number. `group` is a power of two and
// divides `size`, so that the sum of a group is a node of the tree of ReduceTree(); or it is
// `size`.
//
// A reduction without groups has one step: member r combines slice r of all arrays, in place. With
// groups it has three, and all members complete each before the next:
//   1. Member i of a group combines slice i of the group's arrays into its own array.
//   2. The members i of all groups divide slice i among them, and combine it in place.
//   3. Member i of a group copies slice i into the group's arrays.
// So in groups of 64 a 64th of the bytes goes from group to group: each group is on its own NUMA
// node.
inline constexpr int kGroupedSteps = 3;

inline ReductionStep StepOf(int step, int member, int size, int group, size_t count,
                            size_t element_bytes) {
  const int groups = size / group;
  const int begin = member / group * group;
  const Slice slice = SliceOf(count, element_bytes, member % group, group);
  const Members own = {.first = member};
  const Members whole_group = {.first = begin, .count = group};
  if (groups == 1) return {.slice = slice, .from = whole_group, .to = whole_group};
  if (step == 0) return {.slice = slice, .from = whole_group, .to = own};
  if (step == 2) return {.slice = slice, .from = own, .to = whole_group};
  const Members across = {.first = member % group, .count = groups, .stride = group};
  Slice share = SliceOf(slice.count, element_bytes, member / group, groups);
  share.begin += slice.begin;
  return {.slice = share, .from = across, .to = across};
}

// Smaller groups save too few bytes from node to node for the bytes that they add on a node.
inline constexpr int kSmallestGroup = 8;

// Returns the size of the largest groups whose members have the same NUMA node each, or all members
// when there are none. `nodes` has the node of each member; -1: it has several.
inline int GroupOnNodes(std::span<const int> nodes) {
  const auto size = static_cast<int>(nodes.size());
  if (std::ranges::count(nodes, nodes[0]) == size) return size;
  for (int group = static_cast<int>(std::bit_floor(nodes.size())); group >= kSmallestGroup;
       group /= 2) {
    bool fits = size % group == 0;
    for (int member = 0; fits && member < size; ++member) {
      fits = nodes[member] >= 0 && nodes[member] == nodes[member / group * group];
    }
    if (fits) return group;
  }
  return size;
}

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_REDUCTION_STEPS_H_
