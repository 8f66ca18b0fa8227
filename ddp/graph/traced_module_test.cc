// Tests optimize_graph() over modules written in C++.
//
// Length: one case for each promise of GraphModule, and the modules that they need.
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/graph_executor_impl.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "ddp/common/error.h"
#include "ddp/graph/optimize_graph.h"
#include "ddp/graph/test_models.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"

namespace ddp {
namespace {

using ::ddp::testing::ConvNet;
using ::ddp::testing::ErrorOf;
using ::ddp::testing::GradientsOf;
using ::ddp::testing::NodesOf;
using ::ddp::testing::RandomCuts;
using ::ddp::testing::Tied;
using ::ddp::testing::TrainedGradients;
using ::ddp::testing::Transformer;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

torch::Tensor Images() { return torch::randn({3, 1, 8, 8}); }
torch::Tensor Tokens() { return torch::randint(20, {2, 5}, torch::kLong); }

// A module of one function, with a parameter `weight` (4), a buffer `sum` (4) and, in `kept`, a
// tensor that is not registered.
struct FunctionImpl : torch::nn::Module {
  using Function = std::function<torch::Tensor(FunctionImpl&, torch::Tensor)>;
  explicit FunctionImpl(Function function) : function(std::move(function)) {
    weight = register_parameter("weight", torch::rand({4}));
    sum = register_buffer("sum", torch::zeros({4}));
  }
  torch::Tensor forward(torch::Tensor x) { return function(*this, x); }
  Function function;
  torch::Tensor weight, sum, kept;
};
TORCH_MODULE(Function);

std::string CaptureError(const FunctionImpl::Function& function) {
  Function module(function);
  return ErrorOf<ConfigurationError>([&] { optimize_graph(module, {}, torch::rand({4})); });
}

// ---- Cut and uncut, 30 random partitions of each model ----

template <typename Net>
void ExpectEqualBits(const torch::Tensor& input) {
  torch::manual_seed(1);
  Net net;
  const auto state = [&] {  // the module's state does not depend on the runs before
    for (torch::Tensor& buffer : net->buffers()) {
      const torch::NoGradGuard no_grad;
      buffer.fill_(1);
    }
  };
  state();
  const torch::Tensor eager = TrainedGradients(*net, input, 3);
  for (const bool interpreted : {true, false}) {
    GraphOptions options{.cuts = std::vector<int>{}};
    if (interpreted) options.backend(interpreter_backend());
    const auto uncut = optimize_graph(net, options, input);
    state();
    const torch::Tensor expected = TrainedGradients(*uncut, input, 3);
    if (interpreted) {
      EXPECT_TRUE(torch::equal(expected, eager));
    } else {
      EXPECT_TRUE(torch::allclose(expected, eager, 1e-4, 1e-6));
    }
    std::mt19937 random(5);
    for (int partition = 0; partition < 30; ++partition) {
      const std::vector<int> cuts = RandomCuts(NodesOf(*uncut), random);
      options.cuts(cuts);
      const auto cut = optimize_graph(net, options, input);
      state();
      EXPECT_TRUE(torch::equal(TrainedGradients(*cut, input, 3), expected))
          << "partition " << partition << ": " << ::testing::PrintToString(cuts)
          << (interpreted ? ", interpreter" : ", executor");
    }
  }
}

TEST(TracedModuleTest, CutAndUncutConvNetsHaveEqualGradients) {
  ExpectEqualBits<ConvNet>(Images());
}
TEST(TracedModuleTest, CutAndUncutTransformersHaveEqualGradients) {
  ExpectEqualBits<Transformer>(Tokens());
}
TEST(TracedModuleTest, CutAndUncutTiedModelsHaveEqualGradients) {
  ExpectEqualBits<Tied>(torch::randn({7, 6}));
}

// ---- The module behaves as the original ----

TEST(TracedModuleTest, SharesNamesTensorsAndModes) {
  ConvNet net;
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-3}, Images());
  EXPECT_EQ(graph->name(), net->name());
  EXPECT_EQ(graph->named_parameters().keys(), net->named_parameters().keys());
  EXPECT_EQ(graph->named_buffers().keys(), net->named_buffers().keys());
  for (const auto& item : graph->named_parameters()) {
    EXPECT_TRUE(item.value().is_same(net->named_parameters()[item.key()])) << item.key();
  }
  std::ostringstream ours, theirs;
  torch::save(graph, ours);
  torch::save(net, theirs);
  std::istringstream in(ours.str());
  ConvNet loaded;
  torch::load(loaded, in);
  EXPECT_TRUE(torch::equal(loaded->first->weight, net->first->weight));
  graph->eval();
  EXPECT_FALSE(net->is_training());
  EXPECT_FALSE(net->norm->is_training());
  EXPECT_FALSE(graph->is_training());
  graph->to(torch::kDouble);
  EXPECT_EQ(net->last->weight.dtype(), torch::kDouble);
  EXPECT_EQ(graph->forward(Images().to(torch::kDouble)).dtype(), torch::kDouble);
}

