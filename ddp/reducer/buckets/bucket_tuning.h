#ifndef DDP_REDUCER_BUCKETS_BUCKET_TUNING_H_
#define DDP_REDUCER_BUCKETS_BUCKET_TUNING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ddp/reducer/buckets/bucket_plan.h"

namespace ddp::internal {

// The choice of bucket sizes for `bucket_cap_mb = kAuto`. Pure: equal inputs give equal results.

// The cost of one collective: fixed_ns + bytes * ns_per_byte.
struct CollectiveCost {
  double fixed_ns = 0;
  double ns_per_byte = 0;
};

// The time of a collective on `bytes`.
struct CollectiveSample {
  int64_t bytes = 0;
  double ns = 0;
};

// Returns the cost that fits both samples. `large` has more bytes. No part is negative, also when
// the larger collective was the faster one.
CollectiveCost FitCost(const CollectiveSample& small, const CollectiveSample& large);

// The bucket sizes that ChooseBuckets() has picked.
struct BucketChoice {
  int64_t first_limit_bytes = 0;
  int64_t limit_bytes = 0;     // of the further buckets
  bool last_is_small = false;  // the first limit holds for the last bucket, not for the first
  CollectiveCost cost;
  double end_ns = 0;          // of the last reduction, from the first gradient, by simulation
  double default_end_ns = 0;  // the same with the default limits

  // The choice as integers for a broadcast, and back. The doubles lose their fraction of 1e-3.
  std::vector<int64_t> Encode() const;
  static absl::StatusOr<BucketChoice> Decode(const std::vector<int64_t>& words);
  static constexpr int kWords = 7;

  std::vector<int64_t> limits_bytes() const { return {first_limit_bytes, limit_bytes}; }

  // Returns the choice and its reason in one line for a log.
  std::string ToString() const;
};

// Returns the buckets of `tensors` with the limits of `choice`, filled in the order `order`. Errors
// as BucketPlan::Assign().
absl::StatusOr<BucketPlan> PlanOf(const BucketChoice& choice,
                                  const std::vector<BucketPlan::Tensor>& tensors,
                                  std::vector<int> order);

// Returns the time at which the last bucket of `plan` is reduced. A bucket starts when its last
// gradient and all buckets before it are ready. Buckets are reduced one after the other, each at
// `cost`. `ready_ns`: by parameter.
double SimulateEnd(const BucketPlan& plan, const std::vector<BucketPlan::Tensor>& tensors,
                   const std::vector<double>& ready_ns, const CollectiveCost& cost);

// Returns the limits, of a fixed list, with which the last bucket is reduced first. The default
// limits stay unless others shorten the time after the last gradient by 10 %, and the whole by
// 0.1 %. Among equals the fewest buckets win. `ready_ns` is not empty. Errors as
// BucketPlan::Assign().
absl::StatusOr<BucketChoice> ChooseBuckets(const std::vector<BucketPlan::Tensor>& tensors,
                                           const std::vector<int>& order,
                                           const std::vector<double>& ready_ns,
                                           const CollectiveCost& cost);

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_BUCKET_TUNING_H_
