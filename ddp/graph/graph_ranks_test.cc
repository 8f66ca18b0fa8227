// Tests optimized scripts under DistributedDataParallel on real processes.
#include <torch/script.h>
#include <torch/torch.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/graph/launch_timeline.h"
#include "ddp/graph/optimize_graph.h"
#include "ddp/graph/test_models.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::AddLayer;
using ::ddp::testing::Backend;
using ::ddp::testing::Chain;
using ::ddp::testing::EagerScripts;
using ::ddp::testing::Flatten;
using ::ddp::testing::Forward;
using ::ddp::testing::GradientsOf;
using ::ddp::testing::JitModule;
using ::ddp::testing::LaunchesOf;
using ::ddp::testing::NewScript;
using ::ddp::testing::Pieces;
using ::ddp::testing::PiecesOf;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::Tied;
using ::ddp::testing::Timeline;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

torch::Tensor Images(int rank, int64_t step) {
  torch::manual_seed(100 * step + rank);
  return torch::randn({3, 1, 8, 8});
}

torch::Tensor Tokens(int rank, int64_t step) {
  torch::manual_seed(100 * step + rank);
  return torch::randint(20, {2, 5}, torch::kLong);
}

torch::Tensor Rows(int rank, int64_t step) {
  torch::manual_seed(100 * step + rank);
  return torch::randn({7, 6});
}

// Trains an eager and a cut script side by side. With the interpreter, all bits are equal. With the
// executor, gradients differ by at most a millionth of the largest.
template <typename Batch>
void TrainBoth(const std::shared_ptr<ProcessGroup>& group, JitModule (*make)(), Batch batch,
               bool interpreted) {
  torch::manual_seed(1);
  const auto graph =
      optimize_graph(make(), {.bucket_cap_mb = 1e-4, .backend = Backend(interpreted)});
  ASSERT_GT(graph->bucket_layout().size(), 1u) << graph->describe();
  const DistributedDataParallelOptions options{.bucket_layout = graph->bucket_layout()};
  torch::manual_seed(1);  // the same start
  DistributedDataParallel eager(make(), group, options);
  DistributedDataParallel model(graph, group, options);
  EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());
  torch::optim::SGD eager_optimizer(eager->parameters(), 0.05);
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  for (int64_t step = 0; step < 6; ++step) {
    eager_optimizer.zero_grad();
    optimizer.zero_grad();
    {
      const EagerScripts eager_scripts;
      eager(batch(group->rank(), step)).toTensor().pow(2).mean().backward();
    }
    model.forward(batch(group->rank(), step)).toTensor().pow(2).mean().backward();
    const torch::Tensor gradients = GradientsOf(model->parameters());
    const torch::Tensor expected = GradientsOf(eager->parameters());
    EXPECT_TRUE(SameOnAllRanks(*group, gradients)) << "step " << step;
    const double difference = (gradients - expected).abs().max().item<double>();
    const double limit = interpreted ? 0 : 1e-6 * expected.abs().max().item<double>();
    EXPECT_LE(difference, limit) << graph->name() << ", step " << step;
    eager_optimizer.step();
    optimizer.step();
  }
  EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());  // never rebuilt
}

RANK_TEST(GraphRanksTest, TrainsAsTheEagerModel, 2) {
  const auto group = init_process_group();
  for (const bool interpreted : {true, false}) {
    TrainBoth(group, testing::ConvNet, Images, interpreted);
    TrainBoth(group, testing::Transformer, Tokens, interpreted);
    TrainBoth(group, Tied, Rows, interpreted);
  }
}

// The wrapper gets the plan after its first forward.
RANK_TEST(GraphRanksTest, ThePlanMayComeAfterTheFirstForward, 2) {
  const auto group = init_process_group();
  torch::manual_seed(group->rank());
  const auto graph = optimize_graph(Tied(), {.bucket_cap_mb = 1e-5});
  DistributedDataParallel model(graph, group);
  for (int64_t step = 0; step < 3; ++step) {
    model.zero_grad();
    model.forward(Rows(group->rank(), step)).toTensor().pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, GradientsOf(model->parameters())));
    if (step == 0) model.set_bucket_layout(graph->bucket_layout());
    EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());
  }
}