// Capture changes no mode, no buffer and no random number; the modes of submodules select a graph.
TEST(TracedModuleTest, ModesOfSubmodulesStayAndSelectTheGraph) {
  ConvNet net;
  net->norm->eval();
  const torch::Tensor input = Images();
  torch::manual_seed(3);
  const torch::Tensor random = torch::rand({2});
  torch::manual_seed(3);
  const auto graph = optimize_graph(net, {.backend = interpreter_backend()}, input);
  EXPECT_TRUE(torch::equal(torch::rand({2}), random));
  EXPECT_TRUE(net->is_training());
  EXPECT_FALSE(net->norm->is_training());
  graph->forward(input);
  EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 0);
  net->norm->train();
  EXPECT_EQ(graph->graphs(), 1u);
  graph->forward(input);
  EXPECT_EQ(graph->graphs(), 2u);
  EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);  // of the run, not of the capture

  // In eval() the statistics stay, whatever ran before, and the values are the original's.
  graph->eval();
  const torch::Tensor mean = net->norm->running_mean.clone();
  EXPECT_TRUE(torch::equal(graph->forward(input), net->forward(input)));
  EXPECT_TRUE(torch::equal(net->norm->running_mean, mean));
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(graph->forward(input).requires_grad());
  EXPECT_EQ(graph->graphs(), 3u);
}

TEST(TracedModuleTest, DropoutDrawsNewNumbersInEachForward) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    return torch::dropout(x * self.weight, 0.5, self.is_training());
  });
  const torch::Tensor input = torch::ones({1000, 4});
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(
        module, {.backend = interpreted ? interpreter_backend() : graph_executor_backend()}, input);
    for (int run = 0; run < 4; ++run) {
      const torch::Tensor first = graph->forward(input);
      EXPECT_FALSE(torch::equal(first, graph->forward(input)));
      EXPECT_NEAR((first == 0).to(torch::kDouble).mean().item<double>(), 0.5, 0.1);
    }
    module->eval();
    EXPECT_TRUE(torch::equal(graph->forward(input), input * module->weight));
    module->train();
  }
  const auto graph = optimize_graph(module, {.backend = interpreter_backend()}, input);
  torch::manual_seed(2);
  const torch::Tensor expected = module->forward(input);
  torch::manual_seed(2);
  EXPECT_TRUE(torch::equal(graph->forward(input), expected));
}

// Several inputs and outputs, of several types.
struct Pair {
  torch::Tensor sum, product;
  std::optional<torch::Tensor> extra;
};
struct ManyImpl : torch::nn::Module {
  ManyImpl() { weight = register_parameter("weight", torch::ones({4})); }
  Pair forward(const torch::Tensor& a, const std::vector<torch::Tensor>& list, int64_t factor,
               bool extra, std::optional<torch::Tensor> bias) {
    Pair pair{.sum = a * weight + list[0], .product = a * list.back() * factor};
    if (bias.has_value()) pair.sum = pair.sum + *bias;
    if (extra) pair.extra = pair.sum * 2;
    return pair;
  }
  torch::Tensor weight;
};
TORCH_MODULE(Many);

