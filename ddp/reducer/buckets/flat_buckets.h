#ifndef DDP_REDUCER_BUCKETS_FLAT_BUCKETS_H_
#define DDP_REDUCER_BUCKETS_FLAT_BUCKETS_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/communicator.h"
#include "ddp/reducer/buckets/gradient_buckets.h"

namespace ddp::internal {

// Holds the gradients of each bucket in one flat tensor. One all-reduce sums that tensor.
//
// CopyIn(), or FinishCopyIn() for a batched copy, copies a gradient into the flat tensor and
// multiplies it by the factor (see set_factor()). CopyOut() copies the sum back. With views, a
// gradient that was copied in lies in the flat tensor from then on. While the user keeps it there,
// later passes only multiply it in place (a batched copy may copy it onto itself), and CopyOut()
// copies nothing. A complex number is stored as two real numbers. A sparse gradient has a bucket of
// its own: a coalesced copy of it, multiplied by the factor, is the tensor that is reduced.
//
// Dense CPU gradients of float and double (also complex) in the layout of their parameters go
// through one loop without an ATen call, an allocation or a lock. Other gradients go through ATen.
// In both ways every element is multiplied before the sum.
class FlatBuckets final : public GradientBuckets {
 public:
  struct Options {
    bool gradient_as_view = false;

    // When true, FinishCopyIn() copies all gradients of a bucket that cannot go through the loop.
    bool batched_copy = false;

    // When true, a flat tensor exists only from the bucket's first CopyIn to its CopyOut.
    bool lazy = false;
  };

  // With views, existing gradients move into the buckets.
  FlatBuckets(Setup setup, Options options);

  // Returns a factory of buckets with these options.
  static Factory MakerOf(Options options);

  bool lazy() const override { return options_.lazy; }
  void set_factor(double factor) override { factor_ = factor; }
  void CopyIn(int parameter) override;
  void FinishCopyIn(int bucket) override;
  void Zero(int bucket) override;
  void Launch(int bucket) override;
  void Wait(int bucket) override;
  at::Tensor HookBuffer(int bucket) override { return buckets_[bucket].flat; }
  int CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched) override;
  void Discard(int bucket) override;

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
    Communicator::Pending sum;  // from Launch() to CopyOut() or Discard()
  };

  void Materialize(int bucket);
  // Returns true when the loop without ATen may access `gradient` with the layout of the slot's
  // view.
  static bool SameLayout(const Slot& slot, const at::Tensor& gradient);
  static bool IsView(const Slot& slot, const at::Tensor& gradient);
  void Scale(Slot& slot, const at::Tensor& gradient) const;
  void CopyInSparse(int index);
  bool CopyOutDense(int index);  // false: the gradient was replaced
  void WarnOfStrides(Slot& slot, const at::Tensor& gradient) const;

  const Options options_;
  double factor_ = 1;
  std::vector<Bucket> buckets_;
  std::vector<Slot> slots_;  // by parameter
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_FLAT_BUCKETS_H_
