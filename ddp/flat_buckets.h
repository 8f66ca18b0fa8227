#ifndef DDP_FLAT_BUCKETS_H_
#define DDP_FLAT_BUCKETS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/bucket_plan.h"

namespace ddp::internal {

// Gradients gathered in one flat tensor per bucket, which is then reduced as a whole.
//
// A gradient is copied in, multiplied by a factor on the way, and copied out when the sum is there.
// With views the parameter's gradient is a part of the bucket itself from its first copy on and
// nothing is copied any more. Complex parameters lie in a bucket of real numbers. A sparse gradient
// is a bucket of its own, and is not flat: the gradient itself takes the bucket's place.
//
// Dense CPU gradients of float and double (and complex ones of them) go through one loop without a
// call into ATen, an allocation or a lock; everything else goes through ATen with the same
// arithmetic: every element is multiplied before the sum, whichever way it takes.
//
// Thread-compatible: used on the thread that runs the backward, and between backwards.
class FlatBuckets {
 public:
  struct Options {
    bool gradient_as_view = false;

    // Gradients that cannot go through the loop are copied all at once by FinishCopyIn.
    bool batched_copy = false;

    // Flat tensors exist from a bucket's first CopyIn to its CopyOut only.
    bool lazy = false;

    // Makes a zeroed one-dimensional tensor. Unset: at::zeros.
    std::function<at::Tensor(int64_t count, const at::TensorOptions& options)> allocate;
  };

  // `parameters` are those that `plan` speaks of; they are kept. Parameters with `sparse` set stand
  // alone in their buckets. With views, gradients that exist already move into the buckets.
  FlatBuckets(BucketPlan plan, std::vector<at::Tensor> parameters, std::vector<bool> sparse,
              Options options);

  int bucket_of(int parameter) const { return slots_[parameter].bucket; }
  int count() const { return static_cast<int>(buckets_.size()); }
  const BucketPlan& plan() const { return plan_; }
  int64_t elements(int bucket) const { return buckets_[bucket].count; }

  // What is reduced: a dense tensor of real numbers, or the sparse gradient.
  const at::Tensor& flat(int bucket) const { return buckets_[bucket].flat; }

  // What gradients are multiplied by from now on.
  void set_factor(double factor) { factor_ = factor; }

  // Puts the parameter's gradient into its place; zeros where it has none. Throws c10::Error when
  // the gradient is not of the parameter's type, or sparse where a dense one was expected.
  void CopyIn(int parameter);

  // To be called when all of a bucket's gradients were copied in.
  void FinishCopyIn(int bucket);

  // Instead of CopyOut where the bucket is not reduced: every gradient stays as it is.
  void Discard(int bucket);

  // Makes every gradient of the bucket zero, without touching the parameters' own gradients unless
  // they are views.
  void Zero(int bucket);

  // Makes the reduced values the parameters' gradients. `result` is flat(bucket) or a tensor like
  // it. Parameters with a set entry in `untouched` (by parameter; null: none) keep what they have.
  // Returns the first parameter whose gradient should be a view and was replaced in between; -1
  // when there is none.
  int CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched);

 private:
  struct Slot {
    int bucket = 0;
    int64_t offset = 0;  // real numbers into the flat tensor
    int64_t count = 0;   // real numbers
    bool plain = false;  // fit for the loop without ATen
    bool sparse = false;
    bool warned = false;  // of strides that differ
    at::Tensor view;      // of the flat tensor, with the parameter's shape and, if dense, strides
  };
  struct Bucket {
    at::Tensor flat;  // undefined: sparse and empty, or lazy and not needed now
    int64_t count = 0;
    std::vector<int> deferred;  // parameters whose copy waits for FinishCopyIn
  };

  void Materialize(int bucket);
  // Whether the loop without ATen may read or write `gradient` as if it were the slot's view.
  static bool SameLayout(const Slot& slot, const at::Tensor& gradient);
  static bool IsView(const Slot& slot, const at::Tensor& gradient);
  void Scale(Slot& slot, const at::Tensor& gradient) const;
  void CopyInSparse(int parameter);
  bool CopyOutDense(int parameter);  // false: replaced
  void WarnOfStrides(Slot& slot, const at::Tensor& gradient) const;

  const BucketPlan plan_;
  const std::vector<at::Tensor> parameters_;
  const Options options_;
  double factor_ = 1;
  std::vector<Bucket> buckets_;
  std::vector<Slot> slots_;  // by parameter
};

}  // namespace ddp::internal

#endif  // DDP_FLAT_BUCKETS_H_