TEST(TracedModuleTest, SeveralInputsAndOutputs) {
  Many net;
  const auto graph =
      optimize_graph(net, {.cuts = std::vector<int>{1}, .backend = interpreter_backend()});
  const torch::Tensor a = torch::rand({4}), b = torch::rand({4});
  for (const int64_t factor : {2, 3}) {
    for (const bool extra : {false, true}) {
      for (const std::optional<torch::Tensor>& bias :
           {std::optional<torch::Tensor>(), std::optional<torch::Tensor>(b)}) {
        const std::vector<torch::Tensor> list = {b, a, b};
        for (int run = 0; run < 2; ++run) {
          const Pair pair = graph->forward(a, list, factor, extra, bias);
          const Pair expected = net->forward(a, list, factor, extra, bias);
          EXPECT_TRUE(torch::equal(pair.sum, expected.sum));
          EXPECT_TRUE(torch::equal(pair.product, expected.product));
          ASSERT_EQ(pair.extra.has_value(), extra);
          EXPECT_TRUE(!extra || torch::equal(*pair.extra, *expected.extra));
        }
      }
    }
  }
  EXPECT_EQ(graph->graphs(), 8u);
  // One tensor as two arguments.
  EXPECT_TRUE(torch::equal(graph
                               ->forward(a, std::vector<torch::Tensor>{a, a, a}, 2, false,
                                         std::optional<torch::Tensor>(a))
                               .product,
                           a * a * 2));
}

// Autocast is on in the forward only, as programs use it. From the second run of a piece on, the
// executor has derivatives of its own.
TEST(TracedModuleTest, BackwardAfterAutocast) {
  torch::nn::Linear linear(4, 4);
  const torch::Tensor input = torch::rand({3, 4});
  const auto gradients = [&](auto& module) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const torch::Tensor result = module.forward(input);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_EQ(result.dtype(), torch::kBFloat16);
    module.zero_grad();
    result.sum().backward();
    return GradientsOf(linear->parameters());
  };
  const torch::Tensor expected = gradients(*linear);
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(
        linear, {.backend = interpreted ? interpreter_backend() : graph_executor_backend()});
    for (int run = 0; run < 4; ++run) EXPECT_TRUE(torch::equal(gradients(*graph), expected));
  }
}

// The casts of autocast are no part of a graph: they happen where the caller enables it.
TEST(TracedModuleTest, AutocastHappensInEachRun) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    return torch::linear(x, torch::diag(self.weight)) * 2;
  });
  const auto graph = optimize_graph(module, {.backend = interpreter_backend()});
  const torch::Tensor input = torch::rand({3, 4});
  EXPECT_EQ(graph->forward(input).dtype(), torch::kFloat);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const torch::Tensor cast = graph->forward(input);
  const torch::Tensor expected = module->forward(input);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  EXPECT_EQ(cast.dtype(), torch::kBFloat16);
  EXPECT_TRUE(torch::equal(cast, expected));
  EXPECT_TRUE(torch::equal(graph->forward(input), module->forward(input)));
}

struct NamedImpl : torch::nn::Module {
  NamedImpl() { weight = register_parameter("weight", torch::ones({4})); }
  std::unordered_map<std::string, torch::Tensor> forward(const torch::Tensor& x) {
    std::unordered_map<std::string, torch::Tensor> results;
    for (int i = 0; i < 20; ++i) results["times " + std::to_string(i)] = x * weight * i;
    return results;
  }
  torch::Tensor weight;
};
TORCH_MODULE(Named);

// Returns a type whose copies share their tensors.
template <typename Result>
struct SharingImpl : torch::nn::Module {
  SharingImpl() { weight = register_parameter("weight", torch::ones({4})); }
  Result forward(const torch::Tensor& x) {
    if constexpr (std::is_same_v<Result, c10::IValue>) {
      return c10::ivalue::Tuple::create(x * weight, x);
    } else if constexpr (std::is_same_v<Result, c10::List<at::Tensor>>) {
      return c10::List<at::Tensor>({x * weight, x});
    } else {
      return std::make_shared<torch::Tensor>(x * weight);
    }
  }
  torch::Tensor weight;
};

template <typename Result>
std::string ErrorOfSharing() {
  return ErrorOf<ConfigurationError>(
      [] { optimize_graph(std::make_shared<SharingImpl<Result>>(), {}, torch::ones({4})); });
}

TEST(TracedModuleTest, ResultsAreValues) {
  const auto graph = optimize_graph(Named(), {}, torch::ones({4}));
  const auto first = graph->forward(torch::ones({4}));
  const auto second = graph->forward(torch::full({4}, 2.0f));
  ASSERT_EQ(first.size(), 20u);
  for (int i = 0; i < 20; ++i) {
    const std::string name = "times " + std::to_string(i);
    EXPECT_TRUE(torch::equal(first.at(name), torch::full({4}, 1.0f * i)));
    EXPECT_TRUE(torch::equal(second.at(name), torch::full({4}, 2.0f * i)));
  }
  EXPECT_THAT(ErrorOfSharing<std::shared_ptr<torch::Tensor>>(), HasSubstr("return them by value"));
  EXPECT_THAT(ErrorOfSharing<c10::IValue>(), HasSubstr("return them by value"));
  EXPECT_THAT(ErrorOfSharing<c10::List<at::Tensor>>(), HasSubstr("return them by value"));
}

