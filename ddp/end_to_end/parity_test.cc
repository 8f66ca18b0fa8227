// Tests the lines of docs/parity.md that no other test covers.
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <memory>
#include <string>
#include <vector>

#include "ddp/ddp.h"
#include "ddp/default_hooks.h"
#include "ddp/device_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::ErrorOfPeer;
using ::ddp::testing::Gradients;
using ::ddp::testing::Randomize;
using ::ddp::testing::SameOnAllRanks;
using ::ddp::testing::StepAfterFailure;
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
  const std::string type = c10::DeviceTypeName(group->device().type(), /*lower_case=*/true);
  const DeviceMesh line = init_device_mesh(group, type, {group->size()});
  DistributedDataParallel<torch::nn::LinearImpl> model(net.ptr(), {.device_mesh = line});
  torch::manual_seed(group->rank());
  model.forward(torch::randn({2, 2})).pow(2).sum().backward();
  EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));

  using Model = DistributedDataParallel<torch::nn::LinearImpl>;
  EXPECT_THAT(ErrorOf<ConfigurationError>(
                  [&] { Model both(net.ptr(), {.process_group = group, .device_mesh = line}); }),
              HasSubstr("process_group and device_mesh are both set"));
  const DeviceMesh plane = init_device_mesh(group, type, {1, group->size()}, {"a", "b"});
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

// ---- finalize_backward(), with what PyTorch 2.15 does in each case.

// Two weights of 1 KiB or of 64 KiB, and two biases.
torch::nn::Sequential TwoLayers(int width) {
  torch::nn::Sequential net(torch::nn::Linear(width, width), torch::nn::Linear(width, width));
  Randomize(*net, 1);
  return net;
}

DistributedDataParallelOptions ManualFinalization(DistributedDataParallelOptions options) {
  options.require_manual_backward_finalization = true;
  return options;
}

struct Manual {
  Manual(const std::shared_ptr<ProcessGroup>& given, int width,
         DistributedDataParallelOptions options, bool hooked = false)
      : group(given),
        x(torch::full({1, width}, 1.0 + given->rank())),
        net(TwoLayers(width)),
        plain(TwoLayers(width)),
        by_itself(plain, group, options),
        model(net, group, ManualFinalization(options)) {
    if (!hooked) return;
    by_itself.register_comm_hook(group, fp16_compress_hook);
    model.register_comm_hook(group, fp16_compress_hook);
  }

  void Backward() { model.forward(x).pow(2).mean().backward(); }
  // Steps both models. Rank 0's backward must return before the other ranks begin theirs.
  void Step(ProcessGroup& others, bool waits) {
    net->zero_grad();
    plain->zero_grad();
    by_itself.forward(x).pow(2).mean().backward();
    const torch::Tensor loss = model.forward(x).pow(2).mean();
    torch::Tensor token = torch::ones({1});
    if (waits && group->rank() > 0) others.broadcast(token, 0);
    loss.backward();
    if (waits && group->rank() == 0) others.broadcast(token, 0);
  }
  void Expect(const std::string& when) const {
    ASSERT_EQ(Gradients(*net).numel(), Gradients(*plain).numel()) << when;
    EXPECT_TRUE(torch::equal(Gradients(*net), Gradients(*plain))) << when;
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net))) << when;
  }
  std::string ErrorOfFinalize() {
    return ErrorOf<ReductionError>([this] { model.finalize_backward(); });
  }

  std::shared_ptr<ProcessGroup> group;
  torch::Tensor x;
  torch::nn::Sequential net, plain;
  DistributedDataParallel<torch::nn::SequentialImpl> by_itself, model;
};

const std::vector<DistributedDataParallelOptions>& ManualOptions() {
  static const auto* const all = new std::vector<DistributedDataParallelOptions>{
      {},
      {.bucket_cap_mb_list = {1e-3, 1e-2}},
      {.gradient_as_bucket_view = true},
      {.batched_grad_copy = true, .reduce_in_place = false},
      {.lazy_bucket_allocation = true},
      {.find_unused_parameters = true},
      {.static_graph = true}};
  return *all;
}

std::shared_ptr<ProcessGroup> AnotherGroupOf(ProcessGroup& group) {
  std::vector<int> all;
  for (int rank = 0; rank < group.size(); ++rank) all.push_back(rank);
  return group.new_group(all);
}

void FinalizesByHand() {
  const auto group = init_process_group();
  const auto others = AnotherGroupOf(*group);
  for (const int width : {16, 128}) {
    for (size_t i = 0; i <= ManualOptions().size(); ++i) {
      const bool hooked = i == ManualOptions().size();
      const std::string about = "width " + std::to_string(width) + ", way " + std::to_string(i);
      Manual run(group, width, hooked ? DistributedDataParallelOptions() : ManualOptions()[i],
                 hooked);
      const bool dynamic = !hooked && ManualOptions()[i].find_unused_parameters;
      EXPECT_EQ(run.model.should_finalize_after_backward(), !dynamic) << about;
      for (int step = 0; step < 3; ++step) {
        run.Step(*others, /*waits=*/step > 0);  // the first pass of a model agrees on its hooks
        run.model.finalize_backward();
        run.Expect(about);
        EXPECT_FALSE(run.model.should_finalize_after_backward()) << about;
      }
    }
  }
}

