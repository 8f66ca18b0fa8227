#include "ddp/reducer/buckets/bucket_plan.h"

#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::vector<int>> Indices(const BucketPlan& plan) {
  std::vector<std::vector<int>> indices;
  for (const BucketPlan::Bucket& bucket : plan.buckets()) indices.push_back(bucket.parameters);
  return indices;
}

TEST(BucketPlanTest, ClosesABucketAfterTheTensorThatReachesItsLimit) {
  const auto plan = BucketPlan::Assign({{4}, {4}, {4}, {4}}, {6}, {0, 1, 2, 3});
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(Indices(*plan), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3)));
}

TEST(BucketPlanTest, FirstLimitServesTheFirstBucketOnly) {
  const auto plan = BucketPlan::Assign({{4}, {4}, {4}, {4}, {4}}, {4, 8}, {4, 3, 2, 1, 0});
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(Indices(*plan), ElementsAre(ElementsAre(4), ElementsAre(3, 2), ElementsAre(1, 0)));
}

TEST(BucketPlanTest, KindsDoNotMix) {
  const auto plan = BucketPlan::Assign({{4, 0}, {8, 1}, {4, 0}, {8, 1}}, {100}, {0, 1, 2, 3});
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(Indices(*plan), ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3)));
}

TEST(BucketPlanTest, ReversedPlanStartsWithTheLastLayers) {
  const auto plan = BucketPlan::AssignReversed({{4}, {4}, {4}, {4}, {4}}, {8});
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(Indices(*plan), ElementsAre(ElementsAre(4), ElementsAre(2, 3), ElementsAre(0, 1)));
}

TEST(BucketPlanTest, ZeroByteTensorsHaveAPlaceToo) {
  const auto plan = BucketPlan::Assign({{0}, {4}, {0}}, {4}, {0, 1, 2});
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(Indices(*plan), ElementsAre(ElementsAre(0, 1), ElementsAre(2)));
}

TEST(BucketPlanTest, RefusesAnOrderThatIsNoPermutation) {
  EXPECT_FALSE(BucketPlan::Assign({{4}, {4}}, {8}, {0, 0}).ok());
  EXPECT_FALSE(BucketPlan::Assign({{4}, {4}}, {8}, {0}).ok());
  EXPECT_FALSE(BucketPlan::Assign({{4}, {4}}, {8}, {0, 2}).ok());
  EXPECT_FALSE(BucketPlan::Assign({{4}}, {}, {0}).ok());
  EXPECT_FALSE(BucketPlan::Assign({{4}}, {0}, {0}).ok());
}

TEST(BucketPlanTest, EncodingIsExactForRandomPlans) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<BucketPlan::Tensor> tensors(1 + random() % 40);
    std::vector<int> order;
    for (auto& tensor : tensors) {
      tensor = {.bytes = static_cast<int64_t>(random() % 64),
                .kind = static_cast<int>(random() % 3)};
      order.push_back(static_cast<int>(order.size()));
    }
    std::shuffle(order.begin(), order.end(), random);
    const auto plan = BucketPlan::Assign(tensors, {16, 48}, order);
    ASSERT_TRUE(plan.ok());
    const std::vector<int32_t> words = plan->Encode();
    EXPECT_EQ(static_cast<int64_t>(words.size()),
              BucketPlan::EncodedSize(static_cast<int64_t>(tensors.size())));
    const auto decoded = BucketPlan::Decode(words, tensors);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, *plan);
  }
}

TEST(BucketPlanTest, DecodeRefusesWhatIsNoPlan) {
  const std::vector<BucketPlan::Tensor> tensors = {{4, 0}, {4, 0}, {4, 1}};
  EXPECT_TRUE(BucketPlan::Decode({0, 1, 2, 2, 2, 1, 0}, tensors).ok());
  EXPECT_FALSE(BucketPlan::Decode({0, 1, 2}, tensors).ok());
  EXPECT_FALSE(BucketPlan::Decode({0, 1, 1, 2, 2, 1, 0}, tensors).ok());
  EXPECT_FALSE(BucketPlan::Decode({0, 1, 9, 2, 2, 1, 0}, tensors).ok());
  EXPECT_FALSE(BucketPlan::Decode({0, 1, 2, -1, 2, 1, 0}, tensors).ok());
  EXPECT_FALSE(BucketPlan::Decode({0, 1, 2, 2, 2, 7, 0}, tensors).ok());
  EXPECT_FALSE(BucketPlan::Decode({0, 1, 2, 1, 3, 0, 0}, tensors).ok());  // mixes kinds
}

TEST(BucketPlanTest, NamesGoOutAndComeBack) {
  const std::vector<BucketPlan::Tensor> tensors = {{4, 0}, {4, 0}, {4, 0}};
  const std::vector<std::string> names = {"a", "b", "c"};
  const auto plan = BucketPlan::Assign(tensors, {8}, {2, 0, 1});
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(plan->Names(names), ElementsAre(ElementsAre("c", "a"), ElementsAre("b")));
  EXPECT_EQ(*BucketPlan::FromNames(plan->Names(names), names, tensors), *plan);

  EXPECT_THAT(std::string(BucketPlan::FromNames({{"c", "a"}}, names, tensors).status().message()),
              HasSubstr("parameter b is in no bucket"));
  EXPECT_THAT(std::string(BucketPlan::FromNames({{"x"}}, names, tensors).status().message()),
              HasSubstr("no parameter x"));
  EXPECT_THAT(
      std::string(
          BucketPlan::FromNames({{"a", "b"}, {"c", "a"}}, names, tensors).status().message()),
      HasSubstr("parameter a is in two buckets"));
}

}  // namespace
}  // namespace ddp::internal
