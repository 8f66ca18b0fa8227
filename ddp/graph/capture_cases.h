// Forwards that optimize_graph() refuses, and some that it takes, as tables for a test.
#ifndef DDP_GRAPH_CAPTURE_CASES_H_
#define DDP_GRAPH_CAPTURE_CASES_H_

#include <torch/autograd.h>
#include <torch/nn.h>

#include <string>
#include <vector>

#include "ddp/graph/test_models.h"

namespace ddp::testing {

struct CaptureCase {
  const char* name;
  FunctionImpl::Function forward;
  std::vector<std::string> words;  // all are in what CaptureError() returns
};

struct Twice : torch::autograd::Function<Twice> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x * 2;
  }
  static std::vector<torch::Tensor> backward(torch::autograd::AutogradContext*,
                                             std::vector<torch::Tensor> gradients) {
    return {gradients[0] * 2};
  }
};

// Operations that a graph cannot hold.
inline std::vector<CaptureCase> CapturesOfOperations() {
  return {
      {"MulWithoutGradients",
       [](FunctionImpl& self, torch::Tensor x) {
         const torch::NoGradGuard no_grad;
         return x * self.weight;
       },
       {"aten::mul", "NoGradGuard"}},
      {"Item",
       [](FunctionImpl& self, torch::Tensor x) {
         return x * self.weight * self.weight.sum().item<float>();
       },
       {"aten::item"}},
      {"ItemOfACondition",
       [](FunctionImpl& self, torch::Tensor x) {
         if ((x > 0).all().item<bool>()) return x * self.weight;
         return self.weight;
       },
       {"aten::item"}},
      {"Equal",
       [](FunctionImpl& self, torch::Tensor x) {
         return torch::equal(x, self.weight) ? x : x * self.weight;
       },
       {"aten::equal"}},
      {"AutogradFunction",
       [](FunctionImpl& self, torch::Tensor x) { return Twice::apply(x * self.weight); },
       {"aten::mul", "torch::autograd::Function"}},
      {"HookOfATensor",
       [](FunctionImpl& self, torch::Tensor x) {
         torch::Tensor product = x * self.weight;
         product.register_hook([](const torch::Tensor& gradient) { return gradient.clamp(-1, 1); });
         return product.sum();
       },
       {"hook", "MulBackward0"}},
      {"TensorThatTheForwardKeeps",
       [](FunctionImpl& self, torch::Tensor x) {
         self.kept = (x * 2).detach();
         return x * self.weight;
       },
       {"keeps a result of aten::", "[4]"}},
      {"TensorThatIsNotRegistered",
       [](FunctionImpl& self, torch::Tensor x) { return x * self.weight + self.kept; },
       {"aten::add", "[4]", "register_buffer"}},
      {"OperationsThatReturnAnUnregisteredTensorItself",
       [](FunctionImpl& self, torch::Tensor x) {
         return x * self.weight + self.kept.to(torch::kFloat).contiguous();
       },
       {"register_buffer"}},
      {"ChangeOfAnUnregisteredTensor",
       [](FunctionImpl& self, torch::Tensor x) { return self.weight * self.kept.add_(x); },
       {"register_buffer"}},
  };
}

// Sizes that depend on values: a graph would keep the sizes of the first batch.
inline std::vector<CaptureCase> CapturesOfSizes() {
  return {
      {"MaskedSelect",
       [](FunctionImpl& self, torch::Tensor x) {
         const torch::Tensor chosen = (x * self.weight).masked_select(x > 0);
         return chosen.sum() / chosen.numel();
       },
       {"aten::masked_select"}},
      {"IndexByMask",
       [](FunctionImpl& self, torch::Tensor x) {
         return self.weight.sum() / self.weight.index({x > 0}).numel();
       },
       {"aten::index "}},
      {"Nonzero",
       [](FunctionImpl& self, torch::Tensor x) { return self.weight * torch::nonzero(x).size(0); },
       {"aten::nonzero"}},
      {"Where",
       [](FunctionImpl& self, torch::Tensor x) {
         return self.weight * static_cast<int64_t>(torch::where(x > 0).size());
       },
       {"aten::where"}},
      {"RepeatInterleave",
       [](FunctionImpl& self, torch::Tensor x) {
         return self.weight.repeat_interleave((x > 0).to(torch::kLong));
       },
       {"aten::repeat_interleave"}},
      {"SizesThatDoNotDependOnValues",
       [](FunctionImpl& self, torch::Tensor x) {
         torch::Tensor y = x * self.weight;
         y = torch::where(x > 0.5, y, -y).masked_fill(x < 0.1, 2.0);
         y = y.index({torch::tensor({3, 2, 1, 0})}).repeat_interleave(2);
         return y.index_put_({torch::cat({x, x}) > 0.3}, torch::tensor(1.0f));
       },
       {"no error"}},
  };
}

// fill_, which torch::tensor() itself calls, on tensors that the forward has computed.
inline std::vector<CaptureCase> CapturesOfFills() {
  return {
      {"FillOfAResult",
       [](FunctionImpl& self, torch::Tensor x) {
         torch::Tensor product = x * self.weight;
         {
           const torch::NoGradGuard no_grad;
           product.fill_(0);
         }
         return product + self.weight;
       },
       {"aten::fill_", "gradients disabled"}},
      {"FillByAResult",
       [](FunctionImpl& self, torch::Tensor x) {
         torch::Tensor made = torch::empty({4});
         {
           const torch::NoGradGuard no_grad;
           made.fill_(self.weight.sum());
         }
         return made * self.weight;
       },
       {"gradients disabled"}},
  };
}

// data() of a computed tensor is no operation, nor is a write through a pointer: a graph would keep
// the values of the first batch.
inline std::vector<CaptureCase> CapturesOfMemory() {
  return {
      {"DataOfAnInput",
       [](FunctionImpl& self, torch::Tensor x) { return self.weight * x.data(); },
       {"aten::mul", "[4]"}},
      {"DataOfAClone",
       [](FunctionImpl& self, torch::Tensor x) { return self.weight * x.clone().data(); },
       {"aten::mul", "[4]"}},
      {"DataOfAResult",
       [](FunctionImpl& self, torch::Tensor x) { return self.weight * (x * 2).data(); },
       {"aten::mul", "[4]"}},
      {"DataOfAConversion",
       [](FunctionImpl& self, torch::Tensor x) {
         return self.weight * x.to(torch::kDouble).data();
       },
       {"aten::mul", "[4]"}},
      {"DataOfACopy",
       [](FunctionImpl& self, torch::Tensor x) {
         torch::Tensor copy = torch::empty({4});
         copy.copy_(x);
         return self.weight * copy.data();
       },
       {"aten::mul", "[4]"}},
      {"NumbersOfAnotherType",
       [](FunctionImpl& self, torch::Tensor x) {
         return self.weight * torch::tensor(std::vector<float>{1, 2, 3, 4}, torch::kDouble);
       },
       {"aten::to", "no operation has written"}},
      {"WriteThroughAPointer",
       [](FunctionImpl& self, torch::Tensor x) {
         torch::Tensor ramp = torch::empty({4});
         for (int i = 0; i < 4; ++i) ramp.data_ptr<float>()[i] = i;
         return self.weight * ramp;
       },
       {"aten::mul"}},
      {"EmptyAndFilledMemory",
       [](FunctionImpl& self, torch::Tensor x) {
         return torch::cat({torch::empty({0}), self.weight, torch::empty({2}).fill_(1)});
       },
       {"no error"}},
  };
}

}  // namespace ddp::testing

#endif  // DDP_GRAPH_CAPTURE_CASES_H_