// An optimized module inside of another one is a part of the outer graph.
TEST(TracedModuleTest, OptimizedModulesNest) {
  Tied tied;
  const auto inner = optimize_graph(tied);
  struct OuterImpl : torch::nn::Module {
    explicit OuterImpl(std::shared_ptr<GraphModule<testing::TiedImpl>> net)
        : net(register_module("net", std::move(net))) {}
    torch::Tensor forward(torch::Tensor x) { return net->forward(x) * 2; }
    std::shared_ptr<GraphModule<testing::TiedImpl>> net;
  };
  const torch::Tensor input = torch::randn({7, 6});
  const auto graph =
      optimize_graph(std::make_shared<OuterImpl>(inner), {.backend = interpreter_backend()}, input);
  EXPECT_TRUE(torch::equal(graph->forward(input), tied->forward(input) * 2));
  EXPECT_EQ(inner->graphs(), 0u);
  // Captures do not nest, and an optimized script stands alone.
  const torch::Tensor row = torch::rand({4});
  const auto doubles =
      optimize_graph(Function([](FunctionImpl& self, torch::Tensor x) { return x * self.weight; }));
  EXPECT_THAT(CaptureError([&](FunctionImpl& self, torch::Tensor x) {
                doubles->capture(row);
                return x * self.weight;
              }),
              HasSubstr("outside of a forward"));
  torch::jit::Module script("Script");
  script.register_parameter("weight", torch::ones({4}, torch::requires_grad()), false);
  script.define("def forward(self, x):\n    return x * self.weight\n");
  const auto scripted = optimize_graph(script);
  EXPECT_THAT(CaptureError([&](FunctionImpl& self, torch::Tensor x) {
                return scripted->forward(x).toTensor() * self.weight;
              }),
              HasSubstr("optimize the script alone"));
}

TEST(TracedModuleTest, ShapesStridesAndGradientsSelectTheGraph) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    if (x.is_contiguous()) x = x * 2;
    if (x.requires_grad()) x = x * 3;
    return x.reshape({x.size(0), -1}).sum() * self.weight;
  });
  const auto graph = optimize_graph(module, {.backend = interpreter_backend()});
  const torch::Tensor wide = torch::rand({3, 4});
  const auto check = [&](const torch::Tensor& input, size_t graphs) {
    EXPECT_TRUE(torch::equal(graph->forward(input), module->forward(input)));
    EXPECT_EQ(graph->graphs(), graphs);
  };
  check(wide, 1);
  check(torch::rand({3, 4}), 1);
  check(torch::rand({4, 3}), 2);
  check(torch::rand({4, 3}).t(), 3);
  check(wide.clone().requires_grad_(), 4);
  check(wide.to(torch::kDouble), 5);
  check(torch::rand({1, 4}).expand({3, 4}), 6);
}

TEST(TracedModuleTest, MoreThanMaxGraphsRunWithoutAGraph) {
  Function module([](FunctionImpl& self, torch::Tensor x) { return x.sum() * self.weight; });
  const auto graph = optimize_graph(module, {.max_graphs = 2});
  for (int64_t size = 1; size < 6; ++size) {
    graph->forward(torch::ones({size})).sum().backward();
    EXPECT_EQ(graph->graphs(), std::min<size_t>(size, 2));
  }
  EXPECT_TRUE(torch::equal(module->weight.grad(), torch::full({4}, 15.0)));
}

TEST(TracedModuleTest, BuffersChangeInPlace) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    self.sum += x.detach();
    return self.weight * self.sum;
  });
  const auto graph = optimize_graph(module, {.cuts = std::vector<int>{1}}, torch::ones({4}));
  EXPECT_TRUE(torch::equal(module->sum, torch::zeros({4})));
  for (int run = 1; run < 4; ++run) {
    torch::Tensor input = torch::ones({4});
    graph->forward(input);
    EXPECT_TRUE(torch::equal(module->sum, torch::full({4}, run)));
  }
}

