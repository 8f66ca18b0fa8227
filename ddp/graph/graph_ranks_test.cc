// Tests optimized modules under DistributedDataParallel on real processes.
#include <torch/script.h>
#include <torch/torch.h>

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/graph/optimize_graph.h"
#include "ddp/graph/test_models.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::Backend;
using ::ddp::testing::ConvNet;
using ::ddp::testing::ErrorOf;
using ::ddp::testing::Flatten;
using ::ddp::testing::Function;
using ::ddp::testing::FunctionImpl;
using ::ddp::testing::GradientsOf;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::Tied;
using ::ddp::testing::Transformer;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using JitModule = torch::jit::Module;

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

// Trains an eager and a cut model side by side. With the interpreter, all bits are equal.
template <typename Net, typename Batch>
void TrainBoth(const std::shared_ptr<ProcessGroup>& group, Batch batch, bool interpreted) {
  torch::manual_seed(1);
  Net net, plain;
  const auto graph =
      optimize_graph(net, {.bucket_cap_mb = 1e-4, .backend = Backend(interpreted)}, batch(0, 0));
  ASSERT_GT(graph->bucket_layout().size(), 1u) << graph->describe();
  DistributedDataParallelOptions options{.bucket_layout = graph->bucket_layout()};
  for (const auto& item : plain->named_parameters()) {  // the same start
    const torch::NoGradGuard no_grad;
    torch::Tensor parameter = item.value();
    parameter.copy_(net->named_parameters()[item.key()]);
  }
  DistributedDataParallel eager(plain, group, options);
  DistributedDataParallel model(graph, group, options);
  EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());
  torch::optim::SGD eager_optimizer(eager->parameters(), 0.05);
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  for (int64_t step = 0; step < 6; ++step) {
    eager_optimizer.zero_grad();
    optimizer.zero_grad();
    eager->forward(batch(group->rank(), step)).pow(2).mean().backward();
    model->forward(batch(group->rank(), step)).pow(2).mean().backward();
    const torch::Tensor gradients = GradientsOf(model->parameters());
    const torch::Tensor expected = GradientsOf(eager->parameters());
    EXPECT_TRUE(SameOnAllRanks(*group, gradients)) << "step " << step;
    EXPECT_TRUE(interpreted ? torch::equal(gradients, expected)
                            : torch::allclose(gradients, expected, 1e-3, 1e-5))
        << "step " << step;
    eager_optimizer.step();
    optimizer.step();
  }
  EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());  // never rebuilt
}

RANK_TEST(GraphRanksTest, TrainsAsTheEagerModel, 2) {
  const auto group = init_process_group();
  for (const bool interpreted : {true, false}) {
    TrainBoth<ConvNet>(group, Images, interpreted);
    TrainBoth<Transformer>(group, Tokens, interpreted);
    TrainBoth<Tied>(group, Rows, interpreted);
  }
}

// The wrapper gets the plan later, when the first forward has captured the graph.
RANK_TEST(GraphRanksTest, ThePlanMayComeAfterTheFirstForward, 2) {
  const auto group = init_process_group();
  torch::manual_seed(group->rank());
  Tied net;
  const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-5});
  DistributedDataParallel model(graph, group);
  for (int64_t step = 0; step < 3; ++step) {
    model.zero_grad();
    model.forward(Rows(group->rank(), step)).pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, GradientsOf(model->parameters())));
    if (step == 0) model.set_bucket_layout(graph->bucket_layout());
    EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());
  }
}

// The names that the wrapper ignores may be those of buffers, and one of two names of a tensor.
RANK_TEST(GraphRanksTest, TakesTheIgnoredNamesOfTheWrapper, 2) {
  const auto group = init_process_group();
  torch::manual_seed(1);
  Tied net;
  net->register_buffer("count", torch::zeros({1}));
  for (const std::set<std::string>& ignored :
       {std::set<std::string>{"count", "middle.bias", "tied"},
        std::set<std::string>{"count", "first.weight"}}) {
    const auto graph = optimize_graph(net, {.bucket_cap_mb = 1e-5, .params_to_ignore = ignored},
                                      Rows(group->rank(), 0));
    DistributedDataParallel model(
        graph, group,
        {.params_and_buffers_to_ignore = ignored, .bucket_layout = graph->bucket_layout()});
    EXPECT_EQ(model.bucket_layout(), graph->bucket_layout());
    model.zero_grad();
    model.forward(Rows(group->rank(), 1)).pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, net->first->weight.grad()));
  }
}

