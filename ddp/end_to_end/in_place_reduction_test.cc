// Tests gradients that are reduced where they lie, through the wrapper: ranks of one host that
// share memory, with parameters of 16 KiB and more. Each averaged gradient is compared with the
// average that one process computes.
#include <c10/core/CPUAllocator.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/random_numbers.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

NOT_ON_DEVICE("the subject is shared memory");

using ::ddp::testing::NewStoreUrl;
using ::ddp::testing::Randomize;
using ::ddp::testing::RandomNumbers;
using ::ddp::testing::RanksSucceed;
using ::ddp::testing::RankTestOptions;
using ::ddp::testing::SameOnAllRanks;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

// The subject is what shared memory does, whatever DDP_BACKEND says of other tests.
RankTestOptions InSharedMemory(RankTestOptions options) {
  options.environment["DDP_BACKEND"] = "shm";
  return options;
}

// Two weights of 32 KiB, two biases, and two vectors of 32 KiB.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(64, 128));
    last = register_module("last", torch::nn::Linear(128, 64));
    p = register_parameter("p", torch::ones({8192}));
    q = register_parameter("q", torch::ones({8192}));
  }
  Tensor forward(const Tensor& x) {
    hidden = first->forward(x);
    // Autograd gives p and q gradients that share one storage.
    const Tensor scale = (p.view({64, 128}) + q.view({64, 128})).slice(0, 0, x.size(0));
    return last->forward(torch::tanh(hidden) * scale);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  Tensor p, q, hidden;
};
TORCH_MODULE(Net);

Tensor Input(int rank, int step) { return RandomNumbers(100 * step + rank, {8, 64}); }

// Returns the average gradients of all ranks, in the order of the parameters.
std::vector<Tensor> Expected(const Net& net, int size, int step, at::ScalarType type = at::kFloat) {
  Net copy;
  copy->to(type);
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      copy->parameters()[i].copy_(net->parameters()[i]);
    }
  }
  // One rank after the other: plain autograd adds to p's and q's shared storage twice.
  std::vector<Tensor> averages;
  for (int rank = 0; rank < size; ++rank) {
    copy->zero_grad();
    copy->forward(Input(rank, step).to(type)).pow(2).mean().backward();
    for (size_t i = 0; i < copy->parameters().size(); ++i) {
      if (rank == 0) averages.push_back(torch::zeros_like(copy->parameters()[i]));
      averages[i] = averages[i].detach() + copy->parameters()[i].grad() / size;
    }
  }
  return averages;
}

void ExpectAverages(const ProcessGroup& group, const Net& net,
                    const std::vector<Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(torch::allclose(net->parameters()[i].grad(), expected[i], 1e-4, 1e-7))
        << "parameter " << i << " on rank " << group.rank();
  }
}

struct Trainer {
  explicit Trainer(const std::shared_ptr<ProcessGroup>& given,
                   const DistributedDataParallelOptions& options = {})
      : group(given), model((Randomize(*net, 1), net), given, options) {}

  void Step(int step, at::ScalarType type = at::kFloat) {
    net->zero_grad();
    const std::vector<Tensor> expected = Expected(net, group->size(), step, type);
    model.forward(Input(group->rank(), step).to(type)).pow(2).mean().backward();
    ExpectAverages(*group, net, expected);
    for (const Tensor& parameter : net->parameters()) {
      EXPECT_TRUE(SameOnAllRanks(*group, parameter.grad()));
    }
  }
  std::string strategy() const { return model.logging_data().reduction_strategy; }

  std::shared_ptr<ProcessGroup> group;
  Net net;
  DistributedDataParallel<NetImpl> model;
};

RANK_TEST(InPlaceReductionTest, AveragesWhatLiesInTheArenaAndWhatDoesNot,
          InSharedMemory({{2, 3}})) {
  Trainer trainer(init_process_group());
  for (int step = 0; step < 5; ++step) trainer.Step(step);
  EXPECT_THAT(trainer.strategy(), HasSubstr("in place: 4 gradients where they lie, 2 packed"));
  EXPECT_THAT(trainer.strategy(), HasSubstr("2 were copied into the arena")) << "p and q";
  EXPECT_THAT(trainer.strategy(), Not(HasSubstr("no room")));
}

