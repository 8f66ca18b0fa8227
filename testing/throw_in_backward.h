#ifndef DDP_TESTING_THROW_IN_BACKWARD_H_
#define DDP_TESTING_THROW_IN_BACKWARD_H_

#include <stdexcept>
#include <string>

#include <torch/autograd.h>
#include <torch/types.h>

namespace ddp::testing {

// Returns a copy of `x` whose backward throws std::runtime_error with the text `message`.
inline torch::Tensor ThrowInBackward(const torch::Tensor& x, const std::string& message) {
  struct Explosive : torch::autograd::Function<Explosive> {
    static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                                 const std::string& message) {
      context->saved_data["message"] = message;
      return x.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                   const torch::autograd::variable_list&) {
      throw std::runtime_error(context->saved_data["message"].toStringRef());
    }
  };
  return Explosive::apply(x, message);
}

}  // namespace ddp::testing

#endif  // DDP_TESTING_THROW_IN_BACKWARD_H_