// The names that the wrapper ignores may be those of buffers, and one of two names of a tensor.
RANK_TEST(GraphRanksTest, TakesTheIgnoredNamesOfTheWrapper, 2) {
  const auto group = init_process_group();
  torch::manual_seed(1);
  JitModule net = Tied();
  net.register_buffer("count", torch::zeros({1}));
  for (const std::set<std::string>& ignored :
       {std::set<std::string>{"count", "middle.bias", "tied"},
        std::set<std::string>{"count", "first.weight"}}) {
    const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-5, .params_to_ignore = ignored});
    DistributedDataParallel model(
        graph, group,
        {.params_and_buffers_to_ignore = ignored, .bucket_layout = graph->bucket_layout()});
    EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());
    model.zero_grad();
    model.forward(Rows(group->rank(), 1)).toTensor().pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, net.attr("tied").toTensor().grad()));
  }
}

JitModule Script() {
  torch::manual_seed(5);
  JitModule net = NewScript("Net");
  for (const char* name : {"first", "second", "third"}) {
    AddLayer(net, name, {{"weight", torch::randn({8, 8})}, {"bias", torch::randn({8})}});
  }
  net.register_buffer("mean", torch::zeros({8}));
  net.define(R"(
def forward(self, x):
    x = torch.tanh(torch.linear(x, self.first.weight, self.first.bias))
    if self.training:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
    x = torch.tanh(torch.linear(x - self.mean, self.second.weight, self.second.bias))
    return torch.linear(x, self.third.weight, self.third.bias)
)");
  return net;
}

// A script that assigns its buffer trains as the wrapper of the script itself.
RANK_TEST(GraphRanksTest, TrainsAScriptWithABufferThatItAssigns, 2) {
  const auto group = init_process_group();
  const EagerScripts eager_scripts;
  const auto graph =
      optimize_graph(Script(), {.bucket_cap_mb = 1e-4, .backend = interpreter_backend()});
  DistributedDataParallelOptions options{.bucket_layout = graph->bucket_layout()};
  ASSERT_EQ(options.bucket_layout.size(), 3u);
  DistributedDataParallel eager(Script(), group, options);
  DistributedDataParallel model(graph, group, options);
  torch::optim::SGD eager_optimizer(eager->parameters(), 0.1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int64_t step = 0; step < 4; ++step) {
    torch::manual_seed(10 * step + group->rank());
    const torch::Tensor input = torch::randn({3, 8});
    eager_optimizer.zero_grad();
    optimizer.zero_grad();
    eager(input).toTensor().pow(2).mean().backward();
    model.forward(input).toTensor().pow(2).mean().backward();
    EXPECT_TRUE(torch::equal(GradientsOf(model->parameters()), GradientsOf(eager->parameters())));
    EXPECT_TRUE(torch::equal(model->buffers()[0], Flatten({*eager->buffers().begin()})));
    eager_optimizer.step();
    optimizer.step();
  }
}

// Ranks that take different branches of a script.
RANK_TEST(GraphRanksTest, UnusedParametersAreFound, 2) {
  const auto group = init_process_group();
  torch::manual_seed(2);
  const torch::Tensor start = torch::randn({4});
  JitModule script = NewScript("Branches", {{"left", start.clone()},
                                            {"right", start.clone()},
                                            {"last", start.clone()},
                                            {"never", start.clone()}});
  script.define(R"(
def forward(self, x, left: bool):
    if left:
        x = torch.tanh(x * self.left)
    else:
        x = torch.tanh(x * self.right)
    return x * self.last
)");
  const auto graph = optimize_graph(script, {.bucket_cap_mb = 1e-5});
  EXPECT_EQ(graph->bucket_layout().size(), 2u) << graph->describe();
  DistributedDataParallel model(
      graph, group, {.bucket_layout = graph->bucket_layout(), .find_unused_parameters = true});
  for (int64_t step = 0; step < 4; ++step) {
    model.zero_grad();
    const bool left = step < 2 || group->rank() == 0;
    model.forward(torch::ones({4}), left).toTensor().sum().backward();
    const auto parameters = model->named_parameters();
    EXPECT_TRUE(parameters["left"].grad().defined());
    EXPECT_EQ(parameters["right"].grad().defined(), step >= 2);
    EXPECT_FALSE(parameters["never"].grad().defined());
    EXPECT_TRUE(SameOnAllRanks(*group, GradientsOf(model->parameters())));
  }
}