RANK_TEST(InPlaceReductionTest, FollowsTheModuleToAnotherType, InSharedMemory({2})) {
  Trainer trainer(init_process_group());
  trainer.Step(0);
  trainer.net->to(at::kDouble);
  for (int step = 1; step < 4; ++step) trainer.Step(step, at::kDouble);
  EXPECT_THAT(trainer.strategy(), HasSubstr("in place: 4 gradients where they lie"));
  EXPECT_THAT(trainer.strategy(), Not(HasSubstr("no room")));
}

RANK_TEST(InPlaceReductionTest, WithoutRoomEachGradientHasAnAllReduce, InSharedMemory({2})) {
  Trainer trainer(init_process_group(), {.arena_bytes = 1});
  for (int step = 0; step < 3; ++step) trainer.Step(step);
  EXPECT_THAT(trainer.strategy(), HasSubstr("4 found no room in the arena: raise arena_bytes"));
}

// Peers write into the memory that the hook has published, not into the gradient's new one.
RANK_TEST(InPlaceReductionTest, AGradientMayGetOtherMemoryInTheBackward, InSharedMemory({2})) {
  Trainer trainer(init_process_group());
  for (int step = 0; step < 3; ++step) {
    trainer.net->zero_grad();
    const std::vector<Tensor> expected = Expected(trainer.net, 2, step);
    const Tensor output = trainer.model.forward(Input(trainer.group->rank(), step));
    Tensor& gradient = trainer.net->last->weight.mutable_grad();
    int calls = 0;
    trainer.net->hidden.register_hook([&](const Tensor& /*grad*/) {  // after that of last.weight
      ++calls;
      ASSERT_TRUE(gradient.defined());
      gradient.set_data(torch::full_like(gradient, 7));
    });
    output.pow(2).mean().backward();
    EXPECT_EQ(calls, 1);
    ExpectAverages(*trainer.group, trainer.net, expected);
  }
}

RANK_TEST(InPlaceReductionTest, ModelsComeAndGoBesideOneThatStays, InSharedMemory({2})) {
  const auto group = init_process_group();
  Trainer stays(group);
  for (int round = 0; round < 40; ++round) {
    Trainer goes(group);
    if (round % 4 == 0) goes.Step(round);
    EXPECT_THAT(goes.strategy(), HasSubstr("in place")) << round;
  }
  stays.Step(0);
}

