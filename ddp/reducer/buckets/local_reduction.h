#ifndef DDP_REDUCER_BUCKETS_LOCAL_REDUCTION_H_
#define DDP_REDUCER_BUCKETS_LOCAL_REDUCTION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/reducer/buckets/gradient_buckets.h"

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

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_LOCAL_REDUCTION_H_
