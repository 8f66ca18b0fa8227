// Training that begins in PyTorch and goes on in C++, and the reverse: see README.md.
//
// Python's side is exchange.py. By default the test uses the committed checkpoints of PyTorch,
// which were made on another machine. With DDP_ORACLE_DIRECTORY it uses those that generate.py has
// just written there, and strict bounds. With DDP_ORACLE_PYTHON that Python goes on from our
// checkpoints.
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/process/child_process.h"
#include "elastic/checkpoint/checkpointer.h"
#include "elastic/data/elastic_sampler.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "testing/temporary_folder.h"

namespace ddp::testing {
namespace {

using Json = nlohmann::json;
using elastic::Checkpointer;

constexpr int kSteps = 5;  // before the exchange, and as many after it
constexpr int64_t kBatch = 8;

// The model of exchange.py.
struct NetImpl : torch::nn::Module {
  NetImpl() : fc1(4, 8), norm(8), fc2(8, 8), head(8, 3) {
    register_module("fc1", fc1);
    register_module("norm", norm);
    register_module("fc2", fc2);
    register_module("again", fc2);
    register_module("head", head);
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor hidden = torch::tanh(fc2(torch::tanh(norm(fc1(x)))));
    return head(torch::tanh(fc2(hidden)));
  }

  torch::nn::Linear fc1;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear fc2;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

torch::Tensor Values(int step, int64_t columns, double phase) {
  std::vector<float> values;
  for (int64_t row = 0; row < kBatch; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      values.push_back(static_cast<float>(std::sin(1.3 * step + 0.7 * static_cast<double>(row) +
                                                   2.1 * static_cast<double>(column) + phase)));
    }
  }
  return torch::tensor(values).reshape({kBatch, columns});
}

std::vector<torch::Tensor> Rest(Net& net) {
  std::vector<torch::Tensor> parameters;
  for (const auto& module : {net->fc1.ptr(), net->fc2.ptr()}) {
    parameters.push_back(module->weight);
    parameters.push_back(module->bias);
  }
  parameters.insert(parameters.begin() + 2, {net->norm->weight, net->norm->bias});
  return parameters;
}

template <typename Optimizer, typename Options>
std::unique_ptr<torch::optim::Optimizer> MakeAdam(Net& net) {
  auto rest = std::make_unique<Options>(0.01);
  rest->amsgrad(true).weight_decay(0.02);
  auto head = std::make_unique<Options>(0.02);
  head->betas({0.8, 0.99}).weight_decay(0.0);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Rest(net), std::move(rest));
  groups.emplace_back(net->head->parameters(), std::move(head));
  return std::make_unique<Optimizer>(groups, Options(0.01));
}

std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const std::string& kind, Net& net) {
  if (kind == "Adam") return MakeAdam<torch::optim::Adam, torch::optim::AdamOptions>(net);
  if (kind == "AdamW") return MakeAdam<torch::optim::AdamW, torch::optim::AdamWOptions>(net);
  auto rest = std::make_unique<torch::optim::SGDOptions>(0.1);
  rest->momentum(0.9).nesterov(true).weight_decay(1e-3);
  auto head = std::make_unique<torch::optim::SGDOptions>(0.05);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Rest(net), std::move(rest));
  groups.emplace_back(net->head->parameters(), std::move(head));
  return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
}

// One training in C++, and its checkpoints in a folder.
class Training {
 public:
  Training(const std::string& kind, const std::string& folder)
      : optimizer_(MakeOptimizer(kind, net_)),
        sampler_({.dataset_size = 100, .global_batch_size = 10, .seed = 5}, 0, 1),
        checkpointer_(
            {.folder = folder, .generation = 1, .generation_nonce = "cpp", .run_id = "exchange"}) {}

  std::vector<double> Train(int first) {
    std::vector<double> losses;
    for (int step = first; step < first + kSteps; ++step) {
      optimizer_->zero_grad();
      const torch::Tensor loss =
          torch::nn::functional::mse_loss(net_(Values(step, 4, 0.0)), Values(step, 3, 0.5));
      loss.backward();
      optimizer_->step();
      losses.push_back(loss.item<double>());
    }
    return losses;
  }

  elastic::TrainingState State(bool with_sampler) {
    return {.model = net_.get(),
            .optimizer = optimizer_.get(),
            .sampler = with_sampler ? &sampler_ : nullptr,
            .step = kSteps,
            .epoch = 2};
  }

  Net net() const { return net_; }
  Checkpointer& checkpointer() { return checkpointer_; }

 private:
  Net net_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  elastic::ElasticSampler sampler_;
  Checkpointer checkpointer_;
};

Json ReadJson(const std::string& path) {
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

void ExpectLosses(const std::vector<double>& ours, const std::vector<double>& theirs,
                  double relative) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_NEAR(ours[i], theirs[i], relative * std::abs(theirs[i])) << "step " << i;
  }
}

std::vector<float> Random() {
  const torch::Tensor values = torch::rand({3});
  return {values.data_ptr<float>(), values.data_ptr<float>() + 3};
}