// As `ulimit -f`: an arena without room for the model.
void LimitFileSizes() {
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{.rlim_cur = 128 << 10, .rlim_max = 128 << 10};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

RANK_TEST(InPlaceReductionTest, ALimitOfFilesOnOneRankMakesAllFlat, InSharedMemory({{2, 4}})) {
  if (std::getenv("RANK") == std::string("1")) LimitFileSizes();
  Trainer trainer(init_process_group());
  EXPECT_EQ(trainer.group->backend(), "shm");
  for (int step = 0; step < 4; ++step) trainer.Step(step);
  EXPECT_EQ(trainer.strategy(), "flat buckets");
}

// The ranks agree for every model, and stay in step.
RANK_TEST(InPlaceReductionTest, AnAllocatorOnOneRankMakesAllFlat, InSharedMemory({3})) {
  const auto group = init_process_group();
  Trainer first(group);
  first.Step(0);
  c10::Allocator* const installed = c10::GetCPUAllocator();
  for (const bool alone : {true, false, true}) {
    if (group->rank() == 1) {
      c10::SetCPUAllocator(alone ? c10::GetDefaultCPUAllocator() : installed, 255);
      ::testing::internal::CaptureStderr();
    }
    Trainer trainer(group);
    for (int step = 0; step < 3; ++step) trainer.Step(step);  // the second one rebuilds the buckets
    EXPECT_THAT(trainer.strategy(), HasSubstr(alone ? "flat buckets" : "in place: 4"));
    if (group->rank() != 1) continue;
    const std::string told = ::testing::internal::GetCapturedStderr();
    const std::string line = "rank 1 cannot reduce gradients in place, so all ranks use flat";
    EXPECT_EQ(told.find(line) != std::string::npos, alone) << told;
    EXPECT_EQ(told.find(line), told.rfind(line)) << "once: " << told;
  }
  first.Step(1);
}

void ChangeStridesOnOneRank() {
  const auto group = init_process_group();
  for (const int width : {8, 64}) {
    torch::nn::Linear net(torch::nn::LinearOptions(width, width).bias(false));
    DistributedDataParallel<torch::nn::LinearImpl> model(net, group);
    const auto step = [&] { model.forward(torch::ones({2, width})).sum().backward(); };
    step();
    const auto turned = [&] { return net->weight.detach().t().contiguous().t(); };
    net->weight.set_data(turned());  // on all ranks: they follow
    step();
    net->zero_grad();
    if (group->rank() == 1) net->weight.set_data(net->weight.detach().contiguous());
    std::string error = "none";
    try {
      step();
      step();
    } catch (const c10::Error& thrown) {
      error = thrown.what_without_backtrace();
    }
    const std::string one = "strides [1, " + std::to_string(width) + "]";
    const std::string other = "strides [" + std::to_string(width) + ", 1]";
    EXPECT_THAT(error, HasSubstr("after a change of parameter weight (was Float on cpu")) << width;
    EXPECT_THAT(error, HasSubstr(one + "; is Float on cpu")) << width;
    EXPECT_THAT(error, HasSubstr(other + ")")) << width;
    EXPECT_THAT(error,
                HasSubstr("the program changed a parameter of the model on some ranks only"));
    group->renew();
  }
}

RANK_TEST(InPlaceReductionTest, StridesThatOneRankChangesAreNamed, InSharedMemory({3})) {
  ChangeStridesOnOneRank();
}

RANK_TEST(InPlaceReductionTest, StridesThatOneRankChangesAreNamedOverGloo, .world_size = 2,
          .environment = {{"DDP_BACKEND", "gloo"}}) {
  ChangeStridesOnOneRank();
}

// ---- Parameters that several live models reduce in one backward.

// Sets a hook on the gradient of `parameter`, behind those of the models so far. It spins until
// other ranks have changed the gradient, for 2 ms at most: a model behind it then reads that.
class LateHook : public torch::autograd::FunctionPostHook {
 public:
  static void Set(const Tensor& parameter) {
    torch::autograd::impl::grad_accumulator(parameter)->add_post_hook(
        std::make_unique<LateHook>(parameter));
  }
  explicit LateHook(Tensor parameter) : parameter_(std::move(parameter)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    const volatile float* const first = parameter_.grad().const_data_ptr<float>();
    const float before = *first;
    const int64_t end_ns = MonotonicNanoseconds() + 2'000'000;
    while (*first == before && MonotonicNanoseconds() < end_ns) {
    }
    return outputs;
  }

 private:
  const Tensor parameter_;
};

using LinearModel = DistributedDataParallel<torch::nn::LinearImpl>;

// A module around a wrapped one.
struct OuterImpl : torch::nn::Module {
  OuterImpl(const torch::nn::Linear& encoder, std::shared_ptr<LinearModel> inner)
      : wrapped(std::move(inner)) {
    register_module("encoder", encoder);
  }
  Tensor forward(const Tensor& x) { return wrapped->forward(x); }
  std::shared_ptr<LinearModel> wrapped;
};

using SharedOptions = std::pair<DistributedDataParallelOptions, DistributedDataParallelOptions>;

// Rank r's gradient is 2 * (1 + r) for two models: the average, once, is size + 1.
void TrainTwoModelsOfOneModule(const std::shared_ptr<ProcessGroup>& group, int width,
                               const SharedOptions& options) {
  torch::nn::Linear net(torch::nn::LinearOptions(width, width).bias(false));
  LinearModel a(net, group, options.first);
  if (group->rank() == 0) LateHook::Set(net->weight);
  LinearModel b(net, group, options.second);
  const Tensor x = torch::full({1, width}, 1.0 + group->rank());
  const auto expect = [&](double value, const char* when) {
    EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({width, width}, value)))
        << when << ", width " << width << ", " << net->weight.grad().flatten()[0].item<float>();
  };
  const int size = group->size();
  for (int step = 0; step < 4; ++step) {
    net->zero_grad(/*set_to_none=*/step % 2 == 0);
    (a.forward(x).sum() + b.forward(x).sum()).backward();
    expect(size + 1, "both");
  }
  net->zero_grad();
  if (!options.first.static_graph) {
    const auto local_a = a.no_sync();
    const auto local_b = b.no_sync();
    (a.forward(x).sum() + b.forward(x).sum()).backward();
    expect(2 * (1 + group->rank()), "no_sync");
  } else {
    (a.forward(x).sum() + b.forward(x).sum()).backward();
  }
  (a.forward(x).sum() + b.forward(x).sum()).backward();
  if (!options.first.static_graph) expect(2 * (size + 1), "accumulated");
}

