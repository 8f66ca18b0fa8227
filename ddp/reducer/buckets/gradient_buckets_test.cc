// One suite for all implementations of GradientBuckets, in a group of one, where a sum is the
// rank's own tensor. Then what FlatBuckets promises beyond that.
#include "ddp/reducer/buckets/gradient_buckets.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/comm/check/collective_check.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/news/c10d_group_store.h"
#include "ddp/comm/news/failure_monitor.h"
#include "ddp/reducer/buckets/bucket_plan.h"
#include "ddp/reducer/buckets/flat_buckets.h"
#include "ddp/reducer/buckets/in_place_buckets.h"

namespace ddp::internal {
namespace {

// Three parameters in two buckets: of 2 and 1, and of 0.
class Bench {
 public:
  explicit Bench(const GradientBuckets::Factory& make, bool sparse_first = false) {
    monitor_ = std::make_shared<FailureMonitor>(
        MakeGroupStore(c10::make_intrusive<c10d::HashStore>()), Membership{});
    communicator_ = std::make_unique<Communicator>(nullptr, monitor_, Communicator::Options{});
    parameters = {at::zeros({2, 3}), at::zeros({4}), at::zeros({3, 2})};
    const std::vector<bool> sparse = {sparse_first, false, false};
    std::vector<BucketPlan::Tensor> descriptions(3);
    descriptions[0].sparse = sparse_first;
    auto plan = BucketPlan::FromNames({{"c", "b"}, {"a"}}, {"a", "b", "c"}, descriptions);
    EXPECT_TRUE(plan.ok()) << plan.status();
    buckets = make({.plan = *std::move(plan),
                    .parameters = parameters,
                    .sparse = sparse,
                    .communicator = [this]() -> Communicator& { return *communicator_; }});
  }

  at::Tensor& gradient(int parameter) const { return parameters[parameter].mutable_grad(); }

  void CopyIn(int bucket) const {
    for (const int parameter : buckets->plan().buckets()[bucket].parameters) {
      buckets->CopyIn(parameter);
    }
    buckets->FinishCopyIn(bucket);
  }

  // One pass of the bucket. Returns CopyOut()'s result.
  int Reduce(int bucket, const uint8_t* untouched = nullptr) const {
    CopyIn(bucket);
    buckets->Launch(bucket);
    buckets->Wait(bucket);
    return buckets->CopyOut(bucket, {}, untouched);
  }

  std::vector<at::Tensor> parameters;
  std::unique_ptr<GradientBuckets> buckets;

 private:
  std::shared_ptr<FailureMonitor> monitor_;
  std::unique_ptr<Communicator> communicator_;
};

struct Implementation {
  std::string name;
  GradientBuckets::Factory make;
};

class GradientBucketsTest : public ::testing::TestWithParam<Implementation> {
 protected:
  Bench bench_{GetParam().make};
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
  EXPECT_TRUE(at::equal(bench_.buckets->HookBuffer(0), at::zeros({10})));
  bench_.buckets->Launch(0);
  bench_.buckets->Wait(0);
  bench_.buckets->Discard(0);
  EXPECT_FALSE(bench_.gradient(1).defined());
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

INSTANTIATE_TEST_SUITE_P(
    All, GradientBucketsTest,
    ::testing::Values(Implementation{"Flat", FlatBuckets::MakerOf({})},
                      Implementation{"Views", FlatBuckets::MakerOf({.gradient_as_view = true})},
                      Implementation{"Batched", FlatBuckets::MakerOf({.batched_copy = true})},
                      Implementation{"Lazy", FlatBuckets::MakerOf({.lazy = true})},
                      Implementation{"InPlace", InPlaceBuckets::Make}),
    [](const auto& info) { return info.param.name; });

TEST(FlatBucketsTest, ViewsAreThePartsOfTheBucket) {
  const Bench bench(FlatBuckets::MakerOf({.gradient_as_view = true}));
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
  const Bench first(FlatBuckets::MakerOf({.gradient_as_view = true}));
  first.gradient(0) = at::ones({2, 3}) * 7;
  const Bench bench([&](GradientBuckets::Setup setup) {
    setup.parameters = first.parameters;
    return FlatBuckets::MakerOf({.gradient_as_view = true})(std::move(setup));
  });
  EXPECT_TRUE(at::equal(first.gradient(0), at::ones({2, 3}) * 7));
  EXPECT_TRUE(first.gradient(0).is_alias_of(bench.buckets->HookBuffer(1)));
}

TEST(FlatBucketsTest, ALazyBucketHasMemoryInAPassOnly) {
  const Bench bench(FlatBuckets::MakerOf({.lazy = true}));
  EXPECT_TRUE(bench.buckets->lazy());
  EXPECT_FALSE(bench.buckets->HookBuffer(0).defined());
  bench.CopyIn(0);
  EXPECT_TRUE(bench.buckets->HookBuffer(0).defined());
  bench.buckets->Discard(0);
  EXPECT_FALSE(bench.buckets->HookBuffer(0).defined());
}

TEST(FlatBucketsTest, ASparseGradientIsTheBucket) {
  const Bench bench(FlatBuckets::MakerOf({}), /*sparse_first=*/true);
  bench.buckets->set_factor(0.5);
  bench.gradient(0) = at::ones({2, 3}).to_sparse(1);
  bench.CopyIn(1);
  EXPECT_TRUE(bench.buckets->HookBuffer(1).is_sparse());
  EXPECT_EQ(bench.buckets->CopyOut(1, bench.buckets->HookBuffer(1), nullptr), -1);
  EXPECT_TRUE(at::equal(bench.gradient(0).to_dense(), at::ones({2, 3}) / 2));
  bench.gradient(0) = at::ones({2, 3});
  EXPECT_THROW(bench.buckets->CopyIn(0), c10::Error);
}

TEST(FlatBucketsTest, AGradientOfAnotherFormIsRefused) {
  const Bench bench(FlatBuckets::MakerOf({}));
  bench.gradient(0) = at::ones({2, 3}).to_sparse();
  EXPECT_THROW(bench.buckets->CopyIn(0), c10::Error);
}

}  // namespace
}  // namespace ddp::internal
