// Tests the lines of docs/parity.md that no other test covers.
#include <torch/torch.h>

#include <map>
#include <memory>

#include "ddp/ddp.h"
#include "ddp/device_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_endpoint.h"
#include "testing/distributed_checks.h"
#include "testing/rank_harness.h"
#include "testing/redis_fixture.h"

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

int BuffersAreCopiedOnceWithoutForwardSyncBuffers() {
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
  return 0;
}

int BuffersAreSyncedAtEverySynchronizedForward() {
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
  return 0;
}

torch::nn::Sequential Layers() {
  torch::nn::Sequential net;
  for (int layer = 0; layer < 4; ++layer) net->push_back(torch::nn::Linear(16, 16));
  return net;
}

// Runs with DDP_SET_LAST_BUCKET_CAP=1. For this model and these limits, the buckets hold the same
// parameters as in PyTorch. PyTorch orders the parameters in each bucket opposite to their
// gradients.
int SmallBucketMayBeTheLast() {
  const auto group = init_process_group();
  DistributedDataParallel model(Layers(), group, {.bucket_cap_mb_list = {0.0005, 0.0022}});
  for (int step = 0; step < 2; ++step) model.forward(torch::ones({1, 16})).sum().backward();
  EXPECT_THAT(model.bucket_layout(), ElementsAre(ElementsAre("3.bias"),
                                                 ElementsAre("3.weight", "2.bias", "2.weight",
                                                             "1.bias", "1.weight", "0.bias"),
                                                 ElementsAre("0.weight")));
  return 0;
}

// Runs with DDP_DISABLE_COMM_MEM=0, which asks the backend for its own memory; Gloo has none.
int MemoryOfTheBackendIsUsedWhereItHasSome() {
  const auto group = init_process_group();
  torch::manual_seed(group->rank());
  auto net = Layers();
  DistributedDataParallel model(net, group);
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    model.forward(torch::randn({2, 16})).pow(2).sum().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
  return 0;
}

int MeshInPlaceOfAGroup() {
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
  return 0;
}

int NeverUsedParameterKeepsNoGradientInViewMode() {
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
  return 0;
}

// ---- Ranks.

struct Body {
  std::function<int()> run;
  std::map<std::string, std::string> environment = {};
};

const std::map<std::string, Body>& Bodies() {
  static const auto& bodies = *new std::map<std::string, Body>{
      {"BuffersAreCopiedOnceWithoutForwardSyncBuffers",
       {BuffersAreCopiedOnceWithoutForwardSyncBuffers}},
      {"BuffersAreSyncedAtEverySynchronizedForward", {BuffersAreSyncedAtEverySynchronizedForward}},
      {"SmallBucketMayBeTheLast", {SmallBucketMayBeTheLast, {{"DDP_SET_LAST_BUCKET_CAP", "1"}}}},
      {"MemoryOfTheBackendIsUsedWhereItHasSome",
       {MemoryOfTheBackendIsUsedWhereItHasSome, {{"DDP_DISABLE_COMM_MEM", "0"}}}},
      {"MeshInPlaceOfAGroup", {MeshInPlaceOfAGroup}},
      {"NeverUsedParameterKeepsNoGradientInViewMode",
       {NeverUsedParameterKeepsNoGradientInViewMode}},
  };
  return bodies;
}

class ParityTest : public ::testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() { redis_ = ::ddp::testing::RedisFixture::Start(); }
  static void TearDownTestSuite() { redis_.reset(); }

  static std::unique_ptr<::ddp::testing::RedisFixture> redis_;
};
std::unique_ptr<::ddp::testing::RedisFixture> ParityTest::redis_;

TEST_P(ParityTest, Ranks) {
  ASSERT_TRUE(::ddp::testing::RanksSucceed(
      {.world_size = 2,
       .body = GetParam(),
       .store_url = store::FormatStoreAddress(redis_->Address(GetParam())),
       .environment = Bodies().at(GetParam()).environment}));
}

std::vector<std::string> BodyNames() {
  std::vector<std::string> names;
  for (const auto& [name, body] : Bodies()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, ParityTest, ::testing::ValuesIn(BodyNames()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  torch::set_num_threads(1);
  std::map<std::string, std::function<int()>> bodies;
  for (const auto& [name, body] : ddp::Bodies()) bodies[name] = body.run;
  if (const auto exit_code = ddp::testing::RunRankBody(bodies)) return *exit_code;
  return RUN_ALL_TESTS();
}