TEST(TracedModuleTest, CaptureDoesNotChangeTheArguments) {
  Function module(
      [](FunctionImpl& self, torch::Tensor x) { return x.add_(1).sum() * self.weight; });
  torch::Tensor input = torch::zeros({4});
  const auto graph = optimize_graph(module, {}, input);
  EXPECT_TRUE(torch::equal(input, torch::zeros({4})));
  graph->forward(input);
  EXPECT_TRUE(torch::equal(input, torch::ones({4})));
}

// ---- What a graph cannot hold ----

TEST(TracedModuleTest, RefusesOperationsByName) {
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                const torch::NoGradGuard no_grad;
                return x * self.weight;
              }),
              AllOf(HasSubstr("aten::mul"), HasSubstr("NoGradGuard")));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                return x * self.weight * self.weight.sum().item<float>();
              }),
              HasSubstr("aten::item"));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                if ((x > 0).all().item<bool>()) return x * self.weight;
                return self.weight;
              }),
              HasSubstr("aten::item"));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                return torch::equal(x, self.weight) ? x : x * self.weight;
              }),
              HasSubstr("aten::equal"));
}

// The same for sizes that depend on values, and for fill_, which torch::tensor() itself calls.
TEST(TracedModuleTest, RefusesSizesThatDependOnValues) {
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                const torch::Tensor chosen = (x * self.weight).masked_select(x > 0);
                return chosen.sum() / chosen.numel();
              }),
              HasSubstr("aten::masked_select"));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                return self.weight.sum() / self.weight.index({x > 0}).numel();
              }),
              HasSubstr("aten::index "));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                return self.weight * torch::nonzero(x).size(0);
              }),
              HasSubstr("aten::nonzero"));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                return self.weight * static_cast<int64_t>(torch::where(x > 0).size());
              }),
              HasSubstr("aten::where"));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                return self.weight.repeat_interleave((x > 0).to(torch::kLong));
              }),
              HasSubstr("aten::repeat_interleave"));
  // Sizes that do not.
  EXPECT_EQ(CaptureError([](FunctionImpl& self, torch::Tensor x) {
              torch::Tensor y = x * self.weight;
              y = torch::where(x > 0.5, y, -y).masked_fill(x < 0.1, 2.0);
              y = y.index({torch::tensor({3, 2, 1, 0})}).repeat_interleave(2);
              return y.index_put_({torch::cat({x, x}) > 0.3}, torch::tensor(1.0f));
            }),
            "no error");
}

TEST(TracedModuleTest, RefusesFillsWithoutGradients) {
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                torch::Tensor product = x * self.weight;
                {
                  const torch::NoGradGuard no_grad;
                  product.fill_(0);
                }
                return product + self.weight;
              }),
              AllOf(HasSubstr("aten::fill_"), HasSubstr("gradients disabled")));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                torch::Tensor made = torch::empty({4});
                {
                  const torch::NoGradGuard no_grad;
                  made.fill_(self.weight.sum());
                }
                return made * self.weight;
              }),
              HasSubstr("gradients disabled"));
}

struct Twice : torch::autograd::Function<Twice> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x * 2;
  }
  static std::vector<torch::Tensor> backward(torch::autograd::AutogradContext*,
                                             std::vector<torch::Tensor> gradients) {
    return {gradients[0] * 2};
  }
};

TEST(TracedModuleTest, RefusesAutogradFunctions) {
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                return Twice::apply(x * self.weight);
              }),
              AllOf(HasSubstr("aten::mul"), HasSubstr("torch::autograd::Function")));
}

