// Tests DistributedDataParallel from the view of a LibTorch user: what compiles, what it changes,
// where it may be stored. On real processes.
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/ddp.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/distributed_checks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::Flatten;
using ::ddp::testing::Gradients;
using ::ddp::testing::SameOnAllRanks;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(4, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    last = register_module("last", torch::nn::Linear(6, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return last->forward(torch::tanh(norm->forward(first->forward(x))));
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

// A module that leaves its result in a member.
struct SilentNetImpl : torch::nn::Module {
  SilentNetImpl() { layer = register_module("layer", torch::nn::Linear(4, 2)); }
  void forward(const torch::Tensor& x) { result = layer->forward(x); }
  torch::nn::Linear layer{nullptr};
  torch::Tensor result;
};
TORCH_MODULE(SilentNet);

torch::Tensor Input(const ProcessGroup& group, int64_t step = 0) {
  torch::manual_seed(100 * step + group.rank());
  return torch::randn({5, 4});
}

template <typename Model>
void ExpectAveraged(Model& model, ProcessGroup& group) {
  model.zero_grad();
  model.forward(Input(group)).pow(2).mean().backward();
  EXPECT_TRUE(SameOnAllRanks(group, Gradients(*model.module())));
}

RANK_TEST(WrapperTest, EveryForwardIsSynchronized, 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  const std::vector<std::function<torch::Tensor(const torch::Tensor&)>> forwards = {
      [&](const torch::Tensor& x) { return model.forward(x); },
      [&](const torch::Tensor& x) { return model->forward(x); },
      [&](const torch::Tensor& x) { return model(x); },
  };
  for (const auto& forward : forwards) {
    model->zero_grad();
    forward(Input(*group)).pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
  // Only the forward of the module itself is not synchronized.
  static_assert(std::is_same_v<decltype(model.module()), const std::shared_ptr<NetImpl>&>);
  Net bare;
  DistributedDataParallel other(bare, group);
  other.module()->forward(Input(*group)).pow(2).mean().backward();
  EXPECT_FALSE(SameOnAllRanks(*group, Gradients(*bare)));
}

RANK_TEST(WrapperTest, ModuleFunctionsActOnTheModule, 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  const auto& constant = model;
  EXPECT_EQ(model->parameters().size(), net->parameters().size());
  EXPECT_TRUE(model.parameters().front().is_same(net->first->weight));
  EXPECT_THAT(model->named_parameters().keys(),
              ElementsAre("first.weight", "first.bias", "norm.weight", "norm.bias", "last.weight",
                          "last.bias"));
  EXPECT_THAT(constant->named_buffers().keys(),
              ElementsAre("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"));
  EXPECT_EQ(constant.buffers().size(), 3u);
  EXPECT_THAT(constant->named_children().keys(), ElementsAre("first", "norm", "last"));
  EXPECT_EQ(constant->children().size(), 3u);
  EXPECT_EQ(constant->modules().size(), 4u);
  EXPECT_EQ(constant->named_modules("net").keys().back(), "net.last");
  EXPECT_EQ(constant->name(), net->name());

  model->eval();
  EXPECT_FALSE(model.is_training() || net->is_training() || net->norm->is_training());
  model.train();
  EXPECT_TRUE(constant->is_training() && net->norm->is_training());
  model->train(false);
  EXPECT_FALSE(net->is_training());
  model->train();

  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const torch::Tensor before = net->last->weight.detach().clone();
  model->forward(Input(*group)).pow(2).mean().backward();
  optimizer.step();
  EXPECT_FALSE(torch::equal(net->last->weight, before));
  model->zero_grad();
  EXPECT_FALSE(net->last->weight.grad().defined());

  model->to(group->device());
  model.to(torch::kFloat);
  model->to(group->device(), torch::kFloat, /*non_blocking=*/true);
  EXPECT_EQ(net->last->weight.device(), group->device());
  int seen = 0;
  model->apply([&](torch::nn::Module& module) { seen += module.is_training(); });
  model.apply([&](const std::string& name, torch::nn::Module&) { seen += name == "top.norm"; },
              "top");
  EXPECT_EQ(seen, 5);
  std::ostringstream printed;
  printed << model;
  EXPECT_THAT(printed.str(), HasSubstr("torch::nn::BatchNorm1d"));
}

// A bare model loads the file of a wrapped one, and the reverse.
RANK_TEST(WrapperTest, SavesWithoutAPrefix, 2) {
  const auto group = init_process_group();
  Net net, alone;
  DistributedDataParallel model(net, group);
  std::stringstream wrapped, bare;
  torch::save(model, wrapped);
  torch::load(alone, wrapped);
  EXPECT_TRUE(torch::equal(Flatten(alone->parameters()), Flatten(net->parameters())));
  {
    torch::NoGradGuard no_grad;
    for (torch::Tensor& parameter : alone->parameters()) parameter.add_(1);
  }
  torch::save(alone, bare);
  torch::load(model, bare);
  EXPECT_TRUE(torch::equal(Flatten(alone->parameters()), Flatten(net->parameters())));
}

// A member with the type of the holder, and a return value.
struct Trainer {
  explicit Trainer(const std::shared_ptr<ProcessGroup>& group) : model(Net(), group) {}
  DistributedDataParallel<Net> model;
  DistributedDataParallel<NetImpl> later{nullptr};
};

DistributedDataParallel<Net> Wrapped(const std::shared_ptr<ProcessGroup>& group) {
  DistributedDataParallel model(std::make_shared<NetImpl>(), group);
  static_assert(std::is_same_v<decltype(model), DistributedDataParallel<NetImpl>>);
  return model;
}

void TakesTheHolder(DistributedDataParallel<Net>& model, ProcessGroup& group) {
  ExpectAveraged(model, group);
}
void TakesTheModule(DistributedDataParallel<NetImpl>& model, ProcessGroup& group) {
  ExpectAveraged(model, group);
}

RANK_TEST(WrapperTest, LivesAnywhere, 2) {
  const auto group = init_process_group();
  Net net;
  DistributedDataParallel model(net, group);
  static_assert(std::is_same_v<decltype(model), DistributedDataParallel<Net>>);
  TakesTheHolder(model, *group);
  TakesTheModule(model, *group);

  Trainer trainer(group);
  Trainer moved = std::move(trainer);
  ExpectAveraged(moved.model, *group);
  EXPECT_FALSE(moved.later);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                moved.later->forward(torch::ones({5, 4}));
              }),
              HasSubstr("this DistributedDataParallel is empty"));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { moved.later->parameters(); }),
              HasSubstr("this DistributedDataParallel is empty"));
  moved.later = DistributedDataParallel<Net>(Net(), group);
  ExpectAveraged(moved.later, *group);

  std::vector<DistributedDataParallel<Net>> models;
  for (int i = 0; i < 5; ++i) models.push_back(Wrapped(group));
  models.emplace_back(Net(), group);
  models.push_back(model);
  for (auto& element : models) ExpectAveraged(element, *group);
  std::map<std::string, DistributedDataParallel<NetImpl>> by_name;
  by_name.insert({"net", std::move(models[1])});
  models.clear();
  ExpectAveraged(by_name.at("net"), *group);
  std::optional<DistributedDataParallel<Net>> perhaps;
  perhaps.emplace(std::make_shared<NetImpl>(), group);
  ExpectAveraged(*perhaps, *group);
}