JitModule Script() {
  torch::manual_seed(5);
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  JitModule net("Net", unit, /*shouldMangle=*/true);
  net.register_attribute("training", c10::BoolType::get(), true);
  for (const char* name : {"first", "second", "third"}) {
    JitModule layer("Layer", unit, /*shouldMangle=*/true);
    layer.register_attribute("training", c10::BoolType::get(), true);
    layer.register_parameter("weight", torch::randn({8, 8}).requires_grad_(), false);
    layer.register_parameter("bias", torch::randn({8}).requires_grad_(), false);
    net.register_module(name, layer);
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
  torch::jit::setGraphExecutorOptimize(false);
  const auto graph =
      optimize_graph(Script(), {.bucket_cap_mb = 1e-4, .backend = interpreter_backend()});
  DistributedDataParallelOptions options{.bucket_layout = graph->bucket_layout()};
  ASSERT_EQ(options.bucket_layout().size(), 3u);
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
  JitModule script("Branches", std::make_shared<torch::jit::CompilationUnit>(), true);
  script.register_attribute("training", c10::BoolType::get(), true);
  for (const char* name : {"left", "right", "last", "never"}) {
    torch::manual_seed(2);
    script.register_parameter(name, torch::randn({4}).requires_grad_(), false);
  }
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

// Counts the buckets that are reduced while the backward still runs.
struct Timeline {
  int buckets = 0;
  int gradients_at_first_launch = -1;
  int gradients = 0;
};

Timeline LaunchesOf(const std::shared_ptr<ProcessGroup>& group, const GraphOptions& options) {
  torch::manual_seed(1);
  torch::nn::Sequential layers;
  for (int i = 0; i < 10; ++i) {
    layers->push_back(torch::nn::Linear(32, 32));
    layers->push_back(torch::nn::Functional(torch::relu));
  }
  struct NetImpl : torch::nn::Module {
    explicit NetImpl(torch::nn::Sequential inner) : inner(register_module("inner", inner)) {}
    torch::Tensor forward(torch::Tensor x) { return inner->forward(x); }
    torch::nn::Sequential inner;
  };
  const auto graph =
      optimize_graph(std::make_shared<NetImpl>(layers), options, torch::ones({4, 32}));
  DistributedDataParallel model(graph, group, {.bucket_layout = graph->bucket_layout()});
  auto timeline = std::make_shared<Timeline>();
  // The hooks of leaves run when their gradients are computed.
  for (const torch::Tensor& parameter : model->parameters()) {
    parameter.register_hook([timeline](const torch::Tensor& gradient) {
      ++timeline->gradients;
      return gradient;
    });
  }
  model.register_comm_hook(group,
                           [timeline](std::shared_ptr<ProcessGroup>& all, GradBucket& bucket) {
                             if (timeline->gradients_at_first_launch < 0) {
                               timeline->gradients_at_first_launch = timeline->gradients;
                             }
                             ++timeline->buckets;
                             return allreduce_hook(all, bucket);
                           });
  for (int step = 0; step < 4; ++step) {
    *timeline = {};
    model.zero_grad();
    model.forward(torch::ones({4, 32})).sum().backward();
  }
  return *timeline;
}

RANK_TEST(GraphRanksTest, ACutModelLaunchesItsFirstBucketEarly, 2) {
  const auto group = init_process_group();
  const Timeline uncut = LaunchesOf(group, {.cuts = std::vector<int>{}});
  EXPECT_EQ(uncut.buckets, 1);
  EXPECT_EQ(uncut.gradients, 20);
  EXPECT_EQ(uncut.gradients_at_first_launch, 20);
  const Timeline cut = LaunchesOf(group, {.bucket_cap_mb = 0.004});
  EXPECT_EQ(cut.buckets, 10);
  EXPECT_EQ(cut.gradients, 20);
  EXPECT_LE(cut.gradients_at_first_launch, 4);  // 20 %
}

// ---- What an optimized module tells its wrapper.

TEST(GraphLayoutTest, RefusesSynchronizedBatchNorms) {
  Function module([](FunctionImpl& self, torch::Tensor x) { return x * self.weight; });
  module->register_module("norm", torch::nn::BatchNorm1d(4));
  EXPECT_NO_THROW(optimize_graph(module));
  const auto graph = optimize_graph(module, {}, torch::ones({4}));
  convert_sync_batchnorm(*module);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { graph->forward(torch::ones({4})); }),
              HasSubstr("SyncBatchNorm"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { optimize_graph(module); }),
              HasSubstr("SyncBatchNorm"));
}

TEST(GraphLayoutTest, ThePiecesAreTheBuckets) {
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
TEST(GraphLayoutTest, TheLayoutFollowsRequiresGrad) {
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

}  // namespace
}  // namespace ddp
