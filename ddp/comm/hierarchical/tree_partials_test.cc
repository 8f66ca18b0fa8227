#include "ddp/comm/hierarchical/tree_partials.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "ddp/comm/kernels/reduce.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;

constexpr int kMostRanks = 16;
constexpr size_t kCount = 9;

// The hosts of bit pattern `borders`: bit i is set when a host begins at rank i + 1.
std::vector<RankRange> HostsOf(int ranks, unsigned borders) {
  std::vector<RankRange> hosts = {{0, ranks}};
  for (int rank = 1; rank < ranks; ++rank) {
    if ((borders >> (rank - 1) & 1) == 0) continue;
    hosts.back().end = rank;
    hosts.push_back({rank, ranks});
  }
  return hosts;
}

TEST(TreePartialsTest, AnAlignedBlockIsOneSubtree) {
  EXPECT_THAT(TreePartials({0, 2}, 4), ElementsAre(RankRange{0, 2}));
  EXPECT_THAT(TreePartials({4, 8}, 16), ElementsAre(RankRange{4, 8}));
  EXPECT_THAT(TreePartials({0, 6}, 6), ElementsAre(RankRange{0, 6}));
  EXPECT_THAT(TreePartials({4, 7}, 7), ElementsAre(RankRange{4, 7}));
}

TEST(TreePartialsTest, AnyOtherBlockIsSeveral) {
  EXPECT_THAT(TreePartials({1, 4}, 4), ElementsAre(RankRange{1, 2}, RankRange{2, 4}));
  EXPECT_THAT(TreePartials({0, 3}, 6), ElementsAre(RankRange{0, 2}, RankRange{2, 3}));
  EXPECT_THAT(TreePartials({3, 6}, 6), ElementsAre(RankRange{3, 4}, RankRange{4, 6}));
  EXPECT_THAT(TreePartials({1, 7}, 8),
              ElementsAre(RankRange{1, 2}, RankRange{2, 4}, RankRange{4, 6}, RankRange{6, 7}));
}

TEST(TreePartialsTest, EqualHostsOfAPowerOfTwoNeedOneCall) {
  for (const int hosts : {2, 3, 4, 5, 7}) {
    for (const int each : {1, 2, 4}) {
      std::vector<RankRange> partials, leaves;
      for (int host = 0; host < hosts; ++host) {
        partials.push_back({host * each, (host + 1) * each});
        leaves.push_back({host, host + 1});
      }
      EXPECT_EQ(TreeCombination(partials, hosts * each).steps(),
                TreeCombination(leaves, hosts).steps())
          << hosts << " x " << each;
    }
  }
  const RankRange uneven[] = {{0, 2}, {2, 3}, {3, 4}};
  const RankRange leaves[] = {{0, 1}, {1, 2}, {2, 3}};
  EXPECT_NE(TreeCombination(uneven, 4).steps(), TreeCombination(leaves, 3).steps());
}

TEST(TreePartialsDeathTest, PartialsMustCoverTheRanks) {
  const RankRange hole[] = {{0, 1}, {2, 4}};
  EXPECT_DEATH(TreeCombination(hole, 4), "do not cover");
  const RankRange no_subtree[] = {{0, 1}, {1, 4}};
  EXPECT_DEATH(TreeCombination(no_subtree, 4), "");
}

// Every way to divide up to 16 ranks among hosts gives the bits of one tree over all ranks.
TEST(TreePartialsTest, EveryDivisionGivesTheBitsOfOneTree) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 1);
  std::vector<std::vector<float>> inputs(kMostRanks, std::vector<float>(kCount));
  for (auto& input : inputs) {
    // Of very different sizes, so that another order gives other bits.
    for (float& x : input) x = normal(random) * std::ldexp(1.0F, static_cast<int>(random() % 12));
  }
  const auto reduce = [&](RankRange ranks, std::vector<float>& output, double factor) {
    std::vector<const std::byte*> pointers;
    for (int rank = ranks.begin; rank < ranks.end; ++rank) {
      pointers.push_back(reinterpret_cast<const std::byte*>(inputs[rank].data()));
    }
    auto* const to = reinterpret_cast<std::byte*>(output.data());
    ReduceTree(ReduceKind::kSum, ElementType::kFloat, pointers, std::span(&to, 1), kCount, factor);
  };
  int in_other_order = 0;
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    std::vector<float> expected(kCount);
    reduce({0, ranks}, expected, 0.3);
    for (unsigned borders = 0; borders < 1U << (ranks - 1); ++borders) {
      const std::vector<RankRange> hosts = HostsOf(ranks, borders);
      std::vector<RankRange> partials;
      for (const RankRange host : hosts) {
        const std::vector<RankRange> more = TreePartials(host, ranks);
        ASSERT_EQ(more.front().begin, host.begin);
        ASSERT_EQ(more.back().end, host.end);
        partials.insert(partials.end(), more.begin(), more.end());
      }
      std::vector<std::vector<float>> values(partials.size(), std::vector<float>(kCount));
      std::vector<std::byte*> pointers;
      for (size_t i = 0; i < partials.size(); ++i) {
        reduce(partials[i], values[i], 0.3);
        pointers.push_back(reinterpret_cast<std::byte*>(values[i].data()));
      }
      std::vector<float> result(kCount);
      if (partials.size() == 1) {
        result = values[0];
      } else {
        TreeCombination(partials, ranks)
            .Run(ReduceKind::kSum, ElementType::kFloat, pointers,
                 reinterpret_cast<std::byte*>(result.data()), kCount);
      }
      ASSERT_EQ(std::memcmp(result.data(), expected.data(), kCount * sizeof(float)), 0)
          << ranks << " ranks, borders " << borders;
      std::vector<float> ordered(kCount);
      for (int rank = 0; rank < ranks; ++rank) {
        for (size_t i = 0; i < kCount; ++i) ordered[i] += inputs[rank][i] * 0.3F;
      }
      in_other_order += std::memcmp(ordered.data(), expected.data(), sizeof(float) * kCount) != 0;
    }
  }
  EXPECT_GT(in_other_order, 10'000) << "the inputs cannot tell orders apart";
}

}  // namespace
}  // namespace ddp::internal