TEST(TracedModuleTest, RefusesTensorsThatAreNotRegistered) {
  const auto reads = [](FunctionImpl& self, torch::Tensor x) {
    return x * self.weight + self.kept;
  };
  Function module(reads);
  module->kept = torch::ones({4});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { optimize_graph(module, {}, torch::rand({4})); }),
              AllOf(HasSubstr("aten::add"), HasSubstr("[4]"), HasSubstr("register_buffer")));
  const auto graph = optimize_graph(module, {.allow_unregistered_tensors = true}, torch::rand({4}));
  EXPECT_TRUE(torch::equal(graph->forward(torch::zeros({4})), torch::ones({4})));
  // Also where an operation returns the tensor itself, or changes it.
  for (const FunctionImpl::Function& function :
       {FunctionImpl::Function([](FunctionImpl&self, torch::Tensor x) {
          return x * self.weight + self.kept.to(torch::kFloat).contiguous();
        }),
        FunctionImpl::Function(
            [](FunctionImpl&self, torch::Tensor x) { return self.weight * self.kept.add_(x); })}) {
    Function hidden(function);
    hidden->kept = torch::ones({4});
    EXPECT_THAT(ErrorOf<ConfigurationError>([&] { optimize_graph(hidden, {}, torch::rand({4})); }),
                HasSubstr("register_buffer"));
  }
  // A tensor that the forward makes itself is a constant.
  Function literal([](FunctionImpl& self, torch::Tensor x) {
    return x * self.weight + torch::tensor({1.0f, 2.0f, 3.0f, 4.0f}) + torch::ones({4});
  });
  const auto made = optimize_graph(literal, {}, torch::rand({4}));
  EXPECT_TRUE(torch::equal(made->forward(torch::zeros({4})), torch::arange(2.0f, 6.0f)));
}

// data() of a computed tensor is no operation: a graph would keep the values of the first batch.
TEST(TracedModuleTest, RefusesDataOfComputedTensors) {
  for (const FunctionImpl::Function& function :
       {FunctionImpl::Function(
            [](FunctionImpl&self, torch::Tensor x) { return self.weight * x.data(); }),
        FunctionImpl::Function(
            [](FunctionImpl&self, torch::Tensor x) { return self.weight * x.clone().data(); }),
        FunctionImpl::Function(
            [](FunctionImpl&self, torch::Tensor x) { return self.weight * (x * 2).data(); }),
        FunctionImpl::Function([](FunctionImpl&self, torch::Tensor x) {
          return self.weight * x.to(torch::kDouble).data();
        }),
        FunctionImpl::Function([](FunctionImpl&self, torch::Tensor x) {
          torch::Tensor copy = torch::empty({4});
          copy.copy_(x);
          return self.weight * copy.data();
        })}) {
    EXPECT_THAT(CaptureError(function), AllOf(HasSubstr("aten::mul"), HasSubstr("[4]")));
  }
}

// Tensors of numbers are constants, also when they have another type or are changed or viewed.
TEST(TracedModuleTest, TensorsOfNumbersAreConstants) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    const torch::Tensor list = torch::tensor({1.0f, 2.0f, 3.0f, 4.0f});
    const torch::Tensor doubles = torch::tensor(std::vector<float>{1, 2, 3, 4}).to(torch::kDouble);
    const torch::Tensor wide = torch::tensor({{1, 2}, {3, 4}}).view({4}).clone().add_(1);
    return x * self.weight + list.unsqueeze(0).squeeze(0) * torch::tensor(2.0f) + doubles + wide;
  });
  const auto graph = optimize_graph(module, {}, torch::rand({4}));
  for (int run = 0; run < 3; ++run) {
    const torch::Tensor input = torch::rand({4});
    EXPECT_TRUE(torch::allclose(graph->forward(input), module->forward(input)));
  }
}

TEST(TracedModuleTest, RefusesMemoryThatNoOperationWrote) {
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                return self.weight * torch::tensor(std::vector<float>{1, 2, 3, 4}, torch::kDouble);
              }),
              AllOf(HasSubstr("aten::to"), HasSubstr("no operation has written")));
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                torch::Tensor ramp = torch::empty({4});
                for (int i = 0; i < 4; ++i) ramp.data_ptr<float>()[i] = i;
                return self.weight * ramp;
              }),
              HasSubstr("aten::mul"));
  EXPECT_EQ(CaptureError([](FunctionImpl& self, torch::Tensor x) {
              return torch::cat({torch::empty({0}), self.weight, torch::empty({2}).fill_(1)});
            }),
            "no error");
}

TEST(TracedModuleTest, RefusesHooks) {
  const auto clamp = [](const torch::Tensor& gradient) { return gradient.clamp(-1, 1); };
  EXPECT_THAT(CaptureError([&](FunctionImpl& self, torch::Tensor x) {
                torch::Tensor product = x * self.weight;
                product.register_hook(clamp);
                return product.sum();
              }),
              AllOf(HasSubstr("hook"), HasSubstr("MulBackward0")));
  Function module([&](FunctionImpl& self, torch::Tensor x) {
    x.register_hook(clamp);
    return x * self.weight;
  });
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { optimize_graph(module, {}, torch::rand({4}).requires_grad_()); }),
              HasSubstr("hook"));
  // Hooks of parameters, such as those of DistributedDataParallel, stay.
  Function plain([](FunctionImpl& self, torch::Tensor x) { return x * self.weight; });
  plain->weight.register_hook([](const torch::Tensor& gradient) { return gradient * 2; });
  const auto graph = optimize_graph(plain, {}, torch::ones({4}));
  graph->forward(torch::ones({4})).sum().backward();
  EXPECT_TRUE(torch::equal(plain->weight.grad(), torch::full({4}, 2.0f)));
}

