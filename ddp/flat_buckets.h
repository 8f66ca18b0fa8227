#ifndef DDP_FLAT_BUCKETS_H_
#define DDP_FLAT_BUCKETS_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/bucket_plan.h"

namespace ddp {

// Gradients gathered in one flat tensor per bucket, which is then reduced as a whole.
//
// A gradient is copied in, divided by the world size on the way, and copied out when the sum is
// there. With views the parameter's gradient is a part of the bucket itself from its first copy on
// and nothing is copied any more.
//
// Dense CPU gradients of float and double go through one loop without a call into ATen, an
// allocation or a lock; everything else goes through ATen with the same arithmetic: every element
// is multiplied by 1/N before the sum, whichever way it takes.
//
// Thread-compatible: used on the thread that runs the backward, and between backwards.
class FlatBuckets {
 public:
  // `parameters` are those that `plan` speaks of; they are kept. `divisor`: what the gradients are
  // divided by. With `gradient_as_view`, gradients that exist already move into the buckets.
  FlatBuckets(BucketPlan plan, std::vector<at::Tensor> parameters, int divisor,
              bool gradient_as_view);

  int bucket_of(int parameter) const { return slots_[parameter].bucket; }
  int count() const { return static_cast<int>(flats_.size()); }
  const at::Tensor& flat(int bucket) const { return flats_[bucket]; }
  const BucketPlan& plan() const { return plan_; }

  // Puts the parameter's gradient over `divisor` into its place; zeros where it has none. Throws
  // c10::Error when the gradient is not of the parameter's type.
  void CopyIn(int parameter);

  // Makes the reduced values the parameters' gradients.
  void CopyOut(int bucket);

 private:
  struct Slot {
    int bucket = 0;
    int64_t offset = 0;  // elements into the flat tensor
    int64_t count = 0;
    bool plain = false;  // CPU, float or double, dense: fit for the loop without ATen
    at::Tensor view;     // of the flat tensor, with the parameter's shape and, if dense, strides
  };

  // Whether the loop without ATen may read or write `gradient` as if it were the slot's view.
  static bool SameLayout(const Slot& slot, const at::Tensor& gradient);
  bool IsView(const Slot& slot, const at::Tensor& gradient) const;
  void Scale(Slot& slot, const at::Tensor& gradient) const;

  const BucketPlan plan_;
  const std::vector<at::Tensor> parameters_;
  const double factor_;  // 1 / divisor
  const bool gradient_as_view_;
  std::vector<at::Tensor> flats_;
  std::vector<Slot> slots_;  // by parameter
};

}  // namespace ddp

#endif  // DDP_FLAT_BUCKETS_H_