// The modes differ in the cap of the last piece, in the second use of a weight, and in ignored
// parameters. Each of these rules alone moves the begin of the last piece.
RANK_TEST(GraphRanksTest, ParityModeCutsAsPyTorchDoes, 2) {
  const auto group = init_process_group();
  constexpr int64_t kWeight = 256 * 1024;
  const std::set<std::string> ignored = {"w11"};
  const auto row = [](int64_t weights, const std::vector<std::string>& names) {
    return std::pair(names, weights * kWeight);
  };
  const Pieces strict = {row(2, {"w0", "w1"}), row(6, {"w2", "w3", "w4", "w5", "w6", "w7"}),
                         row(5, {"w8", "w9", "w10", "w12", "w13"})};
  const Pieces strict_with_one_cap = {row(1, {"w0"}), row(6, {"w1", "w2", "w3", "w4", "w5", "w6"}),
                                      row(6, {"w7", "w8", "w9", "w10", "w12", "w13"})};
  // 1 MiB in the last piece: w11, which no bucket has, and the second use of w0 count.
  const Pieces parity = {row(5, {"w0", "w1", "w2", "w3", "w4"}),
                         row(6, {"w5", "w6", "w7", "w8", "w9", "w10"}), row(4, {"w12", "w13"})};
  for (const bool with_first_cap : {true, false}) {
    for (const GraphCutMode mode : {GraphCutMode::kStrict, GraphCutMode::kParity}) {
      torch::manual_seed(1);
      JitModule net = Chain();
      torch::manual_seed(1);
      const JitModule plain = Chain();
      GraphOptions cut{.bucket_cap_mb = 1.5,
                       .mode = mode,
                       .params_to_ignore = ignored,
                       .backend = interpreter_backend()};
      if (with_first_cap) cut.first_bucket_cap_mb = 1.25;
      const auto graph = optimize_graph(net, cut);
      EXPECT_EQ(PiecesOf(*graph), mode == GraphCutMode::kParity ? parity
                                  : with_first_cap              ? strict
                                                                : strict_with_one_cap)
          << graph->describe();
      const DistributedDataParallelOptions options{.params_and_buffers_to_ignore = ignored,
                                                   .bucket_layout = graph->bucket_layout()};
      DistributedDataParallel eager(plain, group, options);
      DistributedDataParallel model(graph, group, options);
      EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());
      torch::manual_seed(10 + group->rank());
      const torch::Tensor input = torch::randn({2, 256});
      {
        const EagerScripts eager_scripts;
        eager(input).toTensor().pow(2).mean().backward();
      }
      model.forward(input).toTensor().pow(2).mean().backward();
      EXPECT_TRUE(torch::equal(GradientsOf(model->parameters()), GradientsOf(eager->parameters())));
      EXPECT_TRUE(SameOnAllRanks(*group, net.attr("w0").toTensor().grad()));
      EXPECT_FALSE(SameOnAllRanks(*group, net.attr("w11").toTensor().grad()));
    }
  }
}

// examples/graph/make_model.py made the file by torch.jit.trace, from 8 points in the mode of
// training: a convolution, a batch norm, a convolution, a linear layer, dropout, a linear layer.
JitModule TracedFile() { return torch::jit::load(std::getenv("TRACED_MODEL")); }

torch::Tensor Points(int64_t step, int64_t count) {
  torch::manual_seed(50 + step);
  return torch::randn({count, 2});
}

// Trains four steps. Each batch has another size. Returns the gradients and buffers of each step.
template <typename Module, typename Forward>
std::vector<torch::Tensor> TrainPoints(Module& module, const Forward& forward) {
  std::vector<torch::Tensor> parameters, results;
  for (const torch::Tensor& parameter : module.parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, 0.1);
  for (int64_t step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const torch::Tensor points = Points(step, 8 - 2 * step);
    torch::manual_seed(step);  // of the dropout
    forward(points).pow(2).mean().backward();
    results.push_back(GradientsOf(parameters));
    for (const torch::Tensor& buffer : module.buffers()) results.push_back(buffer.clone());
    optimizer.step();
  }
  return results;
}

