#ifndef DDP_REDUCER_GRADIENT_HOOKS_H_
#define DDP_REDUCER_GRADIENT_HOOKS_H_

#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/reducer/buckets/layout_list.h"

namespace torch::autograd {
struct Node;
}  // namespace torch::autograd

namespace ddp::internal {

// The hooks on the gradient accumulators of a model's parameters: the Observer is called for each
// gradient that autograd has accumulated. Thread-compatible; the calls come on the thread of the
// backward.
class GradientHooks {
 public:
  class Observer {
   public:
    // A gradient of `parameter` has been accumulated. `input`: the gradient that autograd has given
    // to the accumulator; undefined when there was none, or the hook is no longer running. May
    // throw, which ends the backward.
    virtual void OnGradient(int parameter, const at::Tensor& input) = 0;

   protected:
    ~Observer() = default;
  };

  // `observer` outlives the hooks.
  explicit GradientHooks(Observer* observer);
  ~GradientHooks();
  GradientHooks(const GradientHooks&) = delete;
  GradientHooks& operator=(const GradientHooks&) = delete;

  // Sets a hook on each of `parameters`, which are leaves. Keeps them and their accumulators.
  // Removes earlier hooks. A parameter that requires no gradient has no accumulator and gets no
  // hook.
  void Set(std::vector<at::Tensor> parameters);
  void Remove();

  // Returns true when a parameter's accumulator, type, device, shape or strides have changed since
  // Set(): after the module's to(), or set_data(). Also returns true when a parameter without a
  // hook requires a gradient now. O(parameters), without an ATen operation.
  bool ParametersChanged() const;
  // Describes the change of one parameter, before and after; empty: none.
  std::string ChangeOf(size_t parameter) const;

  // The accumulators, by parameter and by address. Null for a parameter without a hook.
  const std::vector<const torch::autograd::Node*>& accumulators() const { return accumulators_; }
  const std::vector<const torch::autograd::Node*>& sorted_accumulators() const { return sorted_; }

 private:
  class Hook;
  struct Hooked;

  bool Kept(size_t parameter) const;

  Observer* const observer_;
  std::vector<Hooked> hooked_;
  LayoutList layouts_;  // of the parameters
  std::vector<const torch::autograd::Node*> accumulators_;
  std::vector<const torch::autograd::Node*> sorted_;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_GRADIENT_HOOKS_H_
