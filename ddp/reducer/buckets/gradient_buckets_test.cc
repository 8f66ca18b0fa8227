// One suite for all implementations of GradientBuckets.
#include "ddp/reducer/buckets/gradient_buckets.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ddp/reducer/buckets/bucket_bench.h"
#include "ddp/reducer/buckets/flat_buckets.h"
#include "ddp/reducer/buckets/local_reduction.h"
#include "ddp/reducer/buckets/per_parameter_buckets.h"

namespace ddp::internal {
namespace {

struct Implementation {
  std::string name;
  GradientBuckets::Factory make;
  bool takes_hooks = true;
};

class GradientBucketsTest : public ::testing::TestWithParam<Implementation> {
 protected:
  BucketBench bench_{GetParam().make};
};

TEST_P(GradientBucketsTest, TheReducedValuesBecomeTheGradients) {
  bench_.buckets->set_factor(0.5);
  for (int pass = 0; pass < 2; ++pass) {
    bench_.gradient(1) = at::ones({4}) * (pass + 1);
    bench_.gradient(2) = at::ones({3, 2}) * 6;
    EXPECT_EQ(bench_.Reduce(0), -1);
    EXPECT_TRUE(at::equal(bench_.gradient(1), at::ones({4}) * (pass + 1) / 2));
    EXPECT_TRUE(at::equal(bench_.gradient(2), at::ones({3, 2}) * 3));
  }
  EXPECT_FALSE(bench_.gradient(0).defined());  // in the other bucket
}

TEST_P(GradientBucketsTest, AnUndefinedGradientCountsAsZeros) {
  const std::vector<uint8_t> untouched = {0, 1, 0};
  bench_.gradient(1).reset();
  bench_.gradient(2).reset();
  EXPECT_EQ(bench_.Reduce(0, untouched.data()), -1);
  EXPECT_FALSE(bench_.gradient(1).defined());
  EXPECT_TRUE(at::equal(bench_.gradient(2), at::zeros({3, 2})));
}

TEST_P(GradientBucketsTest, AHookSeesTheGradientsInPlanOrder) {
  if (!GetParam().takes_hooks) GTEST_SKIP() << "the Reducer makes other buckets for a hook";
  bench_.buckets->set_factor(1);
  for (int pass = 0; pass < 2; ++pass) {
    bench_.gradient(1) = at::arange(4, at::kFloat);
    bench_.gradient(2) = at::arange(6, at::kFloat).view({3, 2}) + 10;
    bench_.CopyIn(0);
    const at::Tensor buffer = bench_.buckets->HookBuffer(0);
    EXPECT_TRUE(bench_.buckets->HookBuffer(0).is_same(buffer));
    EXPECT_TRUE(at::equal(buffer, at::cat({at::arange(6, at::kFloat) + 10,  //
                                           at::arange(4, at::kFloat)})));
    // The hook writes into the buffer, or returns another tensor.
    const at::Tensor result = pass == 0 ? buffer.mul_(2) : buffer * 2;
    EXPECT_EQ(bench_.buckets->CopyOut(0, result, nullptr), -1);
    EXPECT_TRUE(at::equal(bench_.gradient(1), at::arange(4, at::kFloat) * 2));
    EXPECT_TRUE(at::equal(bench_.gradient(2), at::arange(6, at::kFloat).view({3, 2}) * 2 + 20));
  }
}

TEST_P(GradientBucketsTest, AJoinedRankTakesPartWithZeros) {
  bench_.buckets->Zero(0);
  const bool takes_hooks = GetParam().takes_hooks;
  EXPECT_TRUE(!takes_hooks || at::equal(bench_.buckets->HookBuffer(0), at::zeros({10})));
  bench_.buckets->Launch(0);
  bench_.buckets->Wait(0);
  bench_.buckets->Discard(0);
  EXPECT_FALSE(bench_.gradient(1).defined());
}

TEST_P(GradientBucketsTest, AGradientOfAnotherFormIsRefused) {
  bench_.gradient(0) = at::ones({2, 3}).to_sparse();
  EXPECT_THROW(bench_.buckets->CopyIn(0, {}), c10::Error);
}

TEST_P(GradientBucketsTest, ADiscardedBucketLeavesTheGradients) {
  bench_.gradient(0) = at::ones({2, 3});
  bench_.buckets->Discard(1);
  EXPECT_TRUE(at::equal(bench_.gradient(0), at::ones({2, 3})));
}

TEST_P(GradientBucketsTest, AGradientThatWasAddedToIsReducedAsAWhole) {
  bench_.buckets->set_factor(0.5);
  bench_.gradient(0) = at::ones({2, 3});
  EXPECT_EQ(bench_.Reduce(1), -1);
  bench_.gradient(0).add_(3);  // by two backwards
  EXPECT_EQ(bench_.Reduce(1), -1);
  EXPECT_TRUE(at::equal(bench_.gradient(0), at::ones({2, 3}) * 1.75));
}

TEST(LocalReductionTest, TwoGradientsMayShareMemory) {
  const BucketBench bench(LocalReduction::MakerOf(FlatBuckets::MakerOf({})));
  const at::Tensor shared = at::arange(6, at::kFloat);
  for (const double factor : {1.0, 0.5}) {
    bench.buckets->set_factor(factor);
    bench.gradient(1) = shared.narrow(0, 0, 4);
    bench.gradient(2) = shared.view({3, 2});
    EXPECT_EQ(bench.Reduce(0), -1);
    EXPECT_TRUE(at::equal(bench.gradient(1), at::arange(4, at::kFloat) * factor));
    EXPECT_TRUE(at::equal(bench.gradient(2), at::arange(6, at::kFloat).view({3, 2}) * factor));
  }
}

TEST(LocalReductionTest, TheOnlyRankKeepsItsGradientsWhereTheyAre) {
  const BucketBench bench(LocalReduction::MakerOf(FlatBuckets::MakerOf({})), /*sparse_first=*/true);
  EXPECT_THAT(bench.buckets->strategy(), ::testing::HasSubstr("the only rank"));
  const at::Tensor made = at::ones({4});
  bench.gradient(0) = at::ones({2, 3}).to_sparse(1);
  bench.gradient(1) = made;
  bench.gradient(2) = at::ones({3, 2}).requires_grad_() * 2;
  EXPECT_EQ(bench.Reduce(0), -1);
  EXPECT_EQ(bench.Reduce(1), -1);
  EXPECT_TRUE(bench.gradient(1).is_same(made));
  EXPECT_FALSE(bench.gradient(2).requires_grad());
  EXPECT_TRUE(bench.gradient(0).is_coalesced());
  bench.gradient(0) = at::ones({2, 3});
  EXPECT_THROW(bench.buckets->CopyIn(0, {}), c10::Error);
}

TEST(LocalReductionTest, TheMapIsItsOwnSum) {
  const BucketBench bench([](GradientBuckets::Setup setup) {
    setup.sums_map = true;
    return LocalReduction::MakerOf(FlatBuckets::MakerOf({}))(std::move(setup));
  });
  ASSERT_TRUE(bench.buckets->carries_map());
  bench.buckets->AttachMap({1, 0, 1});
  EXPECT_EQ(bench.buckets->AttachedSums(), (std::vector<int32_t>{1, 0, 1}));
}

INSTANTIATE_TEST_SUITE_P(
    All, GradientBucketsTest,
    ::testing::Values(Implementation{"Flat", FlatBuckets::MakerOf({})},
                      Implementation{"Views", FlatBuckets::MakerOf({.gradient_as_view = true})},
                      Implementation{"Batched", FlatBuckets::MakerOf({.batched_copy = true})},
                      Implementation{"Lazy", FlatBuckets::MakerOf({.lazy = true})},
                      Implementation{"PerParameter", PerParameterBuckets::Make},
                      Implementation{"Local", LocalReduction::MakerOf(FlatBuckets::MakerOf({})),
                                     /*takes_hooks=*/false}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ddp::internal