TEST(GraphTraceFileTest, CutAndUncutHaveEqualGradients) {
  JitModule script = TracedFile();
  std::vector<torch::Tensor> plain;
  {
    const EagerScripts eager_scripts;
    plain =
        TrainPoints(script, [&](const torch::Tensor& points) { return Forward(script, points); });
  }
  for (const bool interpreted : {true, false}) {
    const auto train = [&](const std::vector<int>& cuts) {
      const auto graph =
          optimize_graph(TracedFile(), {.cuts = cuts, .backend = Backend(interpreted)});
      return TrainPoints(*graph,
                         [&](const torch::Tensor& points) { return Forward(*graph, points); });
    };
    const std::vector<torch::Tensor> uncut = train({});
    std::mt19937 random(9);
    const int nodes = testing::NodesOf(*optimize_graph(TracedFile(), {.cuts = std::vector<int>{}}));
    for (int partition = 0; partition < 6; ++partition) {
      const std::vector<torch::Tensor> cut = train(testing::RandomCuts(nodes, random));
      ASSERT_EQ(cut.size(), uncut.size());
      for (size_t i = 0; i < cut.size(); ++i) {
        EXPECT_TRUE(torch::equal(cut[i], uncut[i])) << partition << ' ' << i;
      }
    }
    for (size_t i = 0; i < uncut.size(); ++i) {
      EXPECT_TRUE(interpreted ? torch::equal(uncut[i], plain[i])
                              : torch::allclose(uncut[i], plain[i], 1e-5, 1e-6))
          << i;
    }
  }
}

// The file has the mode of its trace as a constant, as with torch::jit::load() alone.
TEST(GraphTraceFileTest, EvalDoesNotReachTheOperations) {
  JitModule script = TracedFile();
  const auto graph = optimize_graph(script);
  graph->eval();
  EXPECT_FALSE(script.is_training());
  const torch::Tensor batches = graph->named_buffers()["norm.num_batches_tracked"];
  const int64_t before = batches.item<int64_t>();
  const torch::Tensor points = Points(0, 200);
  const torch::Tensor first = graph->forward(points).toTensor();
  EXPECT_FALSE(torch::equal(graph->forward(points).toTensor(), first));  // dropout
  EXPECT_EQ(batches.item<int64_t>(), before + 2);
  EXPECT_EQ(graph->graphs(), 1u);
}

