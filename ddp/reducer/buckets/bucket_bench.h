#ifndef DDP_REDUCER_BUCKETS_BUCKET_BENCH_H_
#define DDP_REDUCER_BUCKETS_BUCKET_BENCH_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/comm/check/collective_check.h"
#include "ddp/comm/communicator.h"
#include "ddp/comm/meeting/c10d_group_store.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/reducer/buckets/bucket_plan.h"
#include "ddp/reducer/buckets/gradient_buckets.h"
#include "gtest/gtest.h"

namespace ddp::internal {

// A fixture for tests of GradientBuckets: parameters 2 and 1 in bucket 0, and parameter 0 in bucket
// 1. The group has one rank, so a sum over the group is the rank's own tensor. With `sparse_first`,
// parameter 0 has a sparse gradient. Thread-compatible.
class BucketBench {
 public:
  explicit BucketBench(const GradientBuckets::Factory& make, bool sparse_first = false) {
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
      buckets->CopyIn(parameter, {});
    }
    buckets->FinishCopyIn(bucket);
  }

  // Does one pass of the bucket, and returns the result of CopyOut().
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

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_BUCKET_BENCH_H_