void TrainModelsOfOneModule() {
  const auto group = init_process_group();
  for (const int width : {8, 64, 256}) {
    const auto train = [&](const SharedOptions& options) {
      TrainTwoModelsOfOneModule(group, width, options);
    };
    train({});
    train({{.find_unused_parameters = true}, {.find_unused_parameters = true}});
    train({{.static_graph = true}, {.static_graph = true}});
    train({{.gradient_as_bucket_view = true}, {}});
    train({{}, {.gradient_as_bucket_view = true}});
    train({{.gradient_as_bucket_view = true}, {.gradient_as_bucket_view = true}});
    train({{}, {.reduce_in_place = false}});
  }
  TrainTwoModelsOfOneModule(group, 1024, {});
}

RANK_TEST(SharedParameterTest, IsAveragedOnceInSharedMemory, InSharedMemory({{1, 2, 3, 4}})) {
  TrainModelsOfOneModule();
}

RANK_TEST(SharedParameterTest, IsAveragedOnceOverGloo, .world_size = {1, 2, 3, 4},
          .environment = {{"DDP_BACKEND", "gloo"}}) {
  TrainModelsOfOneModule();
}

// One model averages the shared layer outside of its buckets, the other in a bucket.
RANK_TEST(SharedParameterTest, AParameterThatOneModelDelays, {1, 2, 3}) {
  const auto group = init_process_group();
  for (const int width : {8, 256}) {
    const auto layer = torch::nn::LinearOptions(width, width).bias(false);
    torch::nn::Linear first(layer), shared(layer);
    torch::nn::Sequential net(first, shared);
    {
      const torch::NoGradGuard no_grad;
      first->weight.copy_(torch::eye(width));
    }
    DistributedDataParallel a(net, group,
                              {.delay_all_reduce_named_params = {{"1.weight", shared->weight}},
                               .param_to_hook_all_reduce = first->weight});
    LinearModel b(shared, group);
    const Tensor x = torch::full({1, width}, 1.0 + group->rank());
    for (int step = 0; step < 4; ++step) {
      net->zero_grad(/*set_to_none=*/step % 2 == 0);
      const Tensor loss = a.forward(x).sum();
      (loss + b.forward(x).sum()).backward();
      EXPECT_TRUE(
          torch::allclose(shared->weight.grad(), torch::full({width, width}, group->size() + 1.0)))
          << "width " << width << ", step " << step;
    }
  }
}

RANK_TEST(SharedParameterTest, AWrapperInAWrapperAveragesOnce, InSharedMemory({3})) {
  const auto group = init_process_group();
  torch::nn::Linear net(torch::nn::LinearOptions(64, 64).bias(false));
  const auto inner = std::make_shared<LinearModel>(net, group);
  if (group->rank() == 0) LateHook::Set(net->weight);
  const auto outer = std::make_shared<OuterImpl>(net, inner);
  DistributedDataParallel<OuterImpl> model(outer, group);
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    model.forward(torch::full({2, 64}, 1.0 + group->rank())).sum().backward();
    EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({64, 64}, group->size() + 1.0)));
  }
}

