// Tests what a cut graph computes, and the backends that run its pieces.
#include "ddp/graph/cut_program.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/graph_executor_impl.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ddp/common/error.h"
#include "ddp/graph/optimize_graph.h"
#include "ddp/graph/test_models.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"

namespace ddp {
namespace {

using ::ddp::testing::Backend;
using ::ddp::testing::ConvNet;
using ::ddp::testing::EagerScripts;
using ::ddp::testing::ErrorOf;
using ::ddp::testing::Forward;
using ::ddp::testing::Function;
using ::ddp::testing::GradientsOf;
using ::ddp::testing::JitModule;
using ::ddp::testing::NodesOf;
using ::ddp::testing::ParametersOf;
using ::ddp::testing::RandomCuts;
using ::ddp::testing::TrainedGradients;
using ::ddp::testing::WithAutocast;
using ::testing::AllOf;
using ::testing::HasSubstr;

torch::Tensor Images() { return torch::randn({3, 1, 8, 8}); }

torch::Tensor BuffersOf(const JitModule& script) {
  std::vector<torch::Tensor> flat = {torch::zeros({1}, torch::kDouble)};
  for (const torch::Tensor& buffer : script.buffers()) {
    flat.push_back(buffer.detach().to(torch::kDouble).flatten());
  }
  return torch::cat(flat);
}

// ---- Cut and uncut, 30 random partitions of each model ----

// Trains `make()` eagerly, as one graph and cut. All start with equal values.
void ExpectEqualBits(const std::function<JitModule()>& make, const torch::Tensor& input) {
  struct Outcome {
    torch::Tensor gradients, buffers;
    int nodes = 0;
  };
  const auto train = [&](const GraphOptions& options) {
    torch::manual_seed(1);
    JitModule script = make();
    const auto graph = optimize_graph(script, options);
    return Outcome{TrainedGradients(*graph, graph->parameters(), input, 3), BuffersOf(script),
                   NodesOf(*graph)};
  };
  torch::manual_seed(1);
  JitModule script = make();
  torch::Tensor eager;
  {
    const EagerScripts eager_scripts;
    eager = TrainedGradients(script, ParametersOf(script), input, 3);
  }
  for (const bool interpreted : {true, false}) {
    const auto backend = Backend(interpreted);
    const Outcome uncut = train({.cuts = std::vector<int>{}, .backend = backend});
    if (interpreted) {
      EXPECT_TRUE(torch::equal(uncut.gradients, eager));
      EXPECT_TRUE(torch::equal(uncut.buffers, BuffersOf(script)));
    } else {
      EXPECT_TRUE(torch::allclose(uncut.gradients, eager, 1e-4, 1e-6));
      EXPECT_TRUE(torch::allclose(uncut.buffers, BuffersOf(script), 1e-4, 1e-6));
    }
    std::mt19937 random(5);
    for (int partition = 0; partition < 30; ++partition) {
      const std::vector<int> cuts = RandomCuts(uncut.nodes, random);
      const Outcome cut = train({.cuts = cuts, .backend = backend});
      EXPECT_TRUE(torch::equal(cut.gradients, uncut.gradients) &&
                  torch::equal(cut.buffers, uncut.buffers))
          << "partition " << partition << ": " << ::testing::PrintToString(cuts)
          << (interpreted ? ", interpreter" : ", executor");
    }
  }
}

TEST(CutProgramTest, CutAndUncutConvNetsHaveEqualGradients) { ExpectEqualBits(ConvNet, Images()); }
TEST(CutProgramTest, CutAndUncutTransformersHaveEqualGradients) {
  ExpectEqualBits(testing::Transformer, torch::randint(20, {2, 5}, torch::kLong));
}
TEST(CutProgramTest, CutAndUncutTiedModelsHaveEqualGradients) {
  ExpectEqualBits(testing::Tied, torch::randn({7, 6}));
}

TEST(CutProgramTest, DropoutDrawsNewNumbersInEachForward) {
  JitModule script = Function(R"(
def forward(self, x):
    return torch.dropout(x * self.weight, 0.5, self.training)
)");
  const torch::Tensor weight = script.attr("weight").toTensor();
  const torch::Tensor input = torch::ones({1000, 4});
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(script, {.backend = Backend(interpreted)});
    for (int run = 0; run < 4; ++run) {
      const torch::Tensor first = Forward(*graph, input);
      EXPECT_FALSE(torch::equal(first, Forward(*graph, input)));
      EXPECT_NEAR((first == 0).to(torch::kDouble).mean().item<double>(), 0.5, 0.1);
    }
    script.eval();
    EXPECT_TRUE(torch::equal(Forward(*graph, input), input * weight));
    script.train();
  }
  const auto graph = optimize_graph(script, {.backend = interpreter_backend()});
  torch::manual_seed(2);
  const torch::Tensor expected = torch::dropout(input * weight, 0.5, true);
  torch::manual_seed(2);
  EXPECT_TRUE(torch::equal(Forward(*graph, input), expected));
}

// Autocast is on in the forward only, as programs use it. From the second run of a piece on, the
// executor has derivatives of its own.
TEST(CutProgramTest, BackwardAfterAutocast) {
  JitModule script = testing::NewScript("Linear");
  testing::AddLinear(script, "linear", 4, 4);
  script.define(
      "def forward(self, x):\n    return torch.linear(x, self.linear.weight, self.linear.bias)\n");
  const std::vector<torch::Tensor> parameters = ParametersOf(script);
  const torch::Tensor input = torch::rand({3, 4});
  const auto gradients = [&](const auto& forward) {
    const torch::Tensor result = WithAutocast(forward);
    EXPECT_EQ(result.dtype(), torch::kBFloat16);
    for (torch::Tensor parameter : parameters) parameter.mutable_grad().reset();
    result.sum().backward();
    return GradientsOf(parameters);
  };
  const torch::Tensor expected =
      gradients([&] { return torch::linear(input, parameters[0], parameters[1]); });
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(script, {.backend = Backend(interpreted)});
    for (int run = 0; run < 4; ++run) {
      EXPECT_TRUE(torch::equal(gradients([&] { return Forward(*graph, input); }), expected));
    }
  }
}

