#include "ddp/reducer/gradient_hooks.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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
          [observer = observer_, parameter = parameter_] { observer->OnGradient(parameter, {}); },
          defined ? accumulator_ : nullptr);
    } else {
      // No copy: whether the gradient lies alone in its memory follows from the uses of the input.
      static const at::Tensor none;
      observer_->OnGradient(parameter_, inputs.empty() ? none : inputs[0]);
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
  // Owned here: the parameter holds it only weakly. Null for a frozen parameter.
  torch_versions::NodePtr accumulator;
  uintptr_t key = 0;
  at::ScalarType type;
  at::Device device;
};

namespace {

// Returns true when `pointer` belongs to the node `owned`, whose life does not end meanwhile. Does
// not lock the weak pointer, which would cost two atomic operations.
template <typename Node>
bool PointsTo(const std::weak_ptr<Node>& pointer, const std::shared_ptr<Node>& owned) {
  return !pointer.owner_before(owned) && !owned.owner_before(pointer);
}
template <typename Node>  // LibTorch 2.12 and later
bool PointsTo(const c10::weak_intrusive_ptr<Node>& pointer, const c10::intrusive_ptr<Node>& owned) {
  return pointer._unsafe_get_target() == owned.get();
}

bool HasAccumulator(const at::Tensor& parameter, const torch_versions::NodePtr& accumulator) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && PointsTo(meta->grad_accumulator_, accumulator);
}

}  // namespace

GradientHooks::GradientHooks(Observer* observer) : observer_(observer) {}

GradientHooks::~GradientHooks() { Remove(); }

void GradientHooks::Set(std::vector<at::Tensor> parameters) {
  Remove();
  for (at::Tensor& parameter : parameters) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameter);
    uintptr_t key = 0;
    if (accumulator) {
      key = accumulator->add_post_hook(
          std::make_unique<Hook>(observer_, accumulator.get(), static_cast<int>(hooked_.size())));
    }
    accumulators_.push_back(accumulator.get());
    hooked_.push_back({.parameter = parameter,
                       .accumulator = std::move(accumulator),
                       .key = key,
                       .type = parameter.scalar_type(),
                       .device = parameter.device()});
    layouts_.Add(parameter);
  }
  sorted_ = accumulators_;
  std::sort(sorted_.begin(), sorted_.end());
}

void GradientHooks::Remove() {
  for (const Hooked& hooked : hooked_) {
    if (hooked.accumulator) hooked.accumulator->del_post_hook(hooked.key);
  }
  hooked_.clear();
  layouts_.Clear();
  accumulators_.clear();
  sorted_.clear();
}

bool GradientHooks::Kept(size_t parameter) const {
  const Hooked& hooked = hooked_[parameter];
  const at::Tensor& tensor = hooked.parameter;
  const bool same_hook =
      hooked.accumulator ? HasAccumulator(tensor, hooked.accumulator) : !tensor.requires_grad();
  return same_hook && tensor.scalar_type() == hooked.type && tensor.device() == hooked.device &&
         layouts_.Matches(parameter, tensor);
}

bool GradientHooks::ParametersChanged() const {
  for (size_t i = 0; i < hooked_.size(); ++i) {
    if (!Kept(i)) return true;
  }
  return false;
}

std::string GradientHooks::ChangeOf(size_t parameter) const {
  if (Kept(parameter)) return "";
  const auto describe = [](at::ScalarType type, at::Device device, c10::IntArrayRef sizes,
                           c10::IntArrayRef strides) {
    return absl::StrCat(c10::toString(type), " on ", device.str(), ", shape [",
                        absl::StrJoin(sizes, ", "), "], strides [", absl::StrJoin(strides, ", "),
                        "]");
  };
  const Hooked& hooked = hooked_[parameter];
  const at::Tensor& now = hooked.parameter;
  const std::string before =
      describe(hooked.type, hooked.device, layouts_.sizes(parameter), layouts_.strides(parameter));
  const std::string after = describe(now.scalar_type(), now.device(), now.sizes(), now.strides());
  if (before == after) return "has another gradient accumulator than when the model was wrapped";
  return absl::StrCat("was ", before, "; is ", after);
}

}  // namespace ddp::internal
