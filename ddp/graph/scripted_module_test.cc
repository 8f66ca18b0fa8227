// Tests that an optimized script behaves as the script itself.
#include <torch/script.h>
#include <torch/torch.h>

#include <memory>
#include <random>
#include <sstream>
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

using ::ddp::testing::AddLinear;
using ::ddp::testing::Backend;
using ::ddp::testing::EagerScripts;
using ::ddp::testing::ErrorOf;
using ::ddp::testing::Forward;
using ::ddp::testing::Function;
using ::ddp::testing::GradientsOf;
using ::ddp::testing::JitModule;
using ::ddp::testing::NewScript;
using ::ddp::testing::NodesOf;
using ::ddp::testing::ParametersOf;
using ::ddp::testing::RandomCuts;
using ::ddp::testing::TrainedGradients;
using ::ddp::testing::WithAutocast;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
// Returns a module of three layers, a buffer `sum` (4), a flag `training`, a number `scale` and a
// count `calls`, written to a file and read again.
JitModule Net(const std::string& forward) {
  torch::manual_seed(3);
  JitModule net = NewScript("Net");
  net.register_attribute("scale", c10::FloatType::get(), 1.0);
  net.register_attribute("calls", c10::IntType::get(), int64_t{0});
  net.register_buffer("sum", torch::zeros({4}));
  for (const char* name : {"first", "second", "third"}) AddLinear(net, name, 4, 4);
  JitModule guard("Guard", net.type()->compilation_unit(),
                  /*shouldMangle=*/true);  // like torch.no_grad() of Python
  guard.define("def __enter__(self):\n  torch.set_grad_enabled(False)\n");
  guard.define(
      "def __exit__(self, type: Any, value: Any, trace: Any):\n  torch.set_grad_enabled(True)\n");
  net.register_module("guard", guard);
  net.define(forward);
  std::stringstream file;
  net.save(file);
  return torch::jit::load(file);
}

constexpr char kForward[] = R"(
def forward(self, x, twice: bool = False):
    x = torch.relu(torch.linear(x, self.first.weight, self.first.bias))
    if self.training:
        self.sum.add_(x.detach().mean(0))
    if self.second.training:
        x = x * 2
    x = torch.linear(x, self.second.weight, self.second.bias) * self.scale
    if x.size(0) > 3:
        x = x + 1
    if twice:
        x = x * 2
    return torch.linear(x, self.third.weight, self.third.bias)
)";

TEST(ScriptModuleTest, CutAndUncutHaveEqualGradients) {
  JitModule net = Net(kForward);
  const torch::Tensor input = torch::rand({5, 4});
  const std::vector<torch::Tensor> parameters = ParametersOf(net);
  torch::Tensor eager;
  {
    const EagerScripts eager_scripts;
    eager = TrainedGradients(net, parameters, input, 1);
  }
  for (const bool interpreted : {true, false}) {
    const auto backend = Backend(interpreted);
    const auto uncut = optimize_graph(net, {.cuts = std::vector<int>{}, .backend = backend});
    const torch::Tensor expected = TrainedGradients(*uncut, parameters, input, 4);
    EXPECT_TRUE(interpreted ? torch::equal(expected, eager)
                            : torch::allclose(expected, eager, 1e-4, 1e-6));
    std::mt19937 random(9);
    for (int partition = 0; partition < 30; ++partition) {
      const auto cut =
          optimize_graph(net, {.cuts = RandomCuts(NodesOf(*uncut), random), .backend = backend});
      EXPECT_TRUE(torch::equal(TrainedGradients(*cut, parameters, input, 4), expected))
          << partition;
    }
  }
}

TEST(ScriptModuleTest, SharesNamesTensorsAndModes) {
  JitModule net = Net(kForward);
  const auto graph = optimize_graph(net);
  std::vector<std::string> names;
  for (const auto& item : net.named_parameters()) names.push_back(item.name);
  EXPECT_EQ(graph->name(), net.type()->name()->name());
  EXPECT_EQ(graph->named_parameters().keys(), names);
  EXPECT_THAT(graph->named_buffers().keys(), ElementsAre("sum"));
  EXPECT_TRUE(graph->named_parameters()["second.bias"].is_same(
      net.attr("second").toModule().attr("bias").toTensor()));
  {
    const torch::NoGradGuard no_grad;
    graph->parameters()[0].fill_(3);
  }
  std::stringstream file;
  graph->script().save(file);
  EXPECT_TRUE(
      torch::equal(torch::jit::load(file).attr("first").toModule().attr("weight").toTensor(),
                   torch::full({4, 4}, 3.0)));
  graph->eval();
  EXPECT_FALSE(net.is_training());
  EXPECT_FALSE(net.attr("second").toModule().is_training());
  graph->children()[1]->train();
  EXPECT_TRUE(net.attr("second").toModule().is_training());
  EXPECT_FALSE(graph->is_training());
  EXPECT_FALSE(net.attr("third").toModule().is_training());
  graph->to(torch::kDouble);
  EXPECT_EQ(net.attr("sum").toTensor().dtype(), torch::kDouble);
  EXPECT_EQ(graph->forward(torch::rand({2, 4}, torch::kDouble)).toTensor().dtype(), torch::kDouble);
}