TEST(CutProgramTest, ArgumentsChangeInPlace) {
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(Function(R"(
def forward(self, x):
    return x.add_(1).sum() * self.weight
)"),
                                      {.backend = Backend(interpreted)});
    const torch::Tensor input = torch::zeros({4});
    for (int run = 1; run < 4; ++run) {
      Forward(*graph, input);
      EXPECT_TRUE(torch::equal(input, torch::full({4}, 1.0 * run)));
    }
  }
}

TEST(CutProgramTest, SeveralInputs) {
  JitModule net = Function(R"(
def forward(self, a, list: List[Tensor], factor: int, twice: bool, bias: Optional[Tensor]):
    sum = a * self.weight + list[0]
    if bias is not None:
        sum = sum + bias
    if twice:
        sum = sum * 2
    return sum, a * list[-1] * factor
)");
  const auto graph = optimize_graph(net, {.cuts = std::vector<int>{1}});
  const torch::Tensor a = torch::rand({4}), b = torch::rand({4});
  for (const bool twice : {false, true}) {
    for (const c10::IValue& bias : {c10::IValue(), c10::IValue(b)}) {
      for (const torch::Tensor& last : {b, a}) {  // one tensor may be two arguments
        const std::vector<c10::IValue> inputs = {a, std::vector<torch::Tensor>{b, a, last},
                                                 int64_t{3}, twice, bias};
        const auto result = graph->forward(inputs).toTuple();
        const auto expected = net.forward(inputs).toTuple();
        for (size_t i = 0; i < 2; ++i) {
          EXPECT_TRUE(
              torch::equal(result->elements()[i].toTensor(), expected->elements()[i].toTensor()));
        }
      }
    }
  }
  EXPECT_EQ(graph->graphs(), 1u);
}

// Such as those of DistributedDataParallel.
TEST(CutProgramTest, HooksOfParametersRun) {
  const auto graph =
      optimize_graph(Function("def forward(self, x):\n    return x * self.weight\n"));
  const torch::Tensor weight = graph->parameters()[0];
  weight.register_hook([](const torch::Tensor& gradient) { return gradient * 2; });
  Forward(*graph, torch::ones({4})).sum().backward();
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({4}, 2.0f)));
}