// The code is what torch.jit.trace writes over 4 rows for x.reshape(len(x), -1) and for / len(x).
// len() gives Python a number, with a TracerWarning; x.size(0) would stay an operation.
TEST(GraphTraceFileTest, NumbersOfTheTraceStay) {
  const auto numbers = [](const std::string& forward) {
    JitModule script = NewScript("Numbers", {{"weight", torch::ones({3, 6})}});
    script.define(forward);
    return script;
  };
  const auto reshaped = optimize_graph(numbers(R"(
def forward(self, x):
    return torch.linear(torch.reshape(x, [4, -1]), self.weight)
)"));
  const auto divided = optimize_graph(numbers(R"(
def forward(self, x):
    return torch.div(torch.linear(x, self.weight), 4)
)"));
  for (const int64_t rows : {4, 1, 2, 3, 5, 8}) {
    const torch::Tensor input = torch::ones({rows, 6});
    if (rows != 4) {
      EXPECT_THROW(reshaped->forward(input), std::exception) << rows;
    }
    EXPECT_TRUE(torch::equal(divided->forward(input).toTensor(), torch::full({rows, 3}, 1.5)));
  }
}

// A traced file trains as the wrapper of the file itself.
RANK_TEST(GraphTraceFileTest, TrainsAsTheEagerModel, .world_size = 2,
          .not_on_device = "the file and what its graph makes are on the CPU") {
  const auto group = init_process_group();
  const auto graph =
      optimize_graph(TracedFile(), {.bucket_cap_mb = 0.01, .backend = interpreter_backend()});
  const DistributedDataParallelOptions options{.bucket_layout = graph->bucket_layout()};
  EXPECT_EQ(options.bucket_layout.size(), 3u) << graph->describe();
  DistributedDataParallel eager(TracedFile(), group, options);
  DistributedDataParallel model(graph, group, options);
  const EagerScripts eager_scripts;
  torch::optim::SGD eager_optimizer(eager->parameters(), 0.1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int64_t step = 0; step < 4; ++step) {
    const torch::Tensor points = Points(10 * step + group->rank(), 6 + group->rank());
    eager_optimizer.zero_grad();
    optimizer.zero_grad();
    torch::manual_seed(step);
    eager(points).toTensor().pow(2).mean().backward();
    torch::manual_seed(step);
    model.forward(points).toTensor().pow(2).mean().backward();
    EXPECT_TRUE(torch::equal(GradientsOf(model->parameters()), GradientsOf(eager->parameters())));
    eager_optimizer.step();
    optimizer.step();
  }
}

RANK_TEST(GraphRanksTest, ACutModelLaunchesItsFirstBucketEarly, 2) {
  const auto group = init_process_group();
  for (const bool interpreted : {true, false}) {
    const std::shared_ptr<PieceBackend> backend = Backend(interpreted);
    const Timeline uncut = LaunchesOf(group, {.cuts = std::vector<int>{}, .backend = backend});
    EXPECT_EQ(uncut.buckets, 1);
    EXPECT_EQ(uncut.gradients, 20);
    EXPECT_EQ(uncut.gradients_at_first_launch, 20);
    EXPECT_EQ(uncut.nodes_run, uncut.backward_nodes);
    EXPECT_EQ(uncut.nodes_at_first_launch, uncut.backward_nodes);
    const Timeline cut = LaunchesOf(group, {.bucket_cap_mb = 0.004, .backend = backend});
    EXPECT_EQ(cut.buckets, 10);
    EXPECT_EQ(cut.gradients, 20);
    EXPECT_LE(cut.gradients_at_first_launch, 4);  // 20 %
    EXPECT_EQ(cut.nodes_run, cut.backward_nodes);
    EXPECT_GE(cut.backward_nodes, 10);
    EXPECT_LE(cut.nodes_at_first_launch * 5, cut.backward_nodes);  // 20 %
  }
}

// ---- What an optimized module tells its wrapper.

TEST(GraphLayoutTest, ThePiecesAreTheBuckets) {
  JitModule net = Tied();
  net.register_parameter("unused", torch::ones({3}).requires_grad_(), false);
  net.register_parameter("frozen", torch::ones({3}), false);
  net.register_parameter("wide", torch::ones({3}, torch::kDouble).requires_grad_(), false);
  const auto graph =
      optimize_graph(net, {.bucket_cap_mb = 1e-5, .params_to_ignore = {"middle.bias"}});
  EXPECT_THAT(graph->bucket_layout(),
              ElementsAre(ElementsAre("middle.weight"), ElementsAre("tied", "first.bias", "unused"),
                          ElementsAre("wide")))
      << graph->describe();
  EXPECT_THAT(graph->describe(), HasSubstr("middle.weight"));
}

// Parameters may be frozen and unfrozen after the graph is made.
TEST(GraphLayoutTest, TheLayoutFollowsRequiresGrad) {
  JitModule net = Tied();
  torch::Tensor weight = net.attr("middle").toModule().attr("weight").toTensor();
  torch::Tensor bias = net.attr("first").toModule().attr("bias").toTensor();
  weight.set_requires_grad(false);
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-5});
  EXPECT_THAT(graph->bucket_layout(),
              ElementsAre(ElementsAre("middle.bias"), ElementsAre("tied", "first.bias")));
  weight.set_requires_grad(true);
  bias.set_requires_grad(false);
  EXPECT_THAT(graph->bucket_layout(),
              ElementsAre(ElementsAre("middle.bias"), ElementsAre("tied", "middle.weight")));
}

}  // namespace
}  // namespace ddp
