// Tests optimize_graph() over modules written in C++.
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/graph_executor_impl.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "ddp/common/error.h"
#include "ddp/graph/capture_cases.h"
#include "ddp/graph/optimize_graph.h"
#include "ddp/graph/test_models.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"

namespace ddp {
namespace {

using ::ddp::testing::Backend;
using ::ddp::testing::CaptureCase;
using ::ddp::testing::CaptureError;
using ::ddp::testing::ConvNet;
using ::ddp::testing::ErrorOf;
using ::ddp::testing::Function;
using ::ddp::testing::FunctionImpl;
using ::ddp::testing::GradientsOf;
using ::ddp::testing::Many;
using ::ddp::testing::NodesOf;
using ::ddp::testing::Pair;
using ::ddp::testing::RandomCuts;
using ::ddp::testing::Tied;
using ::ddp::testing::TrainedGradients;
using ::ddp::testing::Transformer;
using ::ddp::testing::WithAutocast;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::ValuesIn;

torch::Tensor Images() { return torch::randn({3, 1, 8, 8}); }
torch::Tensor Tokens() { return torch::randint(20, {2, 5}, torch::kLong); }

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
  const torch::Tensor mean = net->norm->running_mean.clone();
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-3}, Images());
  EXPECT_TRUE(torch::equal(net->norm->running_mean, mean)) << "the capture's batch is in it";
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
    const auto graph = optimize_graph(module, {.backend = Backend(interpreted)}, input);
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
    const torch::Tensor result = WithAutocast([&] { return module.forward(input); });
    EXPECT_EQ(result.dtype(), torch::kBFloat16);
    module.zero_grad();
    result.sum().backward();
    return GradientsOf(linear->parameters());
  };
  const torch::Tensor expected = gradients(*linear);
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(linear, {.backend = Backend(interpreted)});
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
  const torch::Tensor cast = WithAutocast([&] { return graph->forward(input); });
  const torch::Tensor expected = WithAutocast([&] { return module->forward(input); });
  EXPECT_EQ(cast.dtype(), torch::kBFloat16);
  EXPECT_TRUE(torch::equal(cast, expected));
  EXPECT_TRUE(torch::equal(graph->forward(input), module->forward(input)));
}

template <typename Result>
std::string ErrorOfSharing() {
  return ErrorOf<ConfigurationError>([] {
    optimize_graph(std::make_shared<testing::SharingImpl<Result>>(), {}, torch::ones({4}));
  });
}

TEST(TracedModuleTest, ResultsAreValues) {
  const auto graph = optimize_graph(testing::Named(), {}, torch::ones({4}));
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

class CaptureTest : public ::testing::TestWithParam<CaptureCase> {};

TEST_P(CaptureTest, TheMessageNamesTheOperation) {
  const std::string error = CaptureError(GetParam().forward);
  for (const std::string& word : GetParam().words) EXPECT_THAT(error, HasSubstr(word));
}

constexpr auto kNameOf = [](const auto& info) { return std::string(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Operations, CaptureTest, ValuesIn(testing::CapturesOfOperations()),
                         kNameOf);
INSTANTIATE_TEST_SUITE_P(Sizes, CaptureTest, ValuesIn(testing::CapturesOfSizes()), kNameOf);
INSTANTIATE_TEST_SUITE_P(Fills, CaptureTest, ValuesIn(testing::CapturesOfFills()), kNameOf);
INSTANTIATE_TEST_SUITE_P(Memory, CaptureTest, ValuesIn(testing::CapturesOfMemory()), kNameOf);

TEST(TracedModuleTest, TakesTensorsThatAreNotRegisteredWhenAllowed) {
  Function module([](FunctionImpl& self, torch::Tensor x) { return x * self.weight + self.kept; });
  module->kept = torch::ones({4});
  const auto graph = optimize_graph(module, {.allow_unregistered_tensors = true}, torch::rand({4}));
  EXPECT_TRUE(torch::equal(graph->forward(torch::zeros({4})), torch::ones({4})));
  // A tensor that the forward makes itself is a constant.
  Function literal([](FunctionImpl& self, torch::Tensor x) {
    return x * self.weight + torch::tensor({1.0f, 2.0f, 3.0f, 4.0f}) + torch::ones({4});
  });
  const auto made = optimize_graph(literal, {}, torch::rand({4}));
  EXPECT_TRUE(torch::equal(made->forward(torch::zeros({4})), torch::arange(2.0f, 6.0f)));
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

TEST(TracedModuleTest, RefusesHooksOfInputsAndTakesThoseOfParameters) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    x.register_hook([](const torch::Tensor& gradient) { return gradient.clamp(-1, 1); });
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

TEST(TracedModuleTest, OperationsThatFailInALaterRun) {
  Function module([](FunctionImpl& self, torch::Tensor x) {
    return torch::embedding(self.weight.unsqueeze(1), x);
  });
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(module, {.backend = Backend(interpreted)});
    EXPECT_THROW(graph->forward(torch::full({2}, 7)), c10::Error);  // captures
    graph->forward(torch::full({2}, 3));
    EXPECT_THAT(ErrorOf<std::runtime_error>([&] { graph->forward(torch::full({2}, 7)); }),
                HasSubstr("index out of range"));
    EXPECT_EQ(graph->forward(torch::full({2}, 3)).size(0), 2);
  }
}

}  // namespace
}  // namespace ddp
