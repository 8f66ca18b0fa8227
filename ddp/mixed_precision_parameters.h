#ifndef DDP_MIXED_PRECISION_PARAMETERS_H_
#define DDP_MIXED_PRECISION_PARAMETERS_H_

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include "ddp/mixed_precision.h"
#include "ddp/tensor_traversal.h"

namespace c10::ivalue {
struct Future;
}  // namespace c10::ivalue

namespace ddp {
class GradBucket;
class ProcessGroup;
}  // namespace ddp

namespace ddp::internal {

// Throws ConfigurationError, naming the field, if one of the types is no floating-point type.
void CheckMixedPrecision(const MixedPrecision& config);

// The parameters of one module, in full precision and, while it computes, in a lower one.
//
// The tensors stay the same, for the module, the optimizer and the graph; what changes is the data
// behind them. So do their gradient accumulators: those expect, and are given, gradients in the
// precision that the parameters had between the steps. A module's owner calls
//
//   BeginForward      before the module's forward, after everything that works on the parameters
//   EndForward        when it has returned or thrown
//   BeginBackward     when a backward comes to the forward's outputs: before any operation that has
//                     saved a parameter looks at it again, so in a hook on those outputs
//   EndBackward       at its end, good or bad, before anything asks the parameters for their type:
//                     the optimizer, but also whoever deals buckets anew
//
// on the thread of the module; the backward's on its thread while the other waits. Each may be
// repeated and left out: several forwards before a backward, a forward without one, a backward that
// did not say that it ended. Outside of these pairs the parameters are whole: full precision, the
// storages that they always had. BeginForward takes the values as they are then; what changes a
// parameter between Begin and End is lost.
//
// A backward that comes to the graph another way than through the forward's outputs finds the
// saved parameters in full precision and fails in the first operation that mixes the types.
//
// Errors: what LibTorch throws when memory runs out; the parameters are whole then.
// Thread-compatible.
class MixedPrecisionParameters {
 public:
  // Of `parameters` those of a floating-point type other than `dtype`. They are full precision now
  // and may change their type or device later, but not between a Begin and its End.
  MixedPrecisionParameters(const std::vector<at::Tensor>& parameters, at::ScalarType dtype);
  ~MixedPrecisionParameters();  // leaves the parameters whole
  MixedPrecisionParameters(const MixedPrecisionParameters&) = delete;
  MixedPrecisionParameters& operator=(const MixedPrecisionParameters&) = delete;

  void BeginForward();
  // `backward_may_follow`: whether to keep the copies for it. Without, BeginBackward makes others.
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

// Converts a module's buffers to `dtype`: those of a floating-point type, in place.
void CastBuffers(const std::vector<at::Tensor>& buffers, at::ScalarType dtype);

// `tensor` in `dtype`, if it is of a floating-point type; gradients flow back through it.
at::Tensor CastInput(const at::Tensor& tensor, at::ScalarType dtype);

// A copy of `value`, what is given to a module, with all its tensors as CastInput gives them. Parts
// that copies share (behind pointers, in IValues) are changed for all.
template <typename T>
auto CastInputs(T&& value, at::ScalarType dtype) {
  std::decay_t<T> copy = std::forward<T>(value);
  for_each_tensor(copy, [dtype](at::Tensor& tensor) { tensor = CastInput(tensor, dtype); });
  return copy;
}

// A comm hook (see comm_hook.h) that averages in `dtype`: buckets are converted, reduced as
// without a hook, and converted back. What reduction_dtype() asks for.
std::function<c10::intrusive_ptr<c10::ivalue::Future>(GradBucket&)> reduce_dtype_hook(
    std::shared_ptr<ProcessGroup> group, at::ScalarType dtype);

}  // namespace ddp::internal

#endif  // DDP_MIXED_PRECISION_PARAMETERS_H_