RANK_TEST(WrapperTest, MovesUnderGuardAndJoin, 2) {
  const auto group = init_process_group();
  auto model = std::make_unique<DistributedDataParallel<Net>>(Net(), group);
  const auto net = model->module();
  std::vector<DistributedDataParallel<Net>> models;
  {
    const auto guard = model->no_sync();
    models.push_back(std::move(*model));
    model.reset();
    models.reserve(20);
    models[0].forward(Input(*group)).pow(2).mean().backward();
  }
  EXPECT_FALSE(SameOnAllRanks(*group, Gradients(*net)));
  ExpectAveraged(models[0], *group);

  Join join({&models[0]});
  models.reserve(100);
  for (int step = 0; step <= group->rank(); ++step) {
    models[0]->zero_grad();
    models[0]->forward(Input(*group, step)).pow(2).mean().backward();
  }
  join.finish();
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(models[0]->parameters())));

  std::optional guarded = std::move(models[0]);
  const auto guard = guarded->no_sync();
  guarded.reset();  // the guard holds the last reference to the model
}

// A joinable of the program's own, used together with a model.
class Counter : public Joinable {
 public:
  explicit Counter(std::shared_ptr<ProcessGroup> group) : group_(std::move(group)) {}
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    return std::make_unique<JoinHook>();
  }
  std::shared_ptr<ProcessGroup> join_process_group() override { return group_; }
  void enter_join(Join*) override { ++entered; }
  void leave_join() override { ++left; }
  int entered = 0, left = 0;

 private:
  const std::shared_ptr<ProcessGroup> group_;
};

