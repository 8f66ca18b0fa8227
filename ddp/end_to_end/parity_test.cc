// Tests the lines of docs/parity.md that no other test covers.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <memory>

#include "ddp/ddp.h"
#include "ddp/device_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::Gradients;
using ::ddp::testing::SameOnAllRanks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Records the buffer that its last forward found, and then sets the buffer to this rank's own
// value.
struct CountingImpl : torch::nn::Module {
  CountingImpl() {
    layer = register_module("layer", torch::nn::Linear(2, 2));
    count = register_buffer("count", torch::zeros({1}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    seen = count.item<float>();
    torch::NoGradGuard no_grad;
    count += own;
    torch::AutoGradMode with_grad(true);
    return layer->forward(x);
  }
  torch::nn::Linear layer{nullptr};
  torch::Tensor count;
  float own = 0;
  float seen = 0;
};
TORCH_MODULE(Counting);

template <typename Model>
void Step(Model& model) {
  model.forward(torch::ones({1, 2})).sum().backward();
}

RANK_TEST(ParityTest, BuffersAreCopiedOnceWithoutForwardSyncBuffers, 2) {
  const auto group = init_process_group();
  Counting net;
  net->own = static_cast<float>(group->rank() + 1);
  {
    torch::NoGradGuard no_grad;
    net->count.fill_(10 * net->own);
  }
  DistributedDataParallel model(net, group, {.forward_sync_buffers = false});
  EXPECT_EQ(net->count.item<float>(), 10);  // rank 0's value
  for (int step = 0; step < 3; ++step) {
    Step(model);
    EXPECT_EQ(net->seen, 10 + static_cast<float>(step) * net->own);
  }
}

RANK_TEST(ParityTest, BuffersAreSyncedAtEverySynchronizedForward, 2) {
  const auto group = init_process_group();
  Counting net;
  net->own = static_cast<float>(group->rank() + 1);
  DistributedDataParallel model(net, group);
  Step(model);
  EXPECT_EQ(net->seen, 0);
  {
    const auto guard = model.no_sync();
    Step(model);
    EXPECT_EQ(net->seen, net->own);  // no broadcast
  }
  Step(model);
  EXPECT_EQ(net->seen, 2);  // rank 0's value, also right after forwards without synchronization
  // When the module replaces a buffer by another tensor, the new tensor is synchronized.
  net->count = net->register_buffer("other", torch::full({1}, 100 * net->own));
  Step(model);
  EXPECT_EQ(net->seen, 100);
}

torch::nn::Sequential Layers() {
  torch::nn::Sequential net;
  for (int layer = 0; layer < 4; ++layer) net->push_back(torch::nn::Linear(16, 16));
  return net;
}

// Runs with DDP_SET_LAST_BUCKET_CAP=1. For this model and these limits, the buckets hold the same
// parameters as in PyTorch. PyTorch orders the parameters in each bucket opposite to their
// gradients.
RANK_TEST(ParityTest, SmallBucketMayBeTheLast, .world_size = 2,
          .environment = {{"DDP_SET_LAST_BUCKET_CAP", "1"}}) {
  const auto group = init_process_group();
  DistributedDataParallel model(Layers(), group, {.bucket_cap_mb_list = {0.0005, 0.0022}});
  for (int step = 0; step < 2; ++step) model.forward(torch::ones({1, 16})).sum().backward();
  EXPECT_THAT(model.bucket_layout(), ElementsAre(ElementsAre("3.bias"),
                                                 ElementsAre("3.weight", "2.bias", "2.weight",
                                                             "1.bias", "1.weight", "0.bias"),
                                                 ElementsAre("0.weight")));
}

// Runs with DDP_DISABLE_COMM_MEM=0, which asks the backend for its own memory; Gloo has none.
RANK_TEST(ParityTest, MemoryOfTheBackendIsUsedWhereItHasSome, .world_size = 2,
          .environment = {{"DDP_DISABLE_COMM_MEM", "0"}}) {
  const auto group = init_process_group();
  torch::manual_seed(group->rank());
  auto net = Layers();
  DistributedDataParallel model(net, group);
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    model.forward(torch::randn({2, 16})).pow(2).sum().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
}

RANK_TEST(ParityTest, MeshInPlaceOfAGroup, 2) {
  const auto group = init_process_group();
  torch::nn::Linear net(2, 2);
  const DeviceMesh line = init_device_mesh(group, "cpu", {group->size()});
  DistributedDataParallel<torch::nn::LinearImpl> model(net.ptr(), {.device_mesh = line});
  torch::manual_seed(group->rank());
  model.forward(torch::randn({2, 2})).pow(2).sum().backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));

  using Model = DistributedDataParallel<torch::nn::LinearImpl>;
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { Model both(net.ptr(), {.process_group = group, .device_mesh = line}); }),
              HasSubstr("process_group and device_mesh are both set"));
  const DeviceMesh plane = init_device_mesh(group, "cpu", {1, group->size()}, {"a", "b"});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { Model two(net.ptr(), {.device_mesh = plane}); }),
              HasSubstr("takes a mesh of one"));
}

RANK_TEST(ParityTest, NeverUsedParameterKeepsNoGradientInViewMode, 2) {
  const auto group = init_process_group();
  torch::nn::Sequential net(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  struct FirstOnly : torch::nn::Module {
    explicit FirstOnly(torch::nn::Sequential net) : net(register_module("net", std::move(net))) {}
    torch::Tensor forward(const torch::Tensor& x) {
      return net[0]->as<torch::nn::LinearImpl>()->forward(x);
    }
    torch::nn::Sequential net;
  };
  DistributedDataParallel<FirstOnly> model(
      std::make_shared<FirstOnly>(net), group,
      {.gradient_as_bucket_view = true, .find_unused_parameters = true});
  for (int step = 0; step < 2; ++step) {
    model.forward(torch::ones({1, 2})).sum().backward();
    EXPECT_TRUE(net[0]->parameters()[0].grad().defined());
    EXPECT_FALSE(net[1]->parameters()[0].grad().defined());
  }
}

}  // namespace
}  // namespace ddp
