#ifndef DDP_REDUCER_BUCKETS_BUCKET_LIMITS_H_
#define DDP_REDUCER_BUCKETS_BUCKET_LIMITS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::internal {

// The sizes of gradient buckets as a program gives them, in MiB. The fields are the options of the
// same names in ddp/options.h.
struct BucketCaps {
  std::optional<double> bucket_cap_mb;
  std::optional<double> first_bucket_cap_mb;
  std::vector<double> bucket_cap_mb_list;
};

// Returns the limits in bytes for BucketPlan::Assign(), each at least 1: one for each bucket in the
// order of filling; the last one holds for all further buckets. A list has priority over the other
// two fields. kInvalidArgument, with the option's name, when a size is not above 0 or exceeds
// 1e9 MiB.
absl::StatusOr<std::vector<int64_t>> BucketLimits(const BucketCaps& caps);

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_BUCKET_LIMITS_H_
