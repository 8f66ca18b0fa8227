#include "ddp/comm/shared_memory/reduction_steps.h"

#include <cstddef>
#include <iostream>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

constexpr size_t kCount = 1'000'003;
constexpr size_t kElement = 4;

// The bytes that the members of a reduction read and write, in all and in arrays of other nodes.
struct Traffic {
  double all = 0;
  double across = 0;
};

// `on_node`: how many members that follow each other have one node.
Traffic TrafficOf(int size, int group, int on_node) {
  Traffic traffic;
  for (int step = 0; step < (group == size ? 1 : kGroupedSteps); ++step) {
    for (int member = 0; member < size; ++member) {
      const ReductionStep one = StepOf(step, member, size, group, kCount, kElement);
      for (const Members& members : {one.from, one.to}) {
        for (int i = 0; i < members.count; ++i) {
          const int other = members.first + i * members.stride;
          const auto bytes = static_cast<double>(one.slice.count * kElement);
          traffic.all += bytes;
          if (other / on_node != member / on_node) traffic.across += bytes;
        }
      }
    }
  }
  return traffic;
}

TEST(ReductionStepsTest, FewBytesGoFromNodeToNode) {
  constexpr double kBytes = kCount * kElement;
  for (int size = 16; size <= 128; size *= 2) {
    for (const int nodes : {2, 4}) {
      const int on_node = size / nodes;
      if (on_node < kSmallestGroup) continue;
      const Traffic flat = TrafficOf(size, size, on_node);
      const Traffic grouped = TrafficOf(size, on_node, on_node);
      std::cout << size << " members on " << nodes
                << " nodes, arrays read and written across: " << flat.across / kBytes
                << " without groups, " << grouped.across / kBytes << " with; in all "
                << flat.all / kBytes << " and " << grouped.all / kBytes << "\n";
      EXPECT_NEAR(flat.all, 2 * size * kBytes, 0.01 * flat.all);
      EXPECT_NEAR(flat.across, 2 * size * kBytes * (nodes - 1) / nodes, 0.01 * flat.across);
      EXPECT_NEAR(grouped.across, 2 * nodes * kBytes * (nodes - 1) / nodes, 0.01 * grouped.across);
      EXPECT_LE(grouped.all, flat.all + 4.01 * nodes * kBytes);
    }
  }
}

// A step of all members writes each element of an array once at most, and the last steps all of
// them.
TEST(ReductionStepsTest, EveryElementIsWrittenOnceInAStep) {
  constexpr size_t kFew = 1'003;
  for (const auto& [size, group] : {std::pair(3, 3), std::pair(4, 2), std::pair(12, 4)}) {
    const int steps = group == size ? 1 : kGroupedSteps;
    for (int step = 0; step < steps; ++step) {
      std::vector<std::vector<int>> writes(size, std::vector<int>(kFew));
      for (int member = 0; member < size; ++member) {
        const ReductionStep one = StepOf(step, member, size, group, kFew, kElement);
        for (int i = 0; i < one.to.count; ++i) {
          std::vector<int>& array = writes[one.to.first + i * one.to.stride];
          for (size_t k = 0; k < one.slice.count; ++k) ++array[one.slice.begin + k];
        }
      }
      for (const std::vector<int>& array : writes) {
        for (const int count : array) ASSERT_LE(count, 1) << size << " " << step;
        if (step + 1 < steps) continue;
        for (const int count : array) ASSERT_EQ(count, 1) << size;
      }
    }
  }
}

TEST(ReductionStepsTest, GroupsAreSubtreesOnOneNode) {
  const auto of = [](int size, int on_node) {
    std::vector<int> nodes(size);
    for (int member = 0; member < size; ++member) nodes[member] = member / on_node;
    return GroupOnNodes(nodes);
  };
  EXPECT_EQ(of(128, 64), 64);
  EXPECT_EQ(of(8, 8), 8);
  EXPECT_EQ(of(96, 48), 16) << "ranks 32 to 63 are on two nodes";
  EXPECT_EQ(of(24, 24), 24) << "one node has no groups";
  EXPECT_EQ(of(24, 12), 24) << "ranks 8 to 15 are on two nodes";
  EXPECT_EQ(of(19, 8), 19);
  EXPECT_EQ(of(8, 4), 8) << "groups of 4 are too small";
  EXPECT_EQ(GroupOnNodes(std::vector<int>(32, -1)), 32) << "the ranks run anywhere";
}

}  // namespace
}  // namespace ddp::internal
