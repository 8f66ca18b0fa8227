#ifndef DDP_REDUCER_BUCKETS_FLAT_BUCKETS_H_
#define DDP_REDUCER_BUCKETS_FLAT_BUCKETS_H_

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/comm/communicator.h"
#include "ddp/reducer/buckets/gradient_buckets.h"
#include "ddp/reducer/buckets/layout_list.h"

namespace ddp::internal {

// Holds the gradients of each bucket in one flat tensor. One all-reduce sums that tensor.
//
// CopyIn(), or FinishCopyIn() for a batched copy, copies a gradient into the flat tensor and
// multiplies it by the factor (see set_factor()). CopyOut() copies the sum back. With views, a
// gradient that was copied in lies in the flat tensor from then on. While the user keeps it there,
// later passes only multiply it in place (a batched copy may copy it onto itself), and CopyOut()
// copies nothing. A parameter that another live model has too gets no view. A complex number is
// stored as two real numbers. A sparse gradient has a bucket of its own: a coalesced copy of it,
// multiplied by the factor, is the tensor that is reduced.
//
// Dense CPU gradients of float and double (also complex) in the layout of their parameters go
// through one loop without an ATen call, an allocation or a lock. Other gradients go through ATen.
// In both ways every element is multiplied before the sum.
//
// The last bucket can carry the map of used parameters, one element for each parameter behind the
// gradients. The elements are float or double, so that counts of ranks are exact.
class FlatBuckets final : public GradientBuckets {
 public:
  struct Options {
    bool gradient_as_view = false;

    // When true, and always on a GPU, the gradients of a bucket that cannot go through the loop are
    // copied in by one operation of FinishCopyIn(), and copied out by one of CopyOut().
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
  void CopyIn(int parameter, const at::Tensor& input) override;
  void FinishCopyIn(int bucket) override;
  void Zero(int bucket) override;
  bool carries_map() const override { return carries_map_; }
  void AttachMap(const std::vector<uint8_t>& map) override;
  std::vector<int32_t> AttachedSums() const override;
  void Launch(int bucket) override;
  void Wait(int bucket) override;
  at::Tensor HookBuffer(int bucket) override { return buckets_[bucket].flat; }
  int CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched) override;
  void Discard(int bucket) override;

 private:
  // The part of a flat tensor for one parameter. Small, since a step reads all slots.
  struct Slot {
    void* data = nullptr;  // of the view, when it is suitable for the loop without ATen; else null
    int64_t count = 0;     // in real numbers
    int parameter = 0;
    int bucket = 0;
    at::ScalarType type = at::kFloat;
    bool plain = false;  // suitable for the loop, as far as the parameter decides
    bool sparse = false;
    bool warned = false;   // about different strides
    bool as_view = false;  // in this pass: the gradient lies in the flat tensor from CopyIn() on
  };
  struct Bucket {
    at::Tensor flat;      // undefined: sparse and empty, or lazy and unused
    at::Tensor with_map;  // `flat` and the elements of the map behind it; undefined: no map
    bool map_attached = false;
    bool batched = false;
    int first_slot = 0;
    int64_t count = 0;
    std::vector<int> deferred;  // parameters whose copy waits for FinishCopyIn, FinishCopyOut
    Communicator::Pending sum;  // from Launch() to CopyOut() or Discard()
  };

  void Materialize(int bucket);
  void PrefetchAfter(int slot) const;
  // Returns true when the loop without ATen may access `gradient` as it accesses slot.data.
  bool IsPlain(int slot, const at::Tensor& gradient) const;
  bool IsView(int slot, const at::Tensor& gradient) const;
  void ScalePlain(const Slot& slot, const at::Tensor& gradient) const;
  void Scale(int slot, const at::Tensor& gradient);
  void ChooseView(Slot& slot, int number);
  void CopyInSlowly(int slot);
  void CopyInSparse(int index);
  bool CopyOutDense(int slot);  // false: the gradient was replaced
  void FinishCopyOut(Bucket& bucket);
  void WarnOfStrides(int slot, const at::Tensor& gradient);

  const Options options_;
  double factor_ = 1;
  std::vector<Bucket> buckets_;
  bool carries_map_ = false;

  // Gradients come in plan order after the first pass, so slots are in plan order.
  std::vector<Slot> slots_;
  std::vector<at::Tensor> views_;  // by slot, in the parameter's shape and, if dense, strides
  LayoutList layouts_;             // by slot: the parameter's
  std::vector<int> slot_of_;       // by parameter
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_FLAT_BUCKETS_H_