RANK_TEST(WrapperTest, JoinTakesAddresses, 2) {
  const auto group = init_process_group();
  DistributedDataParallel model(Net(), group);
  Counter optimizer(group);
  const auto loop = [&] {
    for (int step = 0; step <= group->rank(); ++step) {
      model->zero_grad();
      model->forward(Input(*group, step)).pow(2).mean().backward();
    }
  };
  Join join({&model, &optimizer});
  loop();
  join.finish();
  ddp::join({&optimizer, &model}, {}, loop);
  EXPECT_EQ(optimizer.entered, 2);
  EXPECT_EQ(optimizer.left, 2);
}

// A rank with fewer steps continues with the momentum of the rank with most steps.
template <typename Optimizer, typename Options>
void OptimizersGoOnAsOne(const std::shared_ptr<ProcessGroup>& group, const Options& options) {
  DistributedDataParallel model(Net(), group, {.broadcast_buffers = false});
  Optimizer optimizer(model->parameters(), options);
  const auto step = [&](int64_t number) {
    optimizer.zero_grad();
    model->forward(Input(*group, number)).pow(2).mean().backward();
    optimizer.step();
  };
  Join join({&model, &optimizer});
  for (int number = 0; number <= 2 * group->rank(); ++number) step(number);
  join.finish();
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(model->parameters())));
  model->eval();  // no batch statistics: equal inputs give equal gradients
  step(7);
  step(8);
  EXPECT_TRUE(SameOnAllRanks(*group, Flatten(model->parameters())));
}

RANK_TEST(WrapperTest, JoinKeepsOptimizersEqual, 2) {
  const auto group = init_process_group();
  OptimizersGoOnAsOne<torch::optim::SGD>(group, torch::optim::SGDOptions(0.1).momentum(0.9));
  OptimizersGoOnAsOne<torch::optim::AdamW>(group, torch::optim::AdamWOptions(0.01));
  torch::optim::SGD alone(Net()->parameters(), 0.1);
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { Join join({&alone}); }),
              HasSubstr("no joinable of a Join has a process group"));
}

RANK_TEST(WrapperTest, ForwardMayReturnNothing, 2) {
  const auto group = init_process_group();
  SilentNet net;
  DistributedDataParallel model(net, group);
  for (int64_t step = 0; step < 3; ++step) {
    model->zero_grad();
    static_assert(std::is_void_v<decltype(model.forward(torch::Tensor()))>);
    model->forward(Input(*group, step));
    net->result.pow(2).mean().backward();
    EXPECT_TRUE(SameOnAllRanks(*group, Gradients(*net)));
  }
  SilentNet searched;
  DistributedDataParallel finds(searched, group, {.find_unused_parameters = true});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { finds(Input(*group)); }),
              AllOf(HasSubstr("has to see the tensors"), HasSubstr("it returned none")));
}