// Runs a program, found on PATH, to its end. Returns its exit code; -1 when a signal ended it.
int RunProgram(std::vector<std::string> words) {
  const std::vector<char*> arguments = ExecPointers(words);
  const ChildProcess child = StartChild([&arguments] {
    ::execvp(arguments[0], arguments.data());
    return errno;
  });
  EXPECT_GT(child.pid, 0) << child.failed_call;
  int status = 0;
  EXPECT_EQ(::waitpid(child.pid, &status, 0), child.pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class CheckpointExchangeTest : public ::testing::TestWithParam<std::string> {
 protected:
  CheckpointExchangeTest() { torch::manual_seed(1); }
};

TEST_P(CheckpointExchangeTest, CppGoesOnWherePyTorchStopped) {
  const std::string fresh = Variable("DDP_ORACLE_DIRECTORY");
  const std::string golden = fresh.empty() ? "testing/oracle/golden" : fresh;
  const Json facts = ReadJson(golden + "/exchange.json");
  ASSERT_TRUE(facts.contains(GetParam())) << golden;
  Training training(GetParam(), absl::StrCat(golden, "/exchange/", GetParam()));
  elastic::TrainingState state = training.State(/*with_sampler=*/false);
  state.step = 0;
  const auto restored = training.checkpointer().restore(state);
  ASSERT_TRUE(restored.has_value());
  EXPECT_TRUE(restored->passed_over.empty());
  EXPECT_EQ(state.step, kSteps);
  EXPECT_EQ(state.epoch, 1);
  EXPECT_EQ(Random(), facts[GetParam()]["random"].get<std::vector<float>>());
  ExpectLosses(training.Train(kSteps), facts[GetParam()]["losses"], fresh.empty() ? 1e-4 : 1e-6);
}

TEST_P(CheckpointExchangeTest, PyTorchGoesOnWhereCppStopped) {
  const std::string python = Variable("DDP_ORACLE_PYTHON");
  if (python.empty()) GTEST_SKIP() << "no DDP_ORACLE_PYTHON: see tools/test --oracle";
  const TemporaryFolder folder;
  Training training(GetParam(), folder.path() + "/checkpoints");
  training.Train(0);
  const std::string saved = training.checkpointer().save(training.State(/*with_sampler=*/true));
  ASSERT_NE(saved, "");
  const std::vector<float> random = Random();
  const std::vector<double> losses = training.Train(kSteps);

  ASSERT_EQ(RunProgram({python, "testing/oracle/exchange.py", "continue",
                        folder.path() + "/checkpoints", GetParam(), folder.path()}),
            0);
  const Json facts = ReadJson(folder.path() + "/continued.json");
  EXPECT_EQ(facts["step"], kSteps);
  EXPECT_EQ(facts["epoch"], 2);
  EXPECT_EQ(facts["sampler"]["dataset_size"], 100);
  EXPECT_EQ(facts["random"].get<std::vector<float>>(), random);
  ExpectLosses(losses, facts["losses"], 1e-6);

  // The file that Python exported and imported again holds the same state, and C++ goes on from it.
  EXPECT_EQ(facts["state_hash"], ReadJson(saved + "/MANIFEST.json")["state_xxh3_128"]);
  Training again(GetParam(), folder.path() + "/imported");
  elastic::TrainingState state = again.State(/*with_sampler=*/true);
  const auto restored = again.checkpointer().restore(state);
  ASSERT_TRUE(restored.has_value());
  EXPECT_EQ(restored->generation, 9);
  EXPECT_EQ(again.Train(kSteps), losses);
}

// The reader of docs/checkpoint-format.md, which needs nothing but Python, reads what ours saves.
TEST(CheckpointFormatTest, TheReaderOfThePageReadsWhatCppSaved) {
  if (RunProgram({"python3", "-c", "pass"}) != 0) GTEST_SKIP() << "no python3";
  const TemporaryFolder folder;
  Training training("AdamW", folder.path() + "/checkpoints");
  training.Train(0);
  const std::string saved = training.checkpointer().save(training.State(/*with_sampler=*/true));
  ASSERT_NE(saved, "");
  ASSERT_EQ(RunProgram({"python3", "tools/python/checkpoint_format_test.py", "read", saved,
                        folder.path() + "/read.json"}),
            0);
  const Json read = ReadJson(folder.path() + "/read.json");
  const Net net = training.net();
  size_t buffers = 0;
  for (const auto& item : net->named_parameters()) {
    const torch::Tensor value = item.value().detach();
    const absl::string_view bytes(static_cast<const char*>(value.const_data_ptr()), value.nbytes());
    const Json& tensor = read["model"][item.key()];
    ASSERT_TRUE(tensor.is_array()) << item.key();
    EXPECT_EQ(tensor[0], "F32");
    EXPECT_EQ(tensor[1], value.sizes().vec());
    EXPECT_EQ(tensor[2], absl::BytesToHexString(bytes)) << item.key();
    EXPECT_TRUE(item.key().starts_with("again.") ||
                read["optimizer"].contains(absl::StrCat("state.", item.key(), ".exp_avg")));
  }
  for (const auto& item : net->named_buffers()) {
    buffers += read["model"].contains(item.key()) ? 1 : 0;
  }
  EXPECT_EQ(buffers, 3);
  EXPECT_TRUE(read["extra"].contains("rng.cpu.0"));
}

INSTANTIATE_TEST_SUITE_P(Optimizers, CheckpointExchangeTest,
                         ::testing::Values("SGD", "Adam", "AdamW"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ddp::testing
