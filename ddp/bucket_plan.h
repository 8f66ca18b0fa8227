#ifndef DDP_BUCKET_PLAN_H_
#define DDP_BUCKET_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::internal {

// Which parameters share a gradient bucket, and in which order the buckets are reduced.
//
// Every parameter is in exactly one bucket; buckets are launched by index, so bucket 0 should hold
// the parameters whose gradients are ready first. All ranks need equal plans. A value: made by
// Assign, sent as integers, saved as names. Pure; thread-compatible.
class BucketPlan {
 public:
  // What the assignment needs to know of one parameter.
  struct Tensor {
    int64_t bytes = 0;
    int kind = 0;         // parameters of different kinds (dtype, device) never share a bucket
    bool sparse = false;  // expects a sparse gradient, and so a bucket of its own
  };

  struct Bucket {
    std::vector<int> parameters;  // indices into the tensors given, in the order they were placed
    friend bool operator==(const Bucket&, const Bucket&) = default;
  };

  BucketPlan() = default;

  // Deals `tensors`, taken in the order of the indices `order`, into buckets. A sparse one gets a
  // bucket of its own at once; of the others each kind fills one bucket at a time: a tensor is
  // added first and the bucket closed once it has reached its limit, so a bucket may exceed its
  // limit by one tensor. The n-th bucket of a kind has the n-th limit of `limits_bytes`, the last
  // limit serving all further ones. Buckets stand in the order in which they were closed, those
  // never filled last, by kind. (The rules are PyTorch's, whose plans ours equal.)
  //
  // kInvalidArgument: `order` is not a permutation of the indices; no limit, or one below 1.
  static absl::StatusOr<BucketPlan> Assign(const std::vector<Tensor>& tensors,
                                           const std::vector<int64_t>& limits_bytes,
                                           const std::vector<int>& order);

  // The plan before any gradient was seen: dealt in the order of registration and then reversed,
  // since backward meets the last layers first. Errors as for Assign.
  static absl::StatusOr<BucketPlan> AssignReversed(const std::vector<Tensor>& tensors,
                                                   const std::vector<int64_t>& limits_bytes);

  // The plan with these buckets of parameter names. kInvalidArgument names the first parameter that
  // is missing, unknown or there twice, or of another kind than its bucket.
  static absl::StatusOr<BucketPlan> FromNames(const std::vector<std::vector<std::string>>& buckets,
                                              const std::vector<std::string>& parameter_names,
                                              const std::vector<Tensor>& tensors);

  // As integers of a length that depends on the number of parameters only, so that a peer knows how
  // much to receive: the parameters bucket by bucket, the number of buckets, their sizes, zeros.
  std::vector<int32_t> Encode() const;
  static int64_t EncodedSize(int64_t parameters) { return 2 * parameters + 1; }

  // The inverse. kInvalidArgument when `words` is no plan for `tensors`: it came over the network.
  static absl::StatusOr<BucketPlan> Decode(const std::vector<int32_t>& words,
                                           const std::vector<Tensor>& tensors);

  const std::vector<Bucket>& buckets() const { return buckets_; }
  std::vector<std::vector<std::string>> Names(
      const std::vector<std::string>& parameter_names) const;

  // The same plan with its buckets, and the parameters in each, the other way round.
  BucketPlan Reversed() const;

  // For a person, a line for each bucket:
  //   bucket 0: fc2.bias, fc2.weight
  std::string ToString(const std::vector<std::string>& parameter_names) const;

  friend bool operator==(const BucketPlan&, const BucketPlan&) = default;

 private:
  explicit BucketPlan(std::vector<Bucket> buckets) : buckets_(std::move(buckets)) {}
  absl::Status Validate(const std::vector<Tensor>& tensors) const;

  std::vector<Bucket> buckets_;
};

}  // namespace ddp::internal

#endif  // DDP_BUCKET_PLAN_H_
