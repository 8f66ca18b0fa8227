#include "elastic/checkpoint/checkpointer_fixture.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <utility>

#include <torch/nn/functional/loss.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "absl/strings/str_cat.h"

namespace ddp::elastic {
namespace {

// Makes an optimizer with two parameter groups of different options.
template <typename Optimizer, typename Options>
MakeOptimizer TwoGroups(Options options) {
  return [options](Net& net) -> std::unique_ptr<torch::optim::Optimizer> {
    Options slower = options;
    slower.lr(options.lr() / 2);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(net->conv->parameters(), std::make_unique<Options>(options));
    std::vector<torch::Tensor> rest = net->norm->parameters();
    for (const torch::Tensor& tensor : net->fc->parameters()) rest.push_back(tensor);
    for (const torch::Tensor& tensor : net->head->parameters()) rest.push_back(tensor);
    groups.emplace_back(rest, std::make_unique<Options>(slower));
    return std::make_unique<Optimizer>(groups, options);
  };
}

}  // namespace

NetImpl::NetImpl(int64_t hidden)
    : conv(register_module("conv", torch::nn::Conv2d(2, 4, 3))),
      norm(register_module("norm", torch::nn::BatchNorm2d(4))),
      fc(register_module("fc", torch::nn::Linear(16, hidden))),
      head(register_module("head", torch::nn::Linear(hidden, 3))) {
  conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
}

torch::Tensor NetImpl::forward(const torch::Tensor& x) {
  const torch::Tensor features = norm(conv(x)).relu().flatten(1);
  return head(torch::dropout(fc(features).relu(), 0.3, is_training()));
}

MakeOptimizer Sgd() {
  return TwoGroups<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
}

MakeOptimizer Adam() {
  return TwoGroups<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true));
}

MakeOptimizer AdamW() {
  return TwoGroups<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).betas({0.8, 0.9}));
}

Trainer::Trainer(const MakeOptimizer& make_optimizer, uint64_t seed, torch::Device on)
    : device(on) {
  torch::manual_seed(seed);
  net = Net();
  net->to(device);
  optimizer = make_optimizer(net);
  sampler = std::make_unique<ElasticSampler>(
      ElasticSampler::Options{.dataset_size = 40, .global_batch_size = 8, .seed = 3}, 0, 1);
  state.model = net.get();
  state.optimizer = optimizer.get();
  state.sampler = sampler.get();
}

void Trainer::Train(int steps) {
  const torch::Tensor data = torch::arange(40 * 2 * 4 * 4).view({40, 2, 4, 4}).sin().to(device);
  for (int i = 0; i < steps; ++i) {
    const std::optional<ElasticSampler::Batch> batch = sampler->next_batch();
    const torch::Tensor indices = torch::tensor(batch->indices).to(device);
    optimizer->zero_grad();
    torch::nn::functional::cross_entropy(net(data.index_select(0, indices)), indices % 3)
        .backward();
    optimizer->step();
    sampler->commit();
    ++state.step;
  }
}

std::vector<torch::Tensor> Trainer::Values() const {
  std::vector<torch::Tensor> values;
  for (const auto& item : net->named_parameters())
    values.push_back(item.value().detach().cpu().clone());
  for (const auto& item : net->named_buffers()) values.push_back(item.value().cpu().clone());
  return values;
}

void ExpectEqual(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << "tensor " << i;
}

CheckpointerFixture::CheckpointerFixture() {
  torch::set_num_threads(1);  // the tensors are tiny, and tests run concurrently
  std::string folder = absl::StrCat(::testing::TempDir(), "/checkpointsXXXXXX");
  folder_ = absl::StrCat(mkdtemp(folder.data()), "/run");
}

Checkpointer::Options CheckpointerFixture::Options(uint64_t generation) const {
  Checkpointer::Options options;
  options.folder = folder_;
  options.generation = generation;
  options.run_id = "test";
  return options;
}

std::string CheckpointerFixture::Contents(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

std::vector<std::string> CheckpointerFixture::NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  return names;
}

std::string CheckpointerFixture::ErrorOfSave(Checkpointer& checkpointer,
                                             const TrainingState& state) {
  try {
    checkpointer.save(state);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

std::string CheckpointerFixture::ErrorOfRestore(TrainingState& state) {
  try {
    Checkpointer(Options(2)).restore(state);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

void CheckpointerFixture::ExpectResumesExactly(const MakeOptimizer& make_optimizer,
                                               torch::Device device) {
  Trainer trainer(make_optimizer, /*seed=*/1, device);
  trainer.Train(3);
  trainer.state.epoch = 7;
  trainer.state.bucket_layout = {{"head.bias", "head.weight"}, {"fc.bias"}};
  Checkpointer(Options()).save(trainer.state);
  trainer.Train(2);

  Trainer resumed(make_optimizer, /*seed=*/99, device);
  resumed.Train(1);  // a trainer that restores need not be fresh
  const std::optional<RestoredCheckpoint> restored =
      Checkpointer(Options(2)).restore(resumed.state);
  ASSERT_TRUE(restored.has_value());
  EXPECT_EQ(restored->step, 3);
  EXPECT_EQ(restored->generation, 1u);
  EXPECT_EQ(restored->folder, absl::StrCat(folder_, "/step-000000000003.g0001"));
  EXPECT_EQ(resumed.state.step, 3);
  EXPECT_EQ(resumed.state.epoch, 7);
  EXPECT_EQ(resumed.state.bucket_layout, trainer.state.bucket_layout);
  EXPECT_EQ(resumed.sampler->state().cursor, 24);
  resumed.Train(2);
  ExpectEqual(resumed.Values(), trainer.Values());
}

}  // namespace ddp::elastic