RANK_TEST(WrapperTest, OptionsAsArgumentsAndAsAVariable, 2) {
  const auto group = init_process_group({.backend = "gloo", .timeout = std::chrono::minutes(2)});
  const std::string type = c10::DeviceTypeName(group->device().type(), /*lower_case=*/true);
  const DeviceMesh mesh = init_device_mesh(group, type, {group->size()});
  DistributedDataParallelOptions options;
  options.device_mesh = mesh;
  options.bucket_cap_mb = 1e-5;
  options.params_and_buffers_to_ignore = {"norm.bias"};
  Net net;
  DistributedDataParallel assigned(net, options);
  Net other;
  DistributedDataParallel designated(
      other,
      {.device_mesh = mesh, .params_and_buffers_to_ignore = {"norm.bias"}, .bucket_cap_mb = 1e-5});
  EXPECT_EQ(assigned.bucket_layout(), designated.bucket_layout());
  EXPECT_GT(assigned.bucket_layout().size(), 2u);
  DistributedDataParallel third(Net(), group, {.bucket_cap_mb = 25, .static_graph = true});
  EXPECT_EQ(third.logging_data().bucket_cap_bytes, 25 << 20);
  EXPECT_TRUE(third.logging_data().static_graph);
}

// Programs name the fields in this order, as designated initializers must.
TEST(OptionsTest, EveryFieldIsDesignatedInOrder) {
  const torch::Tensor tensor = torch::ones({2});
  const DistributedDataParallelOptions options{
      .process_group = nullptr,
      .device_mesh = std::nullopt,
      .device_ids = {0},
      .output_device = 0,
      .init_sync = false,
      .check_parameters_every = 10,
      .broadcast_buffers = false,
      .forward_sync_buffers = false,
      .params_and_buffers_to_ignore = {"a", "b"},
      .bucket_cap_mb = 25,
      .first_bucket_cap_mb = 0.5,
      .bucket_cap_mb_list = {1, 2.5},
      .bucket_layout = {{"a", "b"}, {"c"}},
      .gradient_as_bucket_view = true,
      .batched_grad_copy = true,
      .lazy_bucket_allocation = true,
      .reduce_in_place = false,
      .arena_bytes = 1 << 20,
      .find_unused_parameters = true,
      .static_graph = true,
      .skip_all_reduce_unused_params = true,
      .delay_all_reduce_named_params = {{"a", tensor}},
      .param_to_hook_all_reduce = tensor,
      .require_manual_backward_finalization = true,
      .mixed_precision = MixedPrecision{.param_dtype = torch::kHalf}};
  EXPECT_FALSE(options.process_group || options.device_mesh.has_value());
  EXPECT_THAT(options.device_ids, ElementsAre(0));
  EXPECT_TRUE(options.output_device == 0 && options.check_parameters_every == 10);
  EXPECT_FALSE(options.init_sync || options.broadcast_buffers || *options.forward_sync_buffers);
  EXPECT_THAT(options.params_and_buffers_to_ignore, ElementsAre("a", "b"));
  EXPECT_TRUE(options.bucket_cap_mb.value_or(1) == 25 && *options.first_bucket_cap_mb == 0.5);
  EXPECT_THAT(options.bucket_cap_mb_list, ElementsAre(1, 2.5));
  EXPECT_THAT(options.bucket_layout, ElementsAre(ElementsAre("a", "b"), ElementsAre("c")));
  EXPECT_TRUE(options.gradient_as_bucket_view && options.batched_grad_copy &&
              options.lazy_bucket_allocation && options.find_unused_parameters &&
              options.static_graph && options.skip_all_reduce_unused_params);
  EXPECT_TRUE(!options.reduce_in_place && options.arena_bytes.value() == 1 << 20);
  EXPECT_TRUE(options.delay_all_reduce_named_params.at(0).second.is_same(tensor));
  EXPECT_TRUE(options.param_to_hook_all_reduce.is_same(tensor));
  EXPECT_EQ(options.mixed_precision->param_dtype, torch::kHalf);
}

}  // namespace
}  // namespace ddp