RANK_TEST(ParityTest, FinalizesByHand, .world_size = {1, 2, 3},
          .environment = {{"DDP_BACKEND", "shm"}}) {
  FinalizesByHand();
}
RANK_TEST(ParityTest, FinalizesByHandOverGloo, .world_size = {1, 2, 3},
          .environment = {{"DDP_BACKEND", "gloo"}},
          .not_on_device = "only the backend differs from another case's") {
  FinalizesByHand();
}

void MisusesFinalizeBackward() {
  const auto group = init_process_group();
  const auto others = AnotherGroupOf(*group);
  for (const int width : {16, 128}) {
    for (const bool view : {false, true}) {
      Manual run(group, width, {.gradient_as_bucket_view = view});
      EXPECT_THAT(run.ErrorOfFinalize(), HasSubstr("without a reduction to finalize"));
      EXPECT_THAT(ErrorOf<ReductionError>([&] { run.by_itself.finalize_backward(); }),
                  HasSubstr("without the option require_manual_backward_finalization"));
      // Not finalized before the next forward; in between, what PyTorch allows.
      run.Step(*group, /*waits=*/false);
      {
        const auto guard = run.model.no_sync();
        EXPECT_THAT(ErrorOf<ReductionError>([&] { run.model.forward(run.x); }),
                    HasSubstr("the last backward is not finalized"));
      }
      EXPECT_THAT(ErrorOf<ReductionError>(
                      [&] { run.model.set_require_manual_backward_finalization(false); }),
                  HasSubstr("cannot change"));
      {
        const torch::NoGradGuard no_grad;
        run.model.forward(run.x);
      }
      run.net->zero_grad();
      run.model.finalize_backward();
      run.Expect("after an evaluation and zero_grad()");
      EXPECT_THAT(run.ErrorOfFinalize(), HasSubstr("it was called already"));
      {
        const auto guard = run.model.no_sync();
        run.Backward();
        EXPECT_THAT(run.ErrorOfFinalize(), HasSubstr("under no_sync()"));
      }
      // Within a backward, behind all of its gradients.
      run.net->zero_grad();
      run.plain->zero_grad();
      run.by_itself.forward(run.x).pow(2).mean().backward();
      torch::Tensor input = run.x.clone().requires_grad_();
      const torch::Tensor doubled = input * 2;
      doubled.register_hook([&](const torch::Tensor&) {
        run.model.finalize_backward();
        run.Expect("within the backward");
      });
      run.model.forward(doubled / 2).pow(2).mean().backward();
      EXPECT_THAT(run.ErrorOfFinalize(), HasSubstr("it was called already"));
      // A gradient in between may have been added to a sum: an error on every rank.
      run.Backward();
      others->barrier();  // a rank still in its backward would hear of the error there
      EXPECT_THAT(ErrorOf<ReductionError>([&] { run.net->forward(run.x).sum().backward(); }),
                  HasSubstr("came before finalize_backward()"));
      group->renew();
      // The next forward starts again, and the reduction ends by itself.
      run.model.set_require_manual_backward_finalization(false);
      run.Step(*group, /*waits=*/false);
      run.Expect("by itself");
      run.model.set_require_manual_backward_finalization(true);
    }
  }
}

RANK_TEST(ParityTest, FinalizeBackwardIsCalledAtTheWrongPlace, .world_size = {1, 2},
          .environment = {{"DDP_BACKEND", "shm"}}) {
  MisusesFinalizeBackward();
}
RANK_TEST(ParityTest, FinalizeBackwardIsCalledAtTheWrongPlaceOverGloo, .world_size = 2,
          .environment = {{"DDP_BACKEND", "gloo"}},
          .not_on_device = "only the backend differs from another case's") {
  MisusesFinalizeBackward();
}

