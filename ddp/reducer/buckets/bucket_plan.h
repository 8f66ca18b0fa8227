#ifndef DDP_REDUCER_BUCKETS_BUCKET_PLAN_H_
#define DDP_REDUCER_BUCKETS_BUCKET_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::internal {

// Assigns parameters to gradient buckets, and orders the buckets. Every parameter is in exactly one
// bucket. Buckets are reduced by rising index, so bucket 0 should hold the parameters whose
// gradients are ready first. All ranks need equal plans. A value: made by Assign(), sent as
// integers, saved as names. Pure; thread-compatible.
class BucketPlan {
 public:
  // The properties of one parameter that the assignment needs.
  struct Tensor {
    int64_t bytes = 0;
    int kind = 0;         // parameters of different kinds (dtype, device) never share a bucket
    bool sparse = false;  // its gradient will be sparse, and gets a bucket of its own
  };

  struct Bucket {
    std::vector<int> parameters;  // indices into the tensors, in the order of assignment
    friend bool operator==(const Bucket&, const Bucket&) = default;
  };

  BucketPlan() = default;

  // Assigns `tensors` to buckets, in the order of the indices `order`. Rules, equal to PyTorch's:
  // - A sparse tensor gets a bucket of its own at once.
  // - Each kind of the others fills one bucket at a time. A tensor is added first; the bucket is
  //   closed when it has reached its limit. A bucket may thus exceed its limit by one tensor.
  // - The n-th bucket of a kind has the n-th limit of `limits_bytes`; the last limit holds for all
  //   further buckets.
  // - Buckets are in the order of closing. Buckets that were never full come last, by kind.
  //
  // kInvalidArgument: `order` is not a permutation of the indices; there is no limit, or one below
  // 1.
  static absl::StatusOr<BucketPlan> Assign(const std::vector<Tensor>& tensors,
                                           const std::vector<int64_t>& limits_bytes,
                                           const std::vector<int>& order);

  // Makes the first plan, when the order of the gradients is unknown. Assigns in the order of
  // registration, then sorts the buckets by their first parameter in falling order, because a
  // backward reaches the last layers first. Errors as for Assign().
  static absl::StatusOr<BucketPlan> AssignReversed(const std::vector<Tensor>& tensors,
                                                   const std::vector<int64_t>& limits_bytes);

  // Makes the plan with these buckets of parameter names. kInvalidArgument names a parameter that
  // is missing, unknown or repeated, or a bucket that is empty, mixes kinds, or holds a sparse
  // parameter with others.
  static absl::StatusOr<BucketPlan> FromNames(const std::vector<std::vector<std::string>>& buckets,
                                              const std::vector<std::string>& parameter_names,
                                              const std::vector<Tensor>& tensors);

  // Returns the plan as integers: the parameters bucket by bucket, the number of buckets, their
  // sizes, zeros. The length depends only on the number of parameters, so a peer knows how much to
  // receive.
  std::vector<int32_t> Encode() const;
  static int64_t EncodedSize(int64_t parameters) { return 2 * parameters + 1; }

  // Returns the plan of `words`. kInvalidArgument when `words`, which came over the network, is not
  // a plan for `tensors`.
  static absl::StatusOr<BucketPlan> Decode(const std::vector<int32_t>& words,
                                           const std::vector<Tensor>& tensors);

  const std::vector<Bucket>& buckets() const { return buckets_; }
  std::vector<std::vector<std::string>> Names(
      const std::vector<std::string>& parameter_names) const;

  // Returns the plan with the order of buckets, and of the parameters in each bucket, reversed.
  BucketPlan Reversed() const;

  // Returns a text for a person, one line for each bucket:
  //   bucket 0: fc2.bias, fc2.weight
  std::string ToString(const std::vector<std::string>& parameter_names) const;

  friend bool operator==(const BucketPlan&, const BucketPlan&) = default;

 private:
  explicit BucketPlan(std::vector<Bucket> buckets) : buckets_(std::move(buckets)) {}
  absl::Status Validate(const std::vector<Tensor>& tensors) const;

  std::vector<Bucket> buckets_;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_BUCKET_PLAN_H_
