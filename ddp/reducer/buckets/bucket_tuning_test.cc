#include "ddp/reducer/buckets/bucket_tuning.h"

#include <numeric>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMebibyte = 1 << 20;

// A model of equal tensors whose gradients come in the order of their numbers, `ns_apart`.
struct Model {
  Model(int tensors, int64_t bytes, double ns_apart)
      : tensors(tensors, {.bytes = bytes}), order(tensors), ready_ns(tensors) {
    std::iota(order.begin(), order.end(), 0);
    for (int i = 0; i < tensors; ++i) ready_ns[i] = i * ns_apart;
  }
  BucketChoice Choose(const CollectiveCost& cost) const {
    const auto choice = ChooseBuckets(tensors, order, ready_ns, cost);
    EXPECT_TRUE(choice.ok()) << choice.status();
    return *choice;
  }
  std::vector<BucketPlan::Tensor> tensors;
  std::vector<int> order;
  std::vector<double> ready_ns;
};

TEST(BucketTuningTest, TwoSamplesGiveTheFixedAndTheGrowingPart) {
  const CollectiveCost cost = FitCost({1000, 2000}, {11'000, 7000});
  EXPECT_DOUBLE_EQ(cost.ns_per_byte, 0.5);
  EXPECT_DOUBLE_EQ(cost.fixed_ns, 1500);
  const CollectiveCost noisy = FitCost({1000, 2000}, {11'000, 1000});
  EXPECT_DOUBLE_EQ(noisy.ns_per_byte, 0);
  EXPECT_DOUBLE_EQ(noisy.fixed_ns, 2000);
}

TEST(BucketTuningTest, ABucketWaitsForItsGradientsAndForTheBucketBeforeIt) {
  const Model model(4, 10, 100);
  const auto plan = BucketPlan::Assign(model.tensors, {20}, model.order);
  ASSERT_TRUE(plan.ok());
  // Buckets are ready at 100 and 300, and take 20 and 250.
  EXPECT_DOUBLE_EQ(SimulateEnd(*plan, model.tensors, model.ready_ns, {0, 1}), 320);
  EXPECT_DOUBLE_EQ(SimulateEnd(*plan, model.tensors, model.ready_ns, {230, 1}), 600);
}

TEST(BucketTuningTest, ADearStartTakesFewBuckets) {
  const Model model(100, kMebibyte, 1000);
  const BucketChoice choice = model.Choose({.fixed_ns = 1e9, .ns_per_byte = 1e-6});
  EXPECT_EQ(choice.first_limit_bytes, 100 * kMebibyte);
  EXPECT_EQ(choice.limit_bytes, 100 * kMebibyte);
  EXPECT_LT(choice.end_ns, choice.default_end_ns);
}

TEST(BucketTuningTest, ACheapStartTakesASmallTail) {
  const Model model(100, kMebibyte, 10e6);
  const BucketChoice choice = model.Choose({.fixed_ns = 1000, .ns_per_byte = 0.5});
  const auto plan = PlanOf(choice, model.tensors, model.order);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->buckets().back().parameters.size(), 1);
  EXPECT_LT(choice.end_ns, choice.default_end_ns);
}

TEST(BucketTuningTest, NoChoiceIsWorseThanAnyCapByItself) {
  const Model model(300, 300'000, 2e6);
  for (const double fixed : {1e3, 1e5, 1e7}) {
    for (const double per_byte : {0.01, 1.0, 20.0}) {
      const CollectiveCost cost{.fixed_ns = fixed, .ns_per_byte = per_byte};
      const BucketChoice choice = model.Choose(cost);
      EXPECT_LE(choice.end_ns, choice.default_end_ns);
      for (const int64_t cap : {1, 4, 25, 100}) {
        const auto plan = BucketPlan::Assign(model.tensors, {cap * kMebibyte}, model.order);
        const double end = SimulateEnd(*plan, model.tensors, model.ready_ns, cost);
        EXPECT_LE(choice.end_ns * 0.9, end) << cap;
      }
    }
  }
}

TEST(BucketTuningTest, ASmallGainLeavesTheDefault) {
  const Model model(100, kMebibyte, 10e6);
  const BucketChoice choice = model.Choose({.fixed_ns = 1, .ns_per_byte = 1e-3});
  EXPECT_EQ(choice.first_limit_bytes, kMebibyte);
  EXPECT_EQ(choice.limit_bytes, 25 * kMebibyte);
  EXPECT_FALSE(choice.last_is_small);
}

TEST(BucketTuningTest, AChoiceGoesOutAndComesBack) {
  const BucketChoice choice = Model(100, kMebibyte, 10e6).Choose({1234.5, 0.25});
  const auto decoded = BucketChoice::Decode(choice.Encode());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->ToString(), choice.ToString());
  EXPECT_EQ(decoded->limits_bytes(), choice.limits_bytes());
  EXPECT_THAT(choice.ToString(), HasSubstr("an all-reduce takes 1 us and 0.250 ns per byte"));
  EXPECT_FALSE(BucketChoice::Decode({}).ok());
  EXPECT_FALSE(BucketChoice::Decode({0, 0, 0, 0, 0, 0, 0}).ok());
}

}  // namespace
}  // namespace ddp::internal