TEST(TracedModuleTest, RefusesTensorsThatTheForwardKeeps) {
  EXPECT_THAT(CaptureError([](FunctionImpl& self, torch::Tensor x) {
                self.kept = (x * 2).detach();
                return x * self.weight;
              }),
              AllOf(HasSubstr("keeps a result of aten::"), HasSubstr("[4]")));
}

TEST(TracedModuleTest, RefusesSynchronizedBatchNorms) {
  Function module([](FunctionImpl& self, torch::Tensor x) { return x * self.weight; });
  module->register_module("norm", torch::nn::BatchNorm1d(4));
  EXPECT_NO_THROW(optimize_graph(module));
  const auto graph = optimize_graph(module, {}, torch::ones({4}));
  convert_sync_batchnorm(*module);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { optimize_graph(module); }),
              HasSubstr("SyncBatchNorm"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { graph->forward(torch::ones({4})); }),
              HasSubstr("SyncBatchNorm"));
}

// ---- Errors ----

struct OwnError : std::exception {
  const char* what() const noexcept override { return "own error"; }
};

TEST(TracedModuleTest, TheModulesOwnExceptionPassesThrough) {
  bool fails = true;
  Function module([&](FunctionImpl& self, torch::Tensor x) {
    self.sum += 1;
    if (fails) throw OwnError();
    return x * self.weight;
  });
  const auto graph = optimize_graph(module);
  for (int i = 0; i < 2; ++i) EXPECT_THROW(graph->forward(torch::ones({4})), OwnError);
  EXPECT_TRUE(torch::equal(module->sum, torch::zeros({4})));
  EXPECT_EQ(graph->graphs(), 0u);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { graph->bucket_layout(); }),
              HasSubstr("not captured yet"));
  fails = false;
  EXPECT_TRUE(torch::equal(graph->forward(torch::ones({4})), module->weight));
  EXPECT_THROW(graph->forward(torch::ones({5})), c10::Error);  // of the operation
  EXPECT_TRUE(torch::equal(graph->forward(torch::ones({4})), module->weight));
}

TEST(TracedModuleTest, OptionsThatAreNotUsable) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    for (int64_t i = 0; i < x.size(0); ++i) x = x + 1;
    return x.sum() * self.weight;
  });
  const auto error = [&](const GraphOptions& options) {
    return ErrorOf<ConfigurationError>([&] { optimize_graph(module, options, torch::ones({9})); });
  };
  EXPECT_THAT(error({.bucket_cap_mb = 0}), HasSubstr("0 MiB"));
  EXPECT_THAT(error({.cuts = std::vector<int>{0}}), HasSubstr("before node 0"));
  EXPECT_THAT(error({.cuts = std::vector<int>{99}}), HasSubstr("before node 99"));
  EXPECT_THAT(error({.params_to_ignore = {"other"}}), HasSubstr("names other"));
  // A list that fits the first graph only.
  const auto graph = optimize_graph(module, {.cuts = std::vector<int>{8}}, torch::ones({9}));
  EXPECT_TRUE(torch::equal(graph->forward(torch::ones({2})), 6 * module->weight));
  EXPECT_EQ(graph->graphs(), 2u);
}

// ---- Memory, backends, the plan ----

TEST(TracedModuleTest, KeepsNoTensorOfACall) {
  Function module([](FunctionImpl& self, torch::Tensor x) { return x * self.weight; });
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> weak;
  const auto graph = optimize_graph(module);
  for (int run = 0; run < 3; ++run) {
    const torch::Tensor input = torch::rand({4});
    const torch::Tensor output = graph->forward(input);
    weak.emplace_back(input.getIntrusivePtr());
    weak.emplace_back(output.getIntrusivePtr());
  }
  for (const auto& pointer : weak) EXPECT_TRUE(pointer.expired());
}

