#include "ddp/reducer/gradient_hooks.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "ddp/common/torch_versions.h"
#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {

class GradientHooks::Hook : public torch::autograd::FunctionPostHook {
 public:
  Hook(Observer* observer, const torch::autograd::Node* accumulator, int parameter)
      : observer_(observer), accumulator_(accumulator), parameter_(parameter) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    if (const auto events = GradientContext::OfHook()) {
      // Autograd calls the hook also for an undefined gradient, which the context does not get.
      const bool defined = !inputs.empty() && inputs[0].defined();
      events->Post(
          [observer = observer_, parameter = parameter_] { observer->OnGradient(parameter); },
          defined ? accumulator_ : nullptr);
    } else {
      observer_->OnGradient(parameter_);
    }
    return outputs;  // empty for an accumulator
  }

 private:
  Observer* const observer_;
  const torch::autograd::Node* const accumulator_;  // which owns the hook
  const int parameter_;
};

// The state of a parameter when its hook was set.
struct GradientHooks::Hooked {
  at::Tensor parameter;
  torch_versions::NodePtr accumulator;  // owned here: the parameter holds it only weakly
  uintptr_t key = 0;
  at::ScalarType type;
  at::Device device;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

GradientHooks::GradientHooks(Observer* observer) : observer_(observer) {}

GradientHooks::~GradientHooks() { Remove(); }

void GradientHooks::Set(std::vector<at::Tensor> parameters) {
  Remove();
  for (at::Tensor& parameter : parameters) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    const uintptr_t key = accumulator->add_post_hook(
        std::make_unique<Hook>(observer_, accumulator.get(), static_cast<int>(hooked_.size())));
    accumulators_.push_back(accumulator.get());
    hooked_.push_back({.parameter = parameter,
                       .accumulator = std::move(accumulator),
                       .key = key,
                       .type = parameter.scalar_type(),
                       .device = parameter.device(),
                       .sizes = parameter.sizes().vec(),
                       .strides = parameter.strides().vec()});
  }
  sorted_ = accumulators_;
  std::sort(sorted_.begin(), sorted_.end());
}

void GradientHooks::Remove() {
  for (const Hooked& hooked : hooked_) hooked.accumulator->del_post_hook(hooked.key);
  hooked_.clear();
  accumulators_.clear();
  sorted_.clear();
}

bool GradientHooks::ParametersChanged() const {
  return std::any_of(hooked_.begin(), hooked_.end(), [](const Hooked& hooked) {
    const at::Tensor& tensor = hooked.parameter;
    return torch::autograd::impl::try_get_grad_accumulator(tensor).get() !=
               hooked.accumulator.get() ||
           tensor.scalar_type() != hooked.type || tensor.device() != hooked.device ||
           tensor.sizes() != c10::IntArrayRef(hooked.sizes) ||
           tensor.strides() != c10::IntArrayRef(hooked.strides);
  });
}

}  // namespace ddp::internal
