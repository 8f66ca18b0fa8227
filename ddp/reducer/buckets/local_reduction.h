#ifndef DDP_REDUCER_BUCKETS_LOCAL_REDUCTION_H_
#define DDP_REDUCER_BUCKETS_LOCAL_REDUCTION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include "ddp/comm/communicator.h"
#include "ddp/common/logging.h"
#include "ddp/reducer/buckets/gradient_buckets.h"
#include "ddp/reducer/buckets/gradient_check.h"
#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {

// The buckets of a group of one rank: each gradient is its own average and stays where autograd has
// put it. A pass makes no copy, no flat tensor and no collective; on a GPU it launches no kernel
// and records no event. The checks of gradients, the zeros for a gradient that is missing and the
// cut from the graph of a backward with create_graph are those of FlatBuckets.
//
// A comm hook needs a flat tensor: the Reducer makes FlatBuckets when a hook is registered.
class LocalReduction final : public GradientBuckets {
 public:
  explicit LocalReduction(Setup setup);

  // Returns a factory of LocalReduction in a group of one, and else of the buckets of `otherwise`.
  static Factory MakerOf(Factory otherwise);

  std::string strategy() const override { return "none: the only rank keeps its gradients"; }
  void set_factor(double factor) override { factor_ = factor; }
  void CopyIn(int parameter, const at::Tensor& input) override;
  void FinishCopyIn(int /*bucket*/) override {}
  void Zero(int /*bucket*/) override {}
  bool carries_map() const override { return sums_map(); }
  void AttachMap(const std::vector<uint8_t>& map) override { map_.assign(map.begin(), map.end()); }
  std::vector<int32_t> AttachedSums() const override { return map_; }
  void Launch(int /*bucket*/) override {}
  void Hold() override;
  void Wait(int /*bucket*/) override {}
  at::Tensor HookBuffer(int bucket) override;
  int CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched) override;
  void Discard(int bucket) override { Return(bucket); }

 private:
  void Return(int bucket);
  void CopyOutOne(int parameter) const;

  double factor_ = 1;
  std::vector<int32_t> map_;
  std::vector<at::Tensor> held_;  // the gradients, from Hold() on; empty: they are in place
};

inline LocalReduction::LocalReduction(Setup setup) : GradientBuckets(std::move(setup)) {}

inline GradientBuckets::Factory LocalReduction::MakerOf(Factory otherwise) {
  return [otherwise = std::move(otherwise)](Setup setup) -> std::unique_ptr<GradientBuckets> {
    if (setup.communicator().size() > 1) return otherwise(std::move(setup));
    return std::make_unique<LocalReduction>(std::move(setup));
  };
}

inline void LocalReduction::CopyIn(int index, const at::Tensor& /*input*/) {
  const at::Tensor& gradient = GradientOf(parameter(index));
  if (!gradient.defined()) return;
  if (sparse(index)) {
    CheckSparseGradient(gradient);
  } else {
    CheckDenseGradient(gradient, parameter(index));
  }
}

// As in larger groups, a zero_grad() does not reach the gradients until finalize_backward(). A
// gradient of several models stays: each of them returns its own.
inline void LocalReduction::Hold() {
  held_.resize(parameter_count());
  for (int bucket = 0; bucket < count(); ++bucket) {
    for (const int index : members(bucket)) {
      if (shared(index)) continue;
      held_[index] = GradientOf(parameter(index));
      SetGradientOf(parameter(index), {});
    }
  }
}

inline void LocalReduction::Return(int bucket) {
  if (held_.empty()) return;
  for (const int index : members(bucket)) {
    if (held_[index].defined()) SetGradientOf(parameter(index), std::move(held_[index]));
  }
  if (bucket + 1 == count()) held_.clear();
}

inline at::Tensor LocalReduction::HookBuffer(int bucket) {
  LOG(FATAL) << "a comm hook needs flat buckets, and bucket " << bucket << " has none";
  return {};
}

inline int LocalReduction::CopyOut(int bucket, const at::Tensor& /*result*/,
                                   const uint8_t* untouched) {
  const at::NoGradGuard no_grad;
  Return(bucket);
  for (const int index : members(bucket)) {
    if (untouched == nullptr || !untouched[index]) CopyOutOne(index);
  }
  return -1;
}

// The average is a new tensor wherever it differs from the gradient, because two gradients may
// share memory.
inline void LocalReduction::CopyOutOne(int index) const {
  const at::Tensor& leaf = parameter(index);
  const at::Tensor& gradient = GradientOf(leaf);
  if (!gradient.defined()) {
    return SetGradientOf(leaf, sparse(index) ? SparseZeros(leaf) : at::zeros_like(leaf));
  }
  if (factor_ == 1 && !sparse(index) && !gradient.requires_grad()) return;
  at::Tensor average = gradient.detach();
  if (sparse(index)) average = average.coalesce();
  if (factor_ != 1) average = average.mul(factor_);
  SetGradientOf(leaf, std::move(average));
}

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_LOCAL_REDUCTION_H_
