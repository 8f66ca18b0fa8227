// The promises of FlatBuckets beyond those of GradientBuckets, which gradient_buckets_test.cc has.
#include "ddp/reducer/buckets/flat_buckets.h"

#include <memory>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "ddp/reducer/buckets/bucket_bench.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(FlatBucketsTest, ViewsAreThePartsOfTheBucket) {
  const BucketBench bench(FlatBuckets::MakerOf({.gradient_as_view = true}));
  bench.gradient(1) = at::ones({4});
  bench.gradient(2) = at::ones({3, 2});
  EXPECT_EQ(bench.Reduce(0), -1);
  const at::Tensor buffer = bench.buckets->HookBuffer(0);
  EXPECT_TRUE(bench.gradient(2).is_alias_of(buffer));
  EXPECT_EQ(bench.gradient(1).storage_offset(), 6);
  bench.CopyIn(0);
  bench.gradient(1) = at::ones({4});  // a hook of the program replaces it
  bench.buckets->Launch(0);
  bench.buckets->Wait(0);
  EXPECT_EQ(bench.buckets->CopyOut(0, {}, nullptr), 1);
}

TEST(FlatBucketsTest, WithViewsExistingGradientsMoveIntoNewBuckets) {
  const BucketBench first(FlatBuckets::MakerOf({.gradient_as_view = true}));
  first.gradient(0) = at::ones({2, 3}) * 7;
  const BucketBench bench([&](GradientBuckets::Setup setup) {
    setup.parameters = first.parameters;
    return FlatBuckets::MakerOf({.gradient_as_view = true})(std::move(setup));
  });
  EXPECT_TRUE(at::equal(first.gradient(0), at::ones({2, 3}) * 7));
  EXPECT_TRUE(first.gradient(0).is_alias_of(bench.buckets->HookBuffer(1)));
}

TEST(FlatBucketsTest, ALazyBucketHasMemoryInAPassOnly) {
  const BucketBench bench(FlatBuckets::MakerOf({.lazy = true}));
  EXPECT_TRUE(bench.buckets->lazy());
  EXPECT_FALSE(bench.buckets->HookBuffer(0).defined());
  bench.CopyIn(0);
  EXPECT_TRUE(bench.buckets->HookBuffer(0).defined());
  bench.buckets->Discard(0);
  EXPECT_FALSE(bench.buckets->HookBuffer(0).defined());
}

TEST(FlatBucketsTest, ASparseGradientIsTheBucket) {
  const BucketBench bench(FlatBuckets::MakerOf({}), /*sparse_first=*/true);
  bench.buckets->set_factor(0.5);
  bench.gradient(0) = at::ones({2, 3}).to_sparse(1);
  bench.CopyIn(1);
  EXPECT_TRUE(bench.buckets->HookBuffer(1).is_sparse());
  EXPECT_EQ(bench.buckets->CopyOut(1, bench.buckets->HookBuffer(1), nullptr), -1);
  EXPECT_TRUE(at::equal(bench.gradient(0).to_dense(), at::ones({2, 3}) / 2));
  bench.gradient(0) = at::ones({2, 3});
  EXPECT_THROW(bench.buckets->CopyIn(0, {}), c10::Error);
}

TEST(FlatBucketsTest, TheMapTravelsBehindTheGradientsOfTheLastBucket) {
  for (const FlatBuckets::Options options :
       {FlatBuckets::Options{}, {.gradient_as_view = true}, {.lazy = true}}) {
    const BucketBench bench([&](GradientBuckets::Setup setup) {
      setup.sums_map = true;
      return FlatBuckets::MakerOf(options)(std::move(setup));
    });
    ASSERT_TRUE(bench.buckets->carries_map());
    bench.gradient(0) = at::ones({2, 3}) * 7;
    bench.CopyIn(1);
    EXPECT_EQ(bench.buckets->HookBuffer(1).numel(), 6);
    bench.buckets->AttachMap({1, 0, 3});
    bench.buckets->Launch(1);
    bench.buckets->Wait(1);
    EXPECT_EQ(bench.buckets->AttachedSums(), (std::vector<int32_t>{1, 0, 3}));
    EXPECT_EQ(bench.buckets->CopyOut(1, {}, nullptr), -1);
    EXPECT_TRUE(at::equal(bench.gradient(0), at::ones({2, 3}) * 7));
    EXPECT_EQ(bench.Reduce(1), -1);  // a pass without a map
    EXPECT_TRUE(at::equal(bench.gradient(0), at::ones({2, 3}) * 7));
  }
}

TEST(FlatBucketsTest, ASparseBucketCarriesNoMap) {
  const auto with_map = [](GradientBuckets::Setup setup) {
    setup.sums_map = true;
    return FlatBuckets::MakerOf({})(std::move(setup));
  };
  EXPECT_FALSE(BucketBench(with_map, /*sparse_first=*/true).buckets->carries_map());
  EXPECT_FALSE(BucketBench([&](GradientBuckets::Setup setup) {
                 for (at::Tensor& parameter : setup.parameters) parameter = parameter.to(at::kHalf);
                 return with_map(std::move(setup));
               }).buckets->carries_map());
}

// The copies of a GPU, in a type that the loop of a CPU does not take.
TEST(FlatBucketsTest, ABatchedCopyGoesInAndOut) {
  const BucketBench bench([](GradientBuckets::Setup setup) {
    for (at::Tensor& parameter : setup.parameters) parameter.set_data(parameter.to(at::kHalf));
    return FlatBuckets::MakerOf({.batched_copy = true})(std::move(setup));
  });
  const std::vector<uint8_t> untouched = {0, 1, 0};
  for (const double factor : {0.5, 1.0}) {
    bench.buckets->set_factor(factor);
    const at::Tensor first = at::ones({4}, at::kHalf);
    const at::Tensor second = at::arange(6, at::kHalf).view({2, 3}).t().clone();
    bench.gradient(1) = first;
    bench.gradient(2) = second;
    bench.CopyIn(0);
    bench.buckets->Launch(0);
    bench.buckets->Wait(0);
    second.zero_();
    EXPECT_EQ(bench.buckets->CopyOut(0, {}, untouched.data()), -1);
    EXPECT_TRUE(bench.gradient(2).is_same(second));
    EXPECT_TRUE(at::equal(second, at::arange(6, at::kHalf).view({2, 3}).t() * factor));
    EXPECT_TRUE(at::equal(first, at::ones({4}, at::kHalf)));
  }
}

}  // namespace
}  // namespace ddp::internal