// One graph serves all shapes; modes and numbers in attributes select a graph.
TEST(ScriptModuleTest, BehavesAsTheScript) {
  JitModule net = Net(kForward);
  JitModule same = Net(kForward);
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-5});
  EXPECT_EQ(graph->bucket_layout().size(), 3u);
  const auto check = [&](size_t graphs) {
    for (const int64_t size : {2, 5, 3}) {
      const torch::Tensor input = torch::rand({size, 4});
      for (const bool twice : {false, true}) {
        EXPECT_TRUE(torch::allclose(graph->forward(input, twice).toTensor(),
                                    same.forward({input, twice}).toTensor(), 1e-5, 1e-6));
      }
      EXPECT_TRUE(torch::allclose(graph->forward(input).toTensor(),
                                  same.forward({input}).toTensor(), 1e-5, 1e-6));
    }
    EXPECT_EQ(graph->graphs(), graphs);
    EXPECT_TRUE(torch::allclose(net.attr("sum").toTensor(), same.attr("sum").toTensor()));
  };
  check(1);
  for (JitModule module : {net, same}) module.eval();
  check(2);
  for (JitModule module : {net, same}) module.attr("second").toModule().train();
  check(3);
  for (JitModule module : {net, same}) module.setattr("scale", 0.5);
  check(4);
  for (JitModule module : {net, same}) {
    module.setattr("scale", 1.0);
    module.train();
  }
  check(4);
  const torch::NoGradGuard no_grad;
  check(4);
}

// The modes of submodules stay, and select the graph. Making a graph runs no operation.
TEST(ScriptModuleTest, ModesOfSubmodulesSelectTheGraph) {
  JitModule net = testing::ConvNet();
  JitModule norm = net.attr("norm").toModule();
  const torch::Tensor batches = norm.attr("num_batches_tracked").toTensor();
  norm.eval();
  const torch::Tensor input = torch::randn({3, 1, 8, 8});
  torch::manual_seed(3);
  const torch::Tensor random = torch::rand({2});
  torch::manual_seed(3);
  const auto graph = optimize_graph(net, {.backend = interpreter_backend()});
  EXPECT_TRUE(torch::equal(torch::rand({2}), random));
  EXPECT_TRUE(net.is_training());
  EXPECT_FALSE(norm.is_training());
  graph->forward(input);
  EXPECT_EQ(batches.item<int64_t>(), 0);
  norm.train();
  EXPECT_EQ(graph->graphs(), 1u);
  graph->forward(input);
  EXPECT_EQ(graph->graphs(), 2u);
  EXPECT_EQ(batches.item<int64_t>(), 1);

  // In eval() the statistics stay, whatever ran before, and the values are the script's.
  graph->eval();
  const torch::Tensor mean = norm.attr("running_mean").toTensor().clone();
  EXPECT_TRUE(torch::equal(Forward(*graph, input), Forward(net, input)));
  EXPECT_TRUE(torch::equal(norm.attr("running_mean").toTensor(), mean));
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(Forward(*graph, input).requires_grad());
  EXPECT_EQ(graph->graphs(), 2u);  // the first one again
}

TEST(ScriptModuleTest, OneGraphServesShapesStridesTypesAndGradients) {
  JitModule script = Function(R"(
def forward(self, x):
    if x.is_contiguous():
        x = x * 2
    if x.requires_grad:
        x = x * 3
    return x.reshape(x.size(0), -1).sum() * self.weight
)");
  const auto graph = optimize_graph(script, {.backend = interpreter_backend()});
  const torch::Tensor wide = torch::rand({3, 4});
  for (const torch::Tensor& input :
       {wide, torch::rand({4, 3}), torch::rand({4, 3}).t(), wide.clone().requires_grad_(),
        wide.to(torch::kDouble), torch::rand({1, 4}).expand({3, 4})}) {
    const double factor = (input.is_contiguous() ? 2 : 1) * (input.requires_grad() ? 3 : 1);
    EXPECT_TRUE(torch::allclose(Forward(*graph, input),
                                input.sum() * factor * script.attr("weight").toTensor()));
  }
  EXPECT_EQ(graph->graphs(), 1u);
}