TEST(CutProgramTest, OptionsThatAreNotUsable) {
  const JitModule script = Function(R"(
def forward(self, x):
    if self.training:
        x = x + 1
        x = x + 2
        x = x + 3
        x = x + 4
    return x.sum() * self.weight
)");
  const auto error = [&](const GraphOptions& options) {
    return ErrorOf<ConfigurationError>([&] { optimize_graph(script, options); });
  };
  EXPECT_THAT(error({.bucket_cap_mb = 0}), HasSubstr("0 MiB"));
  EXPECT_THAT(error({.cuts = std::vector<int>{0}}), HasSubstr("before node 0"));
  EXPECT_THAT(error({.cuts = std::vector<int>{99}}), HasSubstr("before node 99"));
  EXPECT_THAT(error({.params_to_ignore = {"other"}}), HasSubstr("names other"));
  EXPECT_THAT(error({.max_graphs = 0}), HasSubstr("at least 1"));
  // A list that fits the first graph only.
  const auto graph = optimize_graph(script, {.cuts = std::vector<int>{4}});
  EXPECT_EQ(NodesOf(*graph), 6);
  graph->eval();
  EXPECT_TRUE(torch::equal(Forward(*graph, torch::ones({2})), 2 * graph->parameters()[0]));
  EXPECT_EQ(graph->graphs(), 2u);
}

// ---- Memory, backends ----

TEST(CutProgramTest, KeepsNoTensorOfACall) {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> weak;
  const auto graph =
      optimize_graph(Function("def forward(self, x):\n    return x * self.weight\n"));
  for (int run = 0; run < 3; ++run) {
    const torch::Tensor input = torch::rand({4});
    const torch::Tensor output = Forward(*graph, input);
    weak.emplace_back(input.getIntrusivePtr());
    weak.emplace_back(output.getIntrusivePtr());
  }
  for (const auto& pointer : weak) EXPECT_TRUE(pointer.expired());
}

TEST(CutProgramTest, RunsOnABackendOfTheProgram) {
  JitModule net = ConvNet();
  int compiled = 0, ran = 0;
  const auto interpreter = interpreter_backend();
  const auto counting = custom_backend([&](const GraphPiece& piece) -> PieceFunction {
    ++compiled;
    EXPECT_THAT(piece.name, HasSubstr("piece"));
    EXPECT_EQ(piece.input_names.size(), piece.graph->inputs().size());
    const PieceFunction run = interpreter->Compile(piece);
    return [&, run](std::vector<c10::IValue> inputs) {
      ++ran;
      return run(std::move(inputs));
    };
  });
  const torch::Tensor input = Images();
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-3, .backend = counting});
  EXPECT_GT(compiled, 1);
  graph->eval();
  EXPECT_TRUE(torch::equal(Forward(*graph, input), Forward(net, input)));
  EXPECT_GT(ran, 1);

  const auto wrong =
      optimize_graph(net, {.bucket_cap_mb = 1e-3, .backend = custom_backend([](const GraphPiece&) {
                                                    return [](std::vector<c10::IValue>) {
                                                      return std::vector<c10::IValue>();
                                                    };
                                                  })});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { Forward(*wrong, input); }),
              AllOf(HasSubstr("returned 0 values"), HasSubstr("piece0")));
}

TEST(CutProgramTest, TheSettingOfTheThreadIsRestored) {
  const auto graph =
      optimize_graph(Function("def forward(self, x):\n    return torch.tanh(x * self.weight)\n"));
  for (const bool inlining : {true, false}) {
    torch::jit::debugSetAutodiffSubgraphInlining(inlining);
    for (int run = 0; run < 3; ++run) Forward(*graph, torch::ones({4}));
    EXPECT_EQ(torch::jit::getAutodiffSubgraphInlining(), inlining);
  }
  torch::jit::debugSetAutodiffSubgraphInlining(true);
}

TEST(CutProgramTest, OperationsThatFail) {
  const JitModule script = Function(R"(
def forward(self, x):
    return torch.embedding(self.weight.unsqueeze(1), x)
)");
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(script, {.backend = Backend(interpreted)});
    for (int run = 0; run < 3; ++run) {
      EXPECT_THAT(ErrorOf<std::exception>([&] { Forward(*graph, torch::full({2}, 7)); }),
                  HasSubstr("index out of range"));
      EXPECT_EQ(Forward(*graph, torch::full({2}, 3)).size(0), 2);
    }
  }
}

}  // namespace
}  // namespace ddp