// The backward passes the first forward's second output, which reaches no parameter, after its
// gradients are final. A second reduction would wait for a second call.
void FinalizesWithinTwoForwards() {
  struct Net : torch::nn::Module {
    explicit Net(int width) : layers(register_module("layers", TwoLayers(width))) {}
    std::vector<torch::Tensor> forward(const torch::Tensor& x) {
      return {layers->forward(x), x * 2};
    }
    torch::nn::Sequential layers;
  };
  const auto group = init_process_group();
  for (const int width : {16, 128}) {
    for (const bool finds : {false, true}) {
      const auto net = std::make_shared<Net>(width);
      DistributedDataParallel<Net> model(
          net, group,
          {.find_unused_parameters = finds, .require_manual_backward_finalization = true});
      const torch::Tensor x = torch::full({1, width}, 1.0 + group->rank()).requires_grad_();
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        const torch::Tensor first = model.forward(x)[1] * 1;
        const bool after = model.should_finalize_after_backward();
        torch::Tensor at_finalize;
        first.register_hook([&](const torch::Tensor&) {
          if (after) return;
          model.finalize_backward();
          at_finalize = Gradients(*net).clone();
        });
        model.forward(first)[0].sum().backward();
        if (after) model.finalize_backward();
        if (!after) {
          EXPECT_TRUE(torch::equal(Gradients(*net), at_finalize)) << step;
        }
        EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net))) << step;
        EXPECT_TRUE(torch::allclose(net->layers->parameters()[3].grad(), torch::ones({width})));
        model.check_finished();
      }
    }
  }
}
RANK_TEST(ParityTest, FinalizesByHandWithinTwoForwards, .world_size = {1, 2},
          .environment = {{"DDP_BACKEND", "shm"}}) {
  FinalizesWithinTwoForwards();
}
RANK_TEST(ParityTest, FinalizesByHandWithinTwoForwardsOverGloo, .world_size = 2,
          .environment = {{"DDP_BACKEND", "gloo"}},
          .not_on_device = "only the backend differs from another case's") {
  FinalizesWithinTwoForwards();
}

// Rank 0 leaves a call out and goes on: the others do not wait for ever.
RANK_TEST(ParityTest, ASecondForwardBeforeFinalizeBackwardFailsOnAllRanks, 2) {
  const auto group = init_process_group();
  for (const int width : {16, 128}) {
    Manual run(group, width, {});
    const auto step = [&] {
      run.Backward();
      run.model.finalize_backward();
    };
    if (group->rank() == 0) {
      step();
      run.Backward();
      for (int forward = 0; forward < 2; ++forward) {
        EXPECT_THAT(ErrorOf<ReductionError>([&] { run.model.forward(run.x); }),
                    HasSubstr("the last backward is not finalized"));
      }
    } else {
      EXPECT_THAT(ErrorOfPeer<CommunicationError>(*group,
                                                  [&] {
                                                    for (int i = 0; i < 3; ++i)
                                                      step();  // a late rank: in the second
                                                  }),
                  HasSubstr("the last backward is not finalized"));
    }
    StepAfterFailure(*group, step);
    run.net->zero_grad();
    step();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*run.net)));
  }
}

// Two wrappers of one module, one or both of them finalized by hand.
RANK_TEST(ParityTest, FinalizesByHandASharedParameter, {1, 2}) {
  const auto group = init_process_group();
  for (const bool both : {false, true}) {
    torch::nn::Linear shared(torch::nn::LinearOptions(128, 128).bias(false));
    DistributedDataParallel a(shared, group, {.require_manual_backward_finalization = true});
    DistributedDataParallel b(shared, group, {.require_manual_backward_finalization = both});
    const torch::Tensor x = torch::full({1, 128}, 1.0 + group->rank());
    for (int step = 0; step < 3; ++step) {
      shared->zero_grad();
      (a.forward(x).sum() + b.forward(x).sum()).backward();
      a.finalize_backward();
      if (both) b.finalize_backward();
      EXPECT_TRUE(
          torch::allclose(shared->weight.grad(), torch::full({128, 128}, group->size() + 1.0)))
          << both << ", step " << step;
    }
  }
}

RANK_TEST(ParityTest, FinalizesByHandUnderAJoin, 2) {
  const auto group = init_process_group();
  const torch::Tensor x = torch::full({1, 128}, 1.0 + group->rank());
  // The average of delayed gradients needs the end of the backward.
  auto layers = TwoLayers(16);
  EXPECT_THAT(
      ErrorOf<ConfigurationError>([&] {
        DistributedDataParallel(
            layers, group,
            {.delay_all_reduce_named_params = {{"1.bias", layers->named_parameters()["1.bias"]}},
             .param_to_hook_all_reduce = layers->named_parameters()["0.weight"],
             .require_manual_backward_finalization = true});
      }),
      HasSubstr("do not go together"));
  torch::nn::Linear net(torch::nn::LinearOptions(128, 128).bias(false));
  DistributedDataParallel model(net, group, {.require_manual_backward_finalization = true});
  Join join({&model});
  for (int step = 0; step < 1 + group->rank(); ++step) {
    net->zero_grad();
    model.forward(x).sum().backward();
    model.finalize_backward();
    const double average = step == 0 ? 1.5 : 1.0;  // rank 0 has joined: (0 + 2) / 2
    EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({128, 128}, average))) << step;
  }
  join.finish();
}

}  // namespace
}  // namespace ddp