TEST(TracedModuleTest, RunsOnABackendOfTheProgram) {
  ConvNet net;
  int compiled = 0, ran = 0;
  std::string code;
  const auto interpreter = interpreter_backend();
  GraphOptions options{.bucket_cap_mb = 1e-3};
  options.backend(custom_backend([&](const GraphPiece& piece) -> PieceFunction {
    ++compiled;
    EXPECT_THAT(piece.name, HasSubstr("piece"));
    EXPECT_EQ(piece.input_names.size(), piece.graph->inputs().size());
    code += piece.graph->toString();
    const PieceFunction run = interpreter->Compile(piece);
    return [&, run](std::vector<c10::IValue> inputs) {
      ++ran;
      return run(std::move(inputs));
    };
  }));
  const torch::Tensor input = Images();
  const auto graph = optimize_graph(net, options, input);
  EXPECT_GT(compiled, 1);
  // The t and addmm of torch::nn::Linear have become one operation.
  EXPECT_THAT(code, AllOf(HasSubstr("aten::linear"), Not(HasSubstr("aten::addmm"))));
  graph->eval();
  EXPECT_TRUE(torch::equal(graph->forward(input), net->forward(input)));
  EXPECT_GT(ran, 1);

  options.backend(custom_backend([](const GraphPiece&) {
    return [](std::vector<c10::IValue>) { return std::vector<c10::IValue>(); };
  }));
  const auto wrong = optimize_graph(net, options, input);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { wrong->forward(input); }),
              AllOf(HasSubstr("returned 0 values"), HasSubstr("piece0")));
}

TEST(TracedModuleTest, TheSettingOfTheThreadIsRestored) {
  Function module([](FunctionImpl& self, torch::Tensor x) { return torch::tanh(x * self.weight); });
  const auto graph = optimize_graph(module, {}, torch::ones({4}));
  for (const bool inlining : {true, false}) {
    torch::jit::debugSetAutodiffSubgraphInlining(inlining);
    for (int run = 0; run < 3; ++run) graph->forward(torch::ones({4}));
    EXPECT_EQ(torch::jit::getAutodiffSubgraphInlining(), inlining);
  }
  torch::jit::debugSetAutodiffSubgraphInlining(true);
}

TEST(TracedModuleTest, ThePiecesAreTheBuckets) {
  Tied net;
  net->register_parameter("unused", torch::ones({3}));
  net->register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
  net->register_parameter("wide", torch::ones({3}, torch::kDouble));
  const auto graph = optimize_graph(
      net, {.bucket_cap_mb = 1e-5, .params_to_ignore = {"middle.bias"}}, torch::randn({7, 6}));
  EXPECT_THAT(graph->bucket_layout(),
              ElementsAre(ElementsAre("middle.weight"), ElementsAre("tied", "first.bias", "unused"),
                          ElementsAre("wide")))
      << graph->describe();
  EXPECT_THAT(graph->describe(), HasSubstr("middle.weight"));
}

// Parameters may be frozen and unfrozen after the capture.
TEST(TracedModuleTest, TheLayoutFollowsRequiresGrad) {
  Tied net;
  net->middle->weight.set_requires_grad(false);
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-5}, torch::randn({7, 6}));
  EXPECT_THAT(graph->bucket_layout(),
              ElementsAre(ElementsAre("middle.bias"), ElementsAre("tied", "first.bias")));
  net->middle->weight.set_requires_grad(true);
  net->first->bias.set_requires_grad(false);
  EXPECT_THAT(graph->bucket_layout(),
              ElementsAre(ElementsAre("middle.bias"), ElementsAre("tied", "middle.weight")));
}

TEST(TracedModuleTest, OperationsThatFailInALaterRun) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    return torch::embedding(self.weight.unsqueeze(1), x);
  });
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(
        module, {.backend = interpreted ? interpreter_backend() : graph_executor_backend()});
    EXPECT_THROW(graph->forward(torch::full({2}, 7)), c10::Error);  // captures
    graph->forward(torch::full({2}, 3));
    EXPECT_THAT(ErrorOf<std::runtime_error>([&] { graph->forward(torch::full({2}, 7)); }),
                HasSubstr("index out of range"));
    EXPECT_EQ(graph->forward(torch::full({2}, 3)).size(0), 2);
  }
}

}  // namespace
}  // namespace ddp
