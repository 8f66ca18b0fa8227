// The partial results that a host can give, and the way from partial results to the result. Free of
// LibTorch.
#ifndef DDP_COMM_HIERARCHICAL_TREE_PARTIALS_H_
#define DDP_COMM_HIERARCHICAL_TREE_PARTIALS_H_

#include <cstddef>
#include <span>
#include <vector>

#include "ddp/comm/kernels/element_type.h"

namespace ddp::internal {

// Ranks with consecutive numbers.
struct RankRange {
  int begin = 0;
  int end = 0;

  int size() const { return end - begin; }
  friend bool operator==(const RankRange&, const RankRange&) = default;
};

// Returns the least number of subtrees of ReduceTree() over `ranks` ranks that together have
// exactly the ranks of `block` as leaves; ascending. ReduceTree() over the ranks of a subtree alone
// gives the bits that the subtree has in the whole tree. A block of 2^n ranks that begins at a
// multiple of 2^n is one subtree.
std::vector<RankRange> TreePartials(RankRange block, int ranks);

// Combines partials, by their numbers: the partial `left` becomes `left` op `right`.
struct CombineStep {
  int left = 0;
  int right = 0;
  friend bool operator==(const CombineStep&, const CombineStep&) = default;
};

// How the subtrees of all ranks become the whole tree. A value.
class TreeCombination {
 public:
  // `partials` are subtrees that together have each of `ranks` ranks once, ascending.
  TreeCombination(std::span<const RankRange> partials, int ranks);

  // Combines `count` elements of every partial. The result is in `output`, which overlaps no
  // partial. Overwrites the partials. Ends as ReduceTree() over all ranks would, bit by bit.
  void Run(ReduceKind kind, ElementType type, std::span<std::byte* const> partials,
           std::byte* output, size_t count) const;

  const std::vector<CombineStep>& steps() const { return steps_; }  // the last one's left is 0

 private:
  std::vector<CombineStep> steps_;
  bool balanced_ = false;  // one call of ReduceTree() with the partials as inputs is the same
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_TREE_PARTIALS_H_
