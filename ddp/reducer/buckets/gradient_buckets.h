#ifndef DDP_REDUCER_BUCKETS_GRADIENT_BUCKETS_H_
#define DDP_REDUCER_BUCKETS_GRADIENT_BUCKETS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/reducer/buckets/bucket_plan.h"
#include "ddp/reducer/buckets/parameter_uses.h"

namespace ddp::internal {

class Communicator;

// The buckets of one plan: where the gradients lie during a pass, and how a bucket is reduced. An
// implementation owns the memory, the operations in flight, and all that depends on the device.
// FlatBuckets is the implementation of the library. Owned by the Reducer.
//
// The calls for one bucket in one pass, in this order:
// - CopyIn() for each parameter, in any order, then FinishCopyIn(). A joined rank calls Zero()
//   instead.
// - Launch(). With a comm hook, the Reducer calls HookBuffer() instead, once or more often.
// - Hold() for all buckets together, where the program finalizes the pass itself.
// - Wait(), after Launch() only. A second call returns at once.
// - CopyOut() or Discard().
// A bucket that no rank uses gets FinishCopyIn() without CopyIn(), or Zero() on a joined rank, and
// then Discard(). After a failure the Reducer may stop at any of these calls, and makes new
// buckets. Launch() is called in plan order, which is the same on every rank, and starts the same
// collectives on every rank.
//
// CopyIn() is on the hot path. With FlatBuckets that are not lazy(), a float or double gradient on
// the CPU with its parameter's strides costs no ATen operation, no lock and no allocation.
//
// Thread-compatible: used on the thread of the backward, and between backwards.
class GradientBuckets {
 public:
  struct Setup {
    BucketPlan plan;
    std::vector<at::Tensor> parameters;  // of the plan, by index
    std::vector<bool> sparse;            // true: its gradient is sparse, and alone in its bucket
    bool sums_map = false;  // every pass sums a map of used parameters: see AttachMap()
    // Returns the group's current communicator: a group replaces it after a failure.
    std::function<Communicator&()> communicator;
    bool collective = true;  // all ranks make these buckets now: they may agree on the kind
    // Of the model; outlives the buckets. Null: no parameter is shared.
    const ParameterUses* uses = nullptr;
  };
  using Factory = std::function<std::unique_ptr<GradientBuckets>(Setup setup)>;

  virtual ~GradientBuckets() = default;
  GradientBuckets(const GradientBuckets&) = delete;
  GradientBuckets& operator=(const GradientBuckets&) = delete;

  const BucketPlan& plan() const { return setup_.plan; }
  int count() const { return static_cast<int>(setup_.plan.buckets().size()); }

  // Describes in a few words how gradients are reduced, for a person.
  virtual std::string strategy() const { return "flat buckets"; }

  // A backward of the model begins or ends.
  virtual void OnBackward(bool /*begins*/) {}

  // The pass has failed on this rank and will not be continued. On return, no other rank writes
  // into this rank's gradients any more.
  virtual void Abandon() {}

  // Returns true when a bucket has memory only from its first CopyIn() or Zero() to CopyOut() or
  // Discard(). The caller of HookBuffer() then releases that tensor at the end of the pass.
  virtual bool lazy() const { return false; }

  // Sets the factor by which CopyIn() multiplies the gradients of this and later passes.
  virtual void set_factor(double factor) = 0;

  // Puts the parameter's gradient, times the factor, into the memory that its bucket's reduction
  // reads; zeros when the gradient is undefined. `input`: what the hook of the parameter's
  // accumulator has received, in such a hook; else undefined. Throws c10::Error when the gradient
  // has not the parameter's type, or is sparse or dense where the other was expected. A parameter
  // of another live model too keeps its gradient unchanged until CopyOut(): that model's hook reads
  // the gradient after this one's.
  virtual void CopyIn(int parameter, const at::Tensor& input) = 0;

  // Completes the copies of a bucket.
  virtual void FinishCopyIn(int bucket) = 0;

  // Returns true when the reduction of the last bucket can also sum a map of used parameters. The
  // answer follows from Setup alone, except `communicator`, and is the same on every rank. False:
  // the caller needs an all-reduce for the map.
  virtual bool carries_map() const { return false; }

  // Adds `map`, a number for each parameter, to the reduction of the last bucket. Call it before
  // that bucket's Launch(), in a pass without a comm hook, on all ranks or on none.
  virtual void AttachMap(const std::vector<uint8_t>& /*map*/) {}

  // Returns the sums of the maps over all ranks, by parameter. Call it between the last bucket's
  // Wait() and its CopyOut() or Discard(). On a GPU, blocks until the sum is complete.
  virtual std::vector<int32_t> AttachedSums() const { return {}; }

  // Fills the bucket with zeros. Changes the parameters' gradients only where these lie in the
  // bucket.
  virtual void Zero(int bucket) = 0;

  // Starts the sum of the bucket over all ranks. Does not block. Throws as Communicator::Start().
  virtual void Launch(int bucket) = 0;

  // The backward has ended, and any time may pass until Wait(): the other ranks must not need this
  // rank for the sums meanwhile. Whatever the program does with the parameters' gradients until
  // CopyOut() must not change the sums, except with gradient_as_bucket_view.
  virtual void Hold() {}

  // Blocks until the sum is complete, on a GPU in the order of the current stream. Throws as
  // Communicator::Wait().
  virtual void Wait(int bucket) = 0;

  // Returns the bucket as one tensor for a comm hook: one-dimensional and real, with the gradients
  // in plan order, or the sparse gradient itself. The same tensor until CopyOut() or Discard().
  virtual at::Tensor HookBuffer(int bucket) = 0;

  // Makes the reduced values the parameters' gradients. `result` is the hook's result, which is
  // like HookBuffer(bucket), or that tensor itself; undefined after Launch(). A parameter with a
  // set entry in `untouched` (by parameter; null: none) keeps its gradient, as far as the gradient
  // does not lie in the bucket. Returns -1, or the first parameter whose gradient has to lie in the
  // bucket and was replaced since CopyIn().
  virtual int CopyOut(int bucket, const at::Tensor& result, const uint8_t* untouched) = 0;

  // Ends the pass of a bucket whose sum does not become the gradients: they stay unchanged.
  virtual void Discard(int bucket) = 0;

 protected:
  explicit GradientBuckets(Setup setup) : setup_(std::move(setup)) {}

  const std::vector<int>& members(int bucket) const {
    return setup_.plan.buckets()[bucket].parameters;
  }
  size_t parameter_count() const { return setup_.parameters.size(); }
  const at::Tensor& parameter(int index) const { return setup_.parameters[index]; }
  bool shared(int index) const {
    return setup_.uses != nullptr && setup_.uses->shared(static_cast<size_t>(index));
  }
  bool sparse(int index) const { return setup_.sparse[index]; }
  bool sums_map() const { return setup_.sums_map; }
  Communicator& communicator() const { return setup_.communicator(); }

 private:
  const Setup setup_;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_BUCKETS_GRADIENT_BUCKETS_H_