// A cut never lies between the begin and the end of a `with` block.
TEST(ScriptModuleTest, WithBlocksAreNotCut) {
  JitModule net = Net(R"(
def forward(self, x):
    x = torch.linear(x, self.first.weight, self.first.bias)
    with self.guard:
        y = torch.linear(x, self.second.weight, self.second.bias)
        y = torch.relu(y)
        self.sum.copy_(y.sum(0))
    return torch.linear(x + y, self.third.weight, self.third.bias)
)");
  const torch::Tensor input = torch::rand({2, 4});
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-5});
  for (int run = 0; run < 4; ++run) {
    graph->zero_grad();
    graph->forward(input).toTensor().sum().backward();
    EXPECT_FALSE(graph->named_parameters()["second.weight"].grad().defined());
    EXPECT_TRUE(graph->named_parameters()["first.weight"].grad().defined());
    EXPECT_TRUE(torch::GradMode::is_enabled());
  }
  int refused = 0;
  const int nodes = NodesOf(*graph);
  for (int cut = 1; cut < nodes; ++cut) {
    const std::string error = ErrorOf<ConfigurationError>(
        [&] { optimize_graph(net, {.cuts = std::vector<int>{cut}})->forward(input).toTensor(); });
    if (error == "no error") continue;
    ++refused;
    EXPECT_THAT(error, HasSubstr("cannot begin a piece"));
  }
  EXPECT_GE(refused, 4);
  EXPECT_LT(refused, nodes - 1);
}

// Buffers and numbers that the code assigns are followed, also when the forward throws.
TEST(ScriptModuleTest, AssignedAttributesAreFollowed) {
  JitModule net = Net(R"(
def forward(self, x, fail: bool = False):
    self.calls += 1
    self.sum = (self.sum + x).detach()
    assert not fail, "no"
    y = (x * self.sum).to(self.first.bias.dtype)
    return torch.linear(y, self.first.weight, self.first.bias) * self.calls
)");
  for (const bool interpreted : {true, false}) {
    const auto graph =
        optimize_graph(net, {.cuts = std::vector<int>{2, 5}, .backend = Backend(interpreted)});
    net.setattr("calls", int64_t{0});
    graph->buffers()[0].zero_();
    const torch::Tensor ones = torch::ones({4});
    for (int64_t run = 1; run < 4; ++run) {
      graph->forward(ones);
      EXPECT_EQ(net.attr("calls").toInt(), run);
      EXPECT_TRUE(torch::equal(graph->buffers()[0], torch::full({4}, run)));
      EXPECT_TRUE(net.attr("sum").toTensor().is_same(graph->buffers()[0]));
    }
    EXPECT_THROW(graph->forward(ones, true), std::exception);
    EXPECT_TRUE(torch::equal(graph->buffers()[0], torch::full({4}, 4.0)));
    EXPECT_EQ(net.attr("calls").toInt(), 4);
    // Writes from outside reach the script: a broadcast, a load and a change of the type.
    graph->buffers()[0].fill_(10);
    EXPECT_TRUE(torch::equal(net.attr("sum").toTensor(), torch::full({4}, 10.0)));
    std::stringstream file;
    torch::save(std::dynamic_pointer_cast<torch::nn::Module>(graph), file);
    graph->forward(ones);
    torch::nn::Module& base = *graph;
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    base.load(archive);
    EXPECT_TRUE(torch::equal(net.attr("sum").toTensor(), torch::full({4}, 10.0)));
    graph->to(torch::kDouble);
    EXPECT_EQ(net.attr("sum").toTensor().dtype(), torch::kDouble);
    graph->forward(ones.to(torch::kDouble));
    graph->to(torch::kFloat);
    EXPECT_TRUE(torch::equal(graph->buffers()[0], torch::full({4}, 11.0)));
    // An assignment of another size and type.
    net.setattr("sum", torch::ones({1}, torch::kDouble));
    graph->forward(ones);
    EXPECT_EQ(graph->buffers()[0].dtype(), torch::kDouble);
    EXPECT_TRUE(torch::equal(graph->buffers()[0], torch::full({4}, 2.0, torch::kDouble)));
    net.setattr("sum", torch::zeros({4}));
    graph->forward(ones);
    EXPECT_EQ(graph->buffers()[0].dtype(), torch::kFloat);
  }
}

