#ifndef DDP_MIXED_PRECISION_MIXED_PRECISION_PARAMETERS_H_
#define DDP_MIXED_PRECISION_MIXED_PRECISION_PARAMETERS_H_

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/mixed_precision.h"

namespace c10::ivalue {
struct Future;
}  // namespace c10::ivalue

namespace ddp {
class GradBucket;
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

// Throws ConfigurationError, naming the field, when a type is not a floating-point type.
void CheckMixedPrecision(const MixedPrecision& config);

// Switches the parameters of one module between full precision and a lower one. Owned by a
// ModelSynchronizer.
//
// The tensor objects stay the same for the module, the optimizer and the graph; the data behind
// them changes. The gradient accumulators stay too: they expect, and get, gradients in the
// precision of the parameters between the steps. The owner calls these functions:
//
//   BeginForward      before the module's forward, after all other work on the parameters
//   EndForward        when the forward has returned or thrown
//   BeginBackward     when a backward reaches the forward's outputs (in a hook on the outputs),
//                     before any operation that has saved a parameter uses it again
//   EndBackward       at the backward's end, also by an exception, before any reader of the
//                     parameters' types: the optimizer, and the reducer when it rebuilds buckets
//
// The forward's calls come on the thread of the module, the backward's on the backward's thread,
// while the other thread waits. Calls may be repeated or left out: several forwards before a
// backward, a forward without one, a backward without EndBackward. Outside of these pairs the
// parameters are in full precision, in their own storages. BeginForward copies their current
// values. A change to a parameter between Begin and End is lost.
//
// A backward that does not go through the forward's outputs finds the saved parameters in full
// precision. The first operation that mixes the types then throws.
//
// Errors: LibTorch's, when memory runs out; the parameters are then in full precision.
// Thread-compatible.
class MixedPrecisionParameters {
 public:
  // Manages those of `parameters` that have a floating-point type other than `dtype`. They are in
  // full precision now. Their type or device may change later, but not between a Begin and its End.
  MixedPrecisionParameters(const std::vector<at::Tensor>& parameters, at::ScalarType dtype);
  ~MixedPrecisionParameters();  // restores full precision
  MixedPrecisionParameters(const MixedPrecisionParameters&) = delete;
  MixedPrecisionParameters& operator=(const MixedPrecisionParameters&) = delete;

  void BeginForward();
  // `backward_may_follow`: keeps the copies for a backward. Without it, BeginBackward makes new
  // copies.
  void EndForward(bool backward_may_follow);
  void BeginBackward();
  void EndBackward();

  bool low() const { return low_; }

 private:
  struct Item;

  void PointToCopies();
  void Restore();
  void DropCopies();

  const at::ScalarType dtype_;
  std::vector<Item> items_;
  bool low_ = false;
};

// Converts a module's floating-point buffers to `dtype`, in place.
void CastBuffers(const std::vector<at::Tensor>& buffers, at::ScalarType dtype);

// Returns `tensor` in `dtype` if it has a floating-point type. Gradients flow back through the
// conversion.
at::Tensor CastInput(const at::Tensor& tensor, at::ScalarType dtype);

// Returns a comm hook (see comm_hook.h) that averages in `dtype`: it converts each bucket, reduces
// it as without a hook, and converts it back. Used with MixedPrecision::reduction_dtype().
std::function<c10::intrusive_ptr<c10::ivalue::Future>(GradBucket&)> reduce_dtype_hook(
    std::shared_ptr<ProcessGroup> group, at::ScalarType dtype);

}  // namespace ddp::internal

#endif  // DDP_MIXED_PRECISION_MIXED_PRECISION_PARAMETERS_H_