// A second model comes for every second step, and is gone in the next one.
RANK_TEST(SharedParameterTest, BelongsToOneModelAgainWhenTheOtherDies, InSharedMemory({2})) {
  const auto group = init_process_group();
  torch::nn::Linear net(torch::nn::LinearOptions(64, 64).bias(false));
  LinearModel a(net, group);
  const Tensor x = torch::full({1, 64}, 1.0 + group->rank());
  for (int step = 0; step < 4; ++step) {
    net->zero_grad();
    auto b = std::make_optional<LinearModel>(net, group);
    const Tensor other = step % 2 == 0 ? net->forward(x) : b->forward(x);
    if (step % 2 == 0) b.reset();
    (a.forward(x).sum() + other.sum()).backward();
    EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({64, 64}, group->size() + 1.0)));
    const bool copied = a.logging_data().reduction_strategy.find("copied") != std::string::npos;
    if (step < 2) {
      EXPECT_EQ(copied, step == 1) << a.logging_data().reduction_strategy;
    }
  }
}

// An encoder, which is a model itself, and two models with heads of their own.
struct HeadImpl : torch::nn::Module {
  HeadImpl(const torch::nn::Linear& shared, int width)
      : encoder(register_module("encoder", shared)),
        head(register_module("head", torch::nn::Linear(64, width))) {}
  Tensor forward(const Tensor& x) { return head->forward(encoder->forward(x)); }
  torch::nn::Linear encoder, head;
};
TORCH_MODULE(Head);

int SoakSteps() {
  const char* const wanted = std::getenv("DDP_TEST_SOAK_STEPS");
  return wanted == nullptr ? 40 : std::atoi(wanted);
}

// Three models, any of which may take part in a step.
RANK_BODY(ThreeModels) {
  const auto group = init_process_group();
  torch::manual_seed(1);
  torch::nn::Linear encoder(64, 64);
  Head small(encoder, 8);
  Head large(encoder, 512);
  LinearModel a(encoder, group);
  if (group->rank() == 0) LateHook::Set(encoder->weight);
  DistributedDataParallel<HeadImpl> b(small, group);
  DistributedDataParallel<HeadImpl> c(large, group);
  std::vector<Tensor> parameters = encoder->parameters();
  for (const Tensor& tensor : small->head->parameters()) parameters.push_back(tensor);
  for (const Tensor& tensor : large->head->parameters()) parameters.push_back(tensor);
  for (int step = 0; step < SoakSteps() && !::testing::Test::HasFailure(); ++step) {
    const int part = 1 + step % 7;
    const auto loss = [&](auto& first, auto& second, auto& third, int rank) {
      const Tensor x = torch::full({4, 64}, (1.0 + rank + step % 5) / 64);
      Tensor sum = torch::zeros({});
      if ((part & 1) != 0) sum = sum + first.forward(x).pow(2).sum();
      if ((part & 2) != 0) sum = sum + second.forward(x).pow(2).sum();
      if ((part & 4) != 0) sum = sum + third.forward(x).pow(2).sum();
      return sum;
    };
    std::vector<Tensor> expected;
    for (int rank = 0; rank < group->size(); ++rank) {
      const std::vector<Tensor> local = torch::autograd::grad(
          {loss(*encoder, *small, *large, rank)}, parameters, {}, {}, false, /*allow_unused=*/true);
      for (size_t i = 0; i < local.size(); ++i) {
        if (rank == 0) expected.emplace_back();
        if (!local[i].defined()) continue;
        const Tensor part_of = local[i] / group->size();
        expected[i] = expected[i].defined() ? expected[i] + part_of : part_of;
      }
    }
    for (Tensor& parameter : parameters) parameter.mutable_grad().reset();
    loss(a, b, c, group->rank()).backward();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& gradient = parameters[i].grad();
      ASSERT_EQ(gradient.defined(), expected[i].defined()) << "step " << step << ", " << i;
      if (!gradient.defined()) continue;
      ASSERT_TRUE(torch::allclose(gradient, expected[i], 1e-4, 1e-6))
          << "step " << step << ", parameter " << i << ", models " << part;
    }
  }
}

// DDP_TEST_SOAK_STEPS sets the number of steps.
TEST(SharedParameterTest, SoakOfThreeModels) {
  EXPECT_TRUE(
      RanksSucceed({.world_size = 3,
                    .body = "ThreeModels",
                    .store_url = NewStoreUrl(),
                    .environment = {{"DDP_BACKEND", "shm"}},
                    .deadline = absl::Seconds(120) + SoakSteps() * absl::Milliseconds(50)}));
}

}  // namespace
}  // namespace ddp