// A backward gets the values that its own forward had, as with the script itself.
TEST(ScriptModuleTest, WhatAutogradSavedOfABufferStays) {
  constexpr char kMultipliesThenAssigns[] = R"(
def forward(self, x):
    y = torch.linear(x, self.first.weight, self.first.bias) * self.sum
    self.sum = self.sum + 1
    return y
)";
  constexpr char kAssignsThenMultiplies[] = R"(
def forward(self, x):
    self.sum = self.sum + 1
    return torch.linear(x, self.first.weight, self.first.bias) * self.sum
)";
  const torch::Tensor input = torch::rand({2, 4});
  for (const char* code : {kMultipliesThenAssigns, kAssignsThenMultiplies}) {
    for (const bool interpreted : {true, false}) {
      JitModule script = Net(code);
      const std::vector<torch::Tensor> parameters = ParametersOf(script);
      const auto graph = optimize_graph(Net(code), {.backend = Backend(interpreted)});
      const torch::Tensor weight = graph->named_parameters()["first.weight"];
      for (int step = 0; step < 4; ++step) {
        {
          const EagerScripts eager_scripts;
          Forward(script, input).sum().backward();
        }
        graph->forward(input).toTensor().sum().backward();
        const torch::Tensor expected = GradientsOf(parameters);
        const torch::Tensor gradients = GradientsOf(graph->parameters());
        EXPECT_TRUE(interpreted ? torch::equal(gradients, expected)
                                : torch::allclose(gradients, expected, 1e-5, 1e-6))
            << code << step;
        EXPECT_TRUE(torch::equal(graph->buffers()[0], script.attr("sum").toTensor()));
      }
      // Two forwards before one backward, and a write from outside between them. The gradient of
      // the weight is the input times the value of the buffer.
      const double first = code == kMultipliesThenAssigns ? 4 : 5;
      const double second = code == kMultipliesThenAssigns ? 20 : 21;
      graph->zero_grad();
      const torch::Tensor one = graph->forward(input).toTensor();
      graph->buffers()[0].fill_(20);
      const torch::Tensor two = graph->forward(input).toTensor();
      (one + two).sum().backward();
      EXPECT_TRUE(torch::allclose(weight.grad(),
                                  (input.sum(0) * (first + second)).expand({4, 4}).contiguous()))
          << code;
    }
  }
}

TEST(ScriptModuleTest, RefusesAssignmentsThatCannotBeFollowed) {
  EXPECT_THAT(ErrorOf<ConfigurationError>([] {
                optimize_graph(Net(R"(
def forward(self, x):
    self.first.weight = self.first.weight * 2
    return torch.linear(x, self.first.weight, self.first.bias)
)"));
              }),
              AllOf(HasSubstr("assigns weight"), HasSubstr("needs a gradient")));
  JitModule net = NewScript("Net", {{"weight", torch::rand({4})}});
  const torch::Tensor sum = torch::zeros({4});
  for (const char* name : {"sum", "same"}) net.register_buffer(name, sum);
  net.define(R"(
def forward(self, x):
    self.sum = x.detach()
    return x * self.weight * self.same
)");
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { optimize_graph(net); }),
              AllOf(HasSubstr("assigns sum"), HasSubstr("another name")));
}

TEST(ScriptModuleTest, RefusesAutocastBlocks) {
  JitModule net = NewScript("Net", {{"weight", torch::rand({4, 4})}});
  JitModule guard("__torch__.torch.amp.autocast_mode.autocast", net.type()->compilation_unit());
  guard.define("def __enter__(self):\n  pass\n");
  guard.define("def __exit__(self, type: Any, value: Any, trace: Any):\n  pass\n");
  net.register_module("guard", guard);
  net.define(R"(
def forward(self, x):
    if x.size(0) > 1:
        with self.guard:
            x = torch.matmul(x, self.weight)
    return x
)");
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { optimize_graph(net); }),
              HasSubstr("autocast block"));
}

