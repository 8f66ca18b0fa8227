#include "ddp/comm/hierarchical/tree_partials.h"

#include <bit>

#include <glog/logging.h>
#include "ddp/comm/kernels/reduce.h"

namespace ddp::internal {
namespace {

// Returns where the right child of a node of ReduceTree() begins.
int MiddleOf(RankRange node) {
  return node.begin + static_cast<int>(std::bit_floor(static_cast<unsigned>(node.size() - 1)));
}

void AddPartials(RankRange node, RankRange block, std::vector<RankRange>& partials) {
  if (node.end <= block.begin || node.begin >= block.end) return;
  if (node.begin >= block.begin && node.end <= block.end) {
    partials.push_back(node);
    return;
  }
  const int middle = MiddleOf(node);
  AddPartials({node.begin, middle}, block, partials);
  AddPartials({middle, node.end}, block, partials);
}

// Adds the steps of a node. `next` is the number of the first partial in the node, and afterwards
// of the first one behind it. Returns the number of the partial that the node ends in.
int AddSteps(RankRange node, std::span<const RankRange> partials, int& next,
             std::vector<CombineStep>& steps) {
  CHECK(next < static_cast<int>(partials.size()) && partials[next].begin == node.begin)
      << "the partials do not cover the ranks";
  if (partials[next] == node) return next++;
  CHECK(node.size() > 1) << "a partial is no subtree";
  const int middle = MiddleOf(node);
  const int left = AddSteps({node.begin, middle}, partials, next, steps);
  const int right = AddSteps({middle, node.end}, partials, next, steps);
  steps.push_back({.left = left, .right = right});
  return left;
}

std::vector<CombineStep> StepsOf(std::span<const RankRange> partials, int ranks) {
  std::vector<CombineStep> steps;
  int next = 0;
  AddSteps({0, ranks}, partials, next, steps);
  CHECK(next == static_cast<int>(partials.size())) << "there are more partials than ranks";
  return steps;
}

}  // namespace

std::vector<RankRange> TreePartials(RankRange block, int ranks) {
  std::vector<RankRange> partials;
  AddPartials({0, ranks}, block, partials);
  return partials;
}

TreeCombination::TreeCombination(std::span<const RankRange> partials, int ranks)
    : steps_(StepsOf(partials, ranks)) {
  const int count = static_cast<int>(partials.size());
  std::vector<RankRange> leaves;
  for (int i = 0; i < count; ++i) leaves.push_back({i, i + 1});
  balanced_ = partials.size() <= kMaxReduceInputs && steps_ == StepsOf(leaves, count);
}

void TreeCombination::Run(ReduceKind kind, ElementType type, std::span<std::byte* const> partials,
                          std::byte* output, size_t count) const {
  if (balanced_) {
    const std::vector<const std::byte*> inputs(partials.begin(), partials.end());
    return ReduceTree(kind, type, inputs, std::span(&output, 1), count);
  }
  for (size_t i = 0; i < steps_.size(); ++i) {
    const std::byte* const inputs[] = {partials[steps_[i].left], partials[steps_[i].right]};
    std::byte* const result = i + 1 == steps_.size() ? output : partials[steps_[i].left];
    ReduceTree(kind, type, inputs, std::span(&result, 1), count);
  }
}

}  // namespace ddp::internal
