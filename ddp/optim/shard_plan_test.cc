#include "ddp/optim/shard_plan.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Mode = ShardPlan::Mode;
using Piece = ShardPlan::Piece;

std::vector<ShardPlan::Tensor> Sizes(const std::vector<int64_t>& sizes) {
  std::vector<ShardPlan::Tensor> tensors;
  for (const int64_t size : sizes) tensors.push_back({.elements = size});
  return tensors;
}

// Returns the owner of each parameter.
std::vector<int> Owners(const ShardPlan& plan) {
  std::vector<int> owners(plan.parameters(), -1);
  for (const ShardPlan::Bucket& bucket : plan.buckets()) {
    for (const int parameter : bucket.parameters) owners[parameter] = bucket.owner;
  }
  return owners;
}

TEST(ShardPlanTest, WholeGivesTheLargestFirstToTheLeastLoadedRank) {
  ShardPlan plan({.mode = Mode::kWhole, .ranks = 2});
  plan.Add({Sizes({3, 9, 5, 4, 4})});
  // In the order of size: 9 to rank 0; 5, then 4 to rank 1; on equal load 4 to rank 0; 3 to rank 1.
  EXPECT_THAT(Owners(plan), ElementsAre(1, 0, 1, 1, 0));
  EXPECT_EQ(plan.ElementsOf(0), 13);
  EXPECT_EQ(plan.ElementsOf(1), 12);
}

TEST(ShardPlanTest, WholeSortsWithinAGroupAndContinuesTheLoad) {
  ShardPlan plan({.mode = Mode::kWhole, .ranks = 2});
  plan.Add({Sizes({1, 2}), Sizes({10})});
  EXPECT_THAT(Owners(plan), ElementsAre(1, 0, 1));
  plan.Add({Sizes({7})});  // a later group moves nothing
  EXPECT_THAT(Owners(plan), ElementsAre(1, 0, 1, 0));
}

TEST(ShardPlanTest, EvenCutsBucketsAcrossParametersFromTheLastToTheFirst) {
  ShardPlan plan({.mode = Mode::kEven, .ranks = 2});
  plan.Add({Sizes({6, 4})});
  ASSERT_EQ(plan.buckets().size(), 1);
  EXPECT_THAT(plan.buckets()[0].parameters, ElementsAre(1, 0));
  EXPECT_EQ(plan.buckets()[0].part, 5);
  EXPECT_THAT(plan.Pieces(0, 0), ElementsAre(Piece{1, 0, 4, 0}, Piece{0, 0, 1, 4}));
  EXPECT_THAT(plan.Pieces(0, 1), ElementsAre(Piece{0, 1, 6, 5}));
}

TEST(ShardPlanTest, ARankMayOwnNothing) {
  ShardPlan plan({.mode = Mode::kEven, .ranks = 4});
  plan.Add({Sizes({0, 2})});
  EXPECT_THAT(plan.Pieces(0, 1), ElementsAre(Piece{1, 1, 2, 1}));
  EXPECT_THAT(plan.Pieces(0, 2), IsEmpty());
  EXPECT_THAT(plan.Pieces(0, 3), IsEmpty());
}

TEST(ShardPlanTest, KindsAndLimitsSeparateBuckets) {
  ShardPlan plan({.mode = Mode::kEven, .ranks = 2, .bucket_bytes = 16});
  plan.Add({{{.elements = 1, .kind = 1},
             {.elements = 3},
             {.elements = 2, .element_bytes = 8, .kind = 1},
             {.elements = 1}}});
  std::vector<std::vector<int>> buckets;
  for (const auto& bucket : plan.buckets()) buckets.push_back(bucket.parameters);
  EXPECT_THAT(buckets, ElementsAre(ElementsAre(2), ElementsAre(3, 1), ElementsAre(0)));
}

TEST(ShardPlanTest, ATensorWithGapsIsNotCut) {
  ShardPlan plan({.mode = Mode::kEven, .ranks = 2});
  plan.Add({{{.elements = 8, .flat = false}, {.elements = 4}}});
  EXPECT_THAT(Owners(plan), ElementsAre(0, -1));
  EXPECT_THAT(plan.Pieces(0, 0), ElementsAre(Piece{0, 0, 8, 0, true}));
  EXPECT_THAT(plan.Pieces(0, 1), IsEmpty());
}

// Every element has one owner, a part's pieces have no gap, and the load of kEven differs by at
// most one part's rounding for each bucket.
TEST(ShardPlanTest, EveryElementHasOneOwner) {
  std::mt19937 random(17);
  for (int round = 0; round < 200; ++round) {
    const int ranks = 1 + static_cast<int>(random() % 5);
    const Mode mode = random() % 2 == 0 ? Mode::kEven : Mode::kWhole;
    ShardPlan plan(
        {.mode = mode, .ranks = ranks, .bucket_bytes = 1 + static_cast<int64_t>(random() % 200)});
    std::vector<int64_t> sizes;
    for (int add = 0; add < 2; ++add) {
      std::vector<ShardPlan::Tensor> group;
      for (int i = 0; i < 6; ++i) {
        sizes.push_back(random() % 40);
        group.push_back({.elements = sizes.back(),
                         .kind = static_cast<int>(random() % 2),
                         .flat = random() % 4 != 0});
      }
      plan.Add({group});
    }
    std::vector<std::vector<int>> owners;
    for (const int64_t size : sizes) owners.emplace_back(size, 0);
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t owned = 0;
      for (size_t b = 0; b < plan.buckets().size(); ++b) {
        const ShardPlan::Bucket& bucket = plan.buckets()[b];
        const int64_t begin = bucket.owner < 0 ? rank * bucket.part : 0;
        int64_t offset = begin;
        for (const Piece& piece : plan.Pieces(static_cast<int>(b), rank)) {
          EXPECT_EQ(piece.offset, offset);
          EXPECT_EQ(piece.whole, bucket.owner >= 0);
          offset += piece.size();
          for (int64_t i = piece.begin; i < piece.end; ++i) ++owners[piece.parameter][i];
        }
        EXPECT_LE(offset - begin, bucket.part);
        owned += offset - begin;
      }
      EXPECT_EQ(owned, plan.ElementsOf(rank));
    }
    for (const auto& counts : owners) EXPECT_THAT(counts, ::testing::Each(1));
  }
}

}  // namespace
}  // namespace ddp::internal