// The casts of autocast are no part of a graph: they happen where the caller enables it.
TEST(ScriptModuleTest, AutocastHappensInEachRun) {
  const torch::Tensor input = torch::rand({5, 4});
  for (const bool interpreted : {true, false}) {
    const auto graph = optimize_graph(Net(kForward), {.backend = Backend(interpreted)});
    JitModule script = Net(kForward);
    for (int step = 0; step < 4; ++step) {
      const bool casts = step != 1;
      const auto run = [&](auto& module) {
        const auto forward = [&] { return Forward(module, input); };
        return casts ? WithAutocast(forward) : forward();
      };
      const torch::Tensor result = run(*graph);
      EXPECT_EQ(result.dtype(), casts ? torch::kBFloat16 : torch::kFloat);
      result.sum().backward();
      const EagerScripts eager_scripts;
      run(script).sum().backward();
    }
    EXPECT_TRUE(torch::allclose(GradientsOf(graph->parameters()), GradientsOf(ParametersOf(script)),
                                1e-4, 1e-5));
  }
}

TEST(ScriptModuleTest, SeveralOutputs) {
  JitModule net = Net(R"(
def forward(self, x):
    y = torch.linear(x, self.first.weight, self.first.bias)
    z = torch.linear(y, self.second.weight, self.second.bias)
    return x, [y, z], {'sum': z + self.sum}, 7
)");
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-5});
  const torch::Tensor input = torch::rand({2, 4});
  for (int run = 0; run < 3; ++run) {
    const auto result = graph->forward(input).toTuple();
    EXPECT_TRUE(result->elements()[0].toTensor().is_same(input));
    EXPECT_EQ(result->elements()[1].toTensorVector().size(), 2u);
    EXPECT_TRUE(torch::equal(result->elements()[2].toGenericDict().at("sum").toTensor(),
                             result->elements()[1].toTensorVector()[1]));
    EXPECT_EQ(result->elements()[3].toInt(), 7);
  }
}

TEST(ScriptModuleTest, ArgumentsAreChecked) {
  const auto graph = optimize_graph(Net(kForward));
  const auto error = [&](std::vector<c10::IValue> inputs) {
    return ErrorOf<ConfigurationError>([&] { graph->forward(inputs); });
  };
  const torch::Tensor x = torch::rand({2, 4});
  EXPECT_THAT(error({}), HasSubstr("missing value for argument 'x'"));
  EXPECT_THAT(error({x, true, 3}), HasSubstr("at most 3 argument(s)"));
  EXPECT_THAT(error({x, "yes"}), HasSubstr("'twice'"));
  EXPECT_EQ(error({x, true}), "no error");
}

TEST(ScriptModuleTest, RefusesModulesThatAGraphCannotHold) {
  const auto error = [](const JitModule& net) {
    return ErrorOf<ConfigurationError>([&] { optimize_graph(net); });
  };
  JitModule frozen = Net(kForward);
  frozen.eval();
  EXPECT_THAT(error(torch::jit::freeze(frozen)), HasSubstr("has no parameters"));
  EXPECT_THAT(error(NewScript("Layer", {{"weight", torch::rand({4})}})),
              HasSubstr("has no method forward"));
  JitModule synchronized = Net(kForward);
  synchronized.register_module(
      "norm", JitModule("SyncBatchNorm", std::make_shared<torch::jit::CompilationUnit>()));
  EXPECT_THAT(error(synchronized), HasSubstr("SyncBatchNorm"));
  EXPECT_THAT(error(Net(R"(
def forward(self, x):
    return torch.embedding(self.first.weight, x, -1, False, True)
)")),
              AllOf(HasSubstr("sparse=True"), HasSubstr("without optimize_graph()")));
  for (const bool before : {false, true}) {  // a script's own hooks are no part of its forward
    JitModule hooked = Net(kForward);
    hooked.define("def hook(self, input: Tuple[Tensor], output: Tensor):\n    return output\n");
    EXPECT_EQ(error(hooked), "no error");
    torch::jit::Function& hook = hooked.get_method("hook").function();
    before ? hooked.type()->addForwardPreHook(&hook) : hooked.type()->addForwardHook(&hook);
    EXPECT_THAT(error(hooked), AllOf(HasSubstr("hooks"), HasSubstr("without optimize_graph()")));
  }
}

TEST(ScriptModuleTest, MoreThanMaxGraphsRunTheScript) {
  JitModule net = Net(kForward);
  const auto graph = optimize_graph(net, {.max_graphs = 2});
  const torch::Tensor input = torch::rand({2, 4});
  for (const double scale : {1.0, 2.0, 3.0, 4.0}) {
    net.setattr("scale", scale);
    EXPECT_TRUE(torch::allclose(graph->forward(input).toTensor(), net.forward({input}).toTensor()));
  }
  EXPECT_EQ(graph->graphs(), 2u);
}

}  // namespace
}  // namespace ddp
