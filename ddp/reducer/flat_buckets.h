#ifndef DDP_REDUCER_FLAT_BUCKETS_H_
#define DDP_REDUCER_FLAT_BUCKETS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/reducer/bucket_plan.h"

namespace ddp::internal {

// Holds the gradients of each bucket in one flat tensor, which is reduced as a whole. Owned by the
// Reducer.
//
// CopyIn() copies a gradient into the flat tensor and multiplies it by a factor. CopyOut() copies
// the sum back. With views, each gradient is a part of the flat tensor from its first copy on, and
// further copies are not needed. A complex parameter counts as real numbers. A sparse gradient has
// a bucket of its own without a flat tensor: flat() is the gradient itself.
//
// Dense CPU gradients of float and double (also complex) go through one loop without an ATen call,
// an allocation or a lock. Other gradients go through ATen with the same arithmetic: every element
// is multiplied before the sum.
//
// Thread-compatible: used on the thread of the backward, and between backwards.
class FlatBuckets {
 public:
  struct Options {
    bool gradient_as_view = false;

    // When true, FinishCopyIn() copies all gradients of a bucket that cannot go through the loop.
    bool batched_copy = false;

    // When true, a flat tensor exists only from the bucket's first CopyIn to its CopyOut.
    bool lazy = false;

    // Makes a zeroed one-dimensional tensor of `count` elements. Unset: at::zeros.
    std::function<at::Tensor(int64_t count, const at::TensorOptions& options)> allocate;
  };

  // `parameters` are those of `plan`, by index, and are kept. A parameter with `sparse` set has a
  // bucket of its own. With views, existing gradients move into the buckets.
  FlatBuckets(BucketPlan plan, std::vector<at::Tensor> parameters, std::vector<bool> sparse,
              Options options);

  int bucket_of(int parameter) const { return slots_[parameter].bucket; }
  int count() const { return static_cast<int>(buckets_.size()); }
  const BucketPlan& plan() const { return plan_; }
  int64_t elements(int bucket) const { return buckets_[bucket].count; }

  // Returns the tensor to reduce: dense and real, or the sparse gradient.
  const at::Tensor& flat(int bucket) const { return buckets_[bucket].flat; }

  // Sets the factor for later copies.
  void set_factor(double factor) { factor_ = factor; }

  // Copies the parameter's gradient into the bucket; zeros when it is undefined. Throws c10::Error
  // when the gradient has not the parameter's type, or is sparse or dense where the other was
  // expected.
  void CopyIn(int parameter);

  // Completes the copies of a bucket. Call it after CopyIn() for all of its parameters.
  void FinishCopyIn(int bucket);

  // Replaces CopyOut() for a bucket that is not reduced: its gradients stay unchanged.
  void Discard(int bucket);

  // Sets the bucket to zero. The parameters' own gradients change only when they are views.
  void Zero(int bucket);

  // Makes the reduced values the parameters' gradients. `result` is flat(bucket) or a tensor like
  // it. A parameter with a set entry in `untouched` (by parameter; null: none) keeps its gradient.
  // Returns -1, or the first parameter whose gradient should be a view and was replaced since
  // CopyIn().
  int CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched);

 private:
  struct Slot {
    int bucket = 0;
    int64_t offset = 0;  // in real numbers, from the start of the flat tensor
    int64_t count = 0;   // in real numbers
    bool plain = false;  // suitable for the loop without ATen
    bool sparse = false;
    bool warned = false;  // about different strides
    at::Tensor view;      // into the flat tensor, in the parameter's shape and, if dense, strides
  };
  struct Bucket {
    at::Tensor flat;  // undefined: sparse and empty, or lazy and unused
    int64_t count = 0;
    std::vector<int> deferred;  // parameters whose copy waits for FinishCopyIn
  };

  void Materialize(int bucket);
  // Returns true when the loop without ATen may access `gradient` with the layout of the slot's
  // view.
  static bool SameLayout(const Slot& slot, const at::Tensor& gradient);
  static bool IsView(const Slot& slot, const at::Tensor& gradient);
  void Scale(Slot& slot, const at::Tensor& gradient) const;
  void CopyInSparse(int parameter);
  bool CopyOutDense(int parameter);  // false: the gradient was replaced
  void WarnOfStrides(Slot& slot, const at::Tensor& gradient) const;

  const BucketPlan plan_;
  const std::vector<at::Tensor> parameters_;
  const Options options_;
  double factor_ = 1;
  std::vector<Bucket> buckets_;
  std::vector<Slot> slots_;  // by parameter
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_FLAT_BUCKETS_H_
