// Tests Checkpointer with real models, optimizers and files, and with a c10d::Store. The tests in
// save_load/ cover faults of the disk and between ranks.
//
// Length: every further file would compile LibTorch's headers once more, which takes 15 s.
#include "elastic/checkpoint/checkpointer.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/optim/zero_trainer.h"
#include "ddp/process_group.h"
#include "elastic/checkpoint/group/faulty_store.h"
#include "elastic/checkpoint/group/in_process_group.h"
#include "elastic/data/elastic_sampler.h"
#include "elastic/worker/worker_session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/backend/thread_ranks.h"
#include "testing/fake_clock.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// A network whose training depends on strides (a convolution in channels-last), buffers (batch
// norm) and random numbers (dropout).
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int64_t hidden = 6)
      : conv(register_module("conv", torch::nn::Conv2d(2, 4, 3))),
        norm(register_module("norm", torch::nn::BatchNorm2d(4))),
        fc(register_module("fc", torch::nn::Linear(16, hidden))),
        head(register_module("head", torch::nn::Linear(hidden, 3))) {
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor features = norm(conv(x)).relu().flatten(1);
    return head(torch::dropout(fc(features).relu(), 0.3, is_training()));
  }

  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d norm;
  torch::nn::Linear fc;
  torch::nn::Linear head;
};
TORCH_MODULE(Net);

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)>;

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

MakeOptimizer Sgd() {
  return TwoGroups<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
}
MakeOptimizer Adam() {
  return TwoGroups<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true));
}
MakeOptimizer AdamW() {
  return TwoGroups<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01).betas({0.8, 0.9}));
}

// A training process.
class Trainer {
 public:
  explicit Trainer(const MakeOptimizer& make_optimizer, uint64_t seed = 1) {
    torch::manual_seed(seed);
    net = Net();
    optimizer = make_optimizer(net);
    sampler = std::make_unique<ElasticSampler>(
        ElasticSampler::Options{.dataset_size = 40, .global_batch_size = 8, .seed = 3}, 0, 1);
    state.model = net.get();
    state.optimizer = optimizer.get();
    state.sampler = sampler.get();
  }

  void Train(int steps) {
    const torch::Tensor data = torch::arange(40 * 2 * 4 * 4).view({40, 2, 4, 4}).sin();
    for (int i = 0; i < steps; ++i) {
      const std::optional<ElasticSampler::Batch> batch = sampler->next_batch();
      const torch::Tensor indices = torch::tensor(batch->indices);
      optimizer->zero_grad();
      torch::nn::functional::cross_entropy(net(data.index_select(0, indices)), indices % 3)
          .backward();
      optimizer->step();
      sampler->commit();
      ++state.step;
    }
  }

  std::vector<torch::Tensor> Values() const {
    std::vector<torch::Tensor> values;
    for (const auto& item : net->named_parameters())
      values.push_back(item.value().detach().clone());
    for (const auto& item : net->named_buffers()) values.push_back(item.value().clone());
    return values;
  }

  Net net{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::unique_ptr<ElasticSampler> sampler;
  TrainingState state;
};

void ExpectEqual(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(torch::equal(a[i], b[i])) << "tensor " << i;
}

class CheckpointerTest : public ::testing::Test {
 protected:
  CheckpointerTest() {
    torch::set_num_threads(1);  // the tensors are tiny, and tests run concurrently
    std::string folder = absl::StrCat(::testing::TempDir(), "/checkpointsXXXXXX");
    folder_ = absl::StrCat(mkdtemp(folder.data()), "/run");
  }

  Checkpointer::Options Options(uint64_t generation = 1) {
    Checkpointer::Options options;
    options.folder = folder_;
    options.generation = generation;
    options.run_id = "test";
    return options;
  }

  static std::string Contents(const std::string& path) {
    std::ifstream stream(path, std::ios::binary);
    std::ostringstream text;
    text << stream.rdbuf();
    return text.str();
  }

  // Returns the names in a folder, unordered, without the file system of the code under test.
  static std::vector<std::string> NamesIn(const std::string& folder) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  std::string ErrorOfSave(Checkpointer& checkpointer, const TrainingState& state) {
    try {
      checkpointer.save(state);
    } catch (const CheckpointError& error) {
      return error.what();
    }
    return "";
  }

  std::string ErrorOfRestore(TrainingState& state) {
    try {
      Checkpointer(Options(2)).restore(state);
    } catch (const CheckpointError& error) {
      return error.what();
    }
    return "";
  }

  // Checks that interrupted training gives the same bits as uninterrupted training.
  void ExpectResumesExactly(const MakeOptimizer& make_optimizer) {
    Trainer trainer(make_optimizer);
    trainer.Train(3);
    trainer.state.epoch = 7;
    trainer.state.bucket_layout = {{"head.bias", "head.weight"}, {"fc.bias"}};
    Checkpointer(Options()).save(trainer.state);
    trainer.Train(2);

    Trainer resumed(make_optimizer, /*seed=*/99);
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

  std::string folder_;
};

TEST_F(CheckpointerTest, EmptyFolderRestoresNothing) {
  Trainer trainer(Sgd());
  const std::vector<torch::Tensor> before = trainer.Values();
  Checkpointer checkpointer(Options());
  EXPECT_FALSE(checkpointer.has_checkpoint());
  EXPECT_FALSE(checkpointer.restore(trainer.state).has_value());
  ExpectEqual(trainer.Values(), before);
  checkpointer.save(trainer.state);
  EXPECT_TRUE(checkpointer.has_checkpoint());
}

TEST_F(CheckpointerTest, SgdResumesExactly) { ExpectResumesExactly(Sgd()); }
TEST_F(CheckpointerTest, AdamResumesExactly) { ExpectResumesExactly(Adam()); }
TEST_F(CheckpointerTest, AdamWResumesExactly) { ExpectResumesExactly(AdamW()); }

TEST_F(CheckpointerTest, OptionsOfTheOptimizerComeFromTheCheckpoint) {
  Trainer trainer(AdamW());
  trainer.optimizer->param_groups()[1].options().set_lr(0.1 + 0.2);
  Checkpointer(Options()).save(trainer.state);
  Trainer resumed(AdamW());
  Checkpointer(Options(2)).restore(resumed.state);
  EXPECT_EQ(resumed.optimizer->param_groups()[1].options().get_lr(), 0.1 + 0.2);
  EXPECT_EQ(resumed.optimizer->param_groups()[0].options().get_lr(), 0.01);
}

TEST_F(CheckpointerTest, OptionsThatDifferAreListedAndTheProgramsMayWin) {
  Trainer trainer(AdamW());
  trainer.optimizer->param_groups()[1].options().set_lr(0.5);
  Checkpointer(Options()).save(trainer.state);
  using Wins = Checkpointer::OptimizerOptions;
  for (const Wins wins : {Wins::kFromCheckpoint, Wins::kFromProgram}) {
    Trainer resumed(AdamW());
    Checkpointer::Options options = Options(2);
    options.optimizer_options = wins;
    Checkpointer checkpointer(options);
    ::testing::internal::CaptureStderr();
    checkpointer.restore(resumed.state);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                HasSubstr("lr of group 1: 0.005 in the program, 0.5 in the checkpoint\n"));
    EXPECT_EQ(resumed.optimizer->param_groups()[1].options().get_lr(),
              wins == Wins::kFromProgram ? 0.005 : 0.5);
  }
}

TEST_F(CheckpointerTest, MemoryOfTheModelStaysWhereItIs) {
  Trainer trainer(Sgd());
  trainer.Train(1);
  Checkpointer checkpointer(Options());
  checkpointer.save(trainer.state);
  const torch::Tensor weight = trainer.net->fc->weight;
  const void* memory = weight.data_ptr();
  trainer.Train(1);
  checkpointer.restore(trainer.state);
  EXPECT_EQ(trainer.net->fc->weight.data_ptr(), memory);
  EXPECT_TRUE(trainer.net->fc->weight.is_same(weight));
  EXPECT_TRUE(weight.requires_grad());
}

TEST_F(CheckpointerTest, EqualStateGivesEqualFilesInEveryRun) {
  Trainer first(AdamW());
  first.Train(3);
  const std::string first_folder = Checkpointer(Options(1)).save(first.state);
  Trainer second(AdamW());
  second.Train(3);
  const std::string second_folder = Checkpointer(Options(2)).save(second.state);
  EXPECT_NE(first_folder, second_folder);
  for (const char* name : {"model-00001-of-00001.safetensors",
                           "optimizer-00001-of-00001.safetensors", "extra-00000.safetensors"}) {
    const std::string bytes = Contents(absl::StrCat(first_folder, "/", name));
    EXPECT_THAT(bytes, SizeIs(::testing::Gt(4096u))) << name;
    EXPECT_EQ(bytes, Contents(absl::StrCat(second_folder, "/", name))) << name;
  }
}

TEST_F(CheckpointerTest, FinishedJobThatIsResumedAndEndsAtOnceSavesAgain) {
  Trainer trainer(Sgd());
  trainer.Train(2);
  const std::string folder = Checkpointer(Options()).save(trainer.state);
  Trainer resumed(Sgd(), /*seed=*/5);
  Checkpointer again(Options());
  ASSERT_TRUE(again.restore(resumed.state).has_value());
  EXPECT_EQ(again.save(resumed.state), folder);
}

TEST_F(CheckpointerTest, DamagedNewestIsPassedOverWithTheReason) {
  Trainer trainer(Sgd());
  Checkpointer checkpointer(Options());
  trainer.Train(1);
  checkpointer.save(trainer.state);
  const std::vector<torch::Tensor> at_one = trainer.Values();
  trainer.Train(1);
  const std::string newest = checkpointer.save(trainer.state);
  {
    std::fstream file(newest + "/model-00001-of-00001.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file.put('\x55');
  }
  const std::optional<RestoredCheckpoint> restored =
      Checkpointer(Options(2)).restore(trainer.state);
  ASSERT_TRUE(restored.has_value());
  EXPECT_EQ(restored->step, 1);
  EXPECT_THAT(restored->passed_over,
              ElementsAre(AllOf(HasSubstr(newest), HasSubstr("is damaged"))));
  ExpectEqual(trainer.Values(), at_one);
}

TEST_F(CheckpointerTest, NothingReadableIsAnErrorAndNotAFreshStart) {
  Trainer trainer(Sgd());
  std::filesystem::remove(Checkpointer(Options()).save(trainer.state) + "/MANIFEST.json");
  EXPECT_THAT(ErrorOfRestore(trainer.state), HasSubstr("none of the checkpoints"));
}

TEST_F(CheckpointerTest, CheckpointOfAnotherModelListsEveryMismatchAndLoadsNothing) {
  Trainer trainer(Sgd());
  trainer.Train(1);
  Checkpointer(Options()).save(trainer.state);

  Trainer other(Adam(), /*seed=*/7);
  other.net->fc->weight.set_data(torch::zeros({5, 16}));
  other.net->head->bias.set_data(torch::zeros({3}, torch::kDouble));
  other.net->register_parameter("extra", torch::zeros({2}));
  const std::vector<torch::Tensor> before = other.Values();
  const std::string error = ErrorOfRestore(other.state);
  EXPECT_THAT(error, HasSubstr("nothing was loaded"));
  EXPECT_THAT(error,
              HasSubstr("fc.weight: F32 [5, 16] in the model, F32 [6, 16] in the checkpoint"));
  EXPECT_THAT(error, HasSubstr("head.bias: F64 [3] in the model, F32 [3] in the checkpoint"));
  EXPECT_THAT(error, HasSubstr("extra: in the model, not in the checkpoint"));
  EXPECT_THAT(error, HasSubstr("the optimizer is Adam here, SGD in the checkpoint"));
  EXPECT_THAT(error, Not(HasSubstr("Exception raised from")));
  ExpectEqual(other.Values(), before);
  EXPECT_EQ(other.state.step, 0);
}

TEST_F(CheckpointerTest, OtherParameterGroupsAreAMismatch) {
  Trainer trainer(Sgd());
  Checkpointer(Options()).save(trainer.state);
  Trainer other([](Net& net) {
    return std::make_unique<torch::optim::SGD>(net->parameters(), torch::optim::SGDOptions(0.1));
  });
  EXPECT_THAT(ErrorOfRestore(other.state),
              HasSubstr("1 parameter groups here, 2 in the checkpoint"));
}

TEST_F(CheckpointerTest, OtherDataIsAMismatch) {
  Trainer trainer(Sgd());
  Checkpointer(Options()).save(trainer.state);
  Trainer other(Sgd());
  *other.sampler = ElasticSampler({.dataset_size = 41, .global_batch_size = 8, .seed = 3}, 0, 1);
  EXPECT_THAT(ErrorOfRestore(other.state),
              HasSubstr("data: dataset_size is 40 in the checkpoint and 41 here"));
}

TEST_F(CheckpointerTest, ModelAloneCanBeRestored) {
  Trainer trainer(Sgd());
  trainer.Train(2);
  Checkpointer(Options()).save(trainer.state);
  Trainer other(Adam(), /*seed=*/7);
  TrainingState state;
  state.model = other.net.get();
  ASSERT_TRUE(Checkpointer(Options(2)).restore(state).has_value());
  ExpectEqual(other.Values(), trainer.Values());
}

TEST_F(CheckpointerTest, EveryTensorTypeAndLayoutComesBack) {
  const auto make = [](bool filled) {
    auto module = std::make_shared<torch::nn::Module>();
    const auto add = [&](const std::string& name, torch::Tensor tensor) {
      module->register_buffer(name, filled ? tensor : torch::zeros_like(tensor));
    };
    const torch::Tensor numbers = torch::arange(12).view({3, 4});
    for (const auto type :
         {torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong, torch::kHalf,
          torch::kBFloat16, torch::kFloat, torch::kDouble, torch::kBool, torch::kComplexFloat}) {
      add(absl::StrCat("t", static_cast<int>(type)), numbers.to(type));
    }
    add("scalar", torch::tensor(5, torch::kLong));
    add("empty", torch::zeros({0, 3}));
    add("transposed", numbers.to(torch::kFloat).t());
    add("strided", numbers.to(torch::kFloat).slice(1, 0, 4, 2));
    return module;
  };
  const auto saved = make(true);
  TrainingState state{.model = saved.get()};
  Checkpointer(Options()).save(state);
  const auto loaded = make(false);
  state.model = loaded.get();
  ASSERT_TRUE(Checkpointer(Options(2)).restore(state).has_value());
  for (const auto& item : saved->named_buffers()) {
    EXPECT_TRUE(torch::equal(loaded->named_buffers()[item.key()], item.value())) << item.key();
  }
}

TEST_F(CheckpointerTest, TiedWeightsAreSavedOnceAndStayTied) {
  const auto make = [](float value, bool tied) {
    auto module = std::make_shared<torch::nn::Module>();
    const torch::Tensor weight =
        module->register_parameter("embedding", torch::full({4, 2}, value));
    module->register_parameter("output", tied ? weight : torch::full({4, 2}, value + 1));
    return module;
  };
  const auto saved = make(3, true);
  TrainingState state{.model = saved.get()};
  const std::string folder = Checkpointer(Options()).save(state);
  EXPECT_THAT(Contents(folder + "/MANIFEST.json"),
              HasSubstr("\"aliases\": {\"output\":\"embedding\"}"));
  for (const bool tied : {true, false}) {
    const auto loaded = make(0, tied);
    state.model = loaded.get();
    ASSERT_TRUE(Checkpointer(Options(2)).restore(state).has_value());
    EXPECT_TRUE(torch::equal(loaded->named_parameters()["output"], torch::full({4, 2}, 3.0F)));
  }
  const auto untied = make(3, false);
  state.model = untied.get();
  state.step = 1;
  Checkpointer(Options(2)).save(state);
  state.model = saved.get();
  EXPECT_THAT(ErrorOfRestore(state), HasSubstr("output: one tensor with embedding in the model"));
}

// Parameters tied by set_data() share memory, and each has its own state in the optimizer.
TEST_F(CheckpointerTest, ParametersTiedBySetDataKeepTheirOwnOptimizerState) {
  struct Tied {
    Tied() {
      encoder = module->register_parameter("encoder", torch::full({2}, 1.0));
      decoder = module->register_parameter("decoder", torch::full({2}, 1.0));
      decoder.set_data(encoder.data());
      optimizer = std::make_unique<torch::optim::Adam>(module->parameters(), 0.1);
      state = {.model = module.get(), .optimizer = optimizer.get()};
    }
    void Step() {
      optimizer->zero_grad();
      (encoder.sum() + (3 * decoder).pow(2).sum()).backward();
      optimizer->step();
      ++state.step;
    }
    std::shared_ptr<torch::nn::Module> module = std::make_shared<torch::nn::Module>();
    torch::Tensor encoder, decoder;
    std::unique_ptr<torch::optim::Adam> optimizer;
    TrainingState state;
  };
  Tied trained;
  trained.Step();
  Checkpointer(Options()).save(trained.state);
  Tied resumed;
  ASSERT_TRUE(Checkpointer(Options(2)).restore(resumed.state).has_value());
  trained.Step();
  resumed.Step();
  EXPECT_TRUE(torch::equal(resumed.encoder, trained.encoder)) << resumed.encoder;
}

TEST_F(CheckpointerTest, AnExpandedBufferComesBackAndNothingIsHalfRestored) {
  const auto make = [](float value, const torch::Tensor& scale) {
    auto module = std::make_shared<torch::nn::Module>();
    module->register_parameter("weight", torch::full({3}, value));
    module->register_buffer("scale", scale);
    return module;
  };
  const auto saved = make(5, torch::full({1}, 7.0F).expand({4}));
  TrainingState state{.model = saved.get()};
  Checkpointer(Options()).save(state);
  const auto loaded = make(0, torch::zeros({1}).expand({4}));
  state.model = loaded.get();
  ASSERT_TRUE(Checkpointer(Options(2)).restore(state).has_value());
  EXPECT_TRUE(torch::equal(loaded->named_parameters()["weight"], torch::full({3}, 5.0F)));
  EXPECT_TRUE(torch::equal(loaded->named_buffers()["scale"], torch::full({4}, 7.0F)));

  const auto varied = make(6, torch::arange(4).to(torch::kFloat));
  state = {.model = varied.get(), .step = 1};
  Checkpointer(Options(2)).save(state);
  const auto untouched = make(0, torch::zeros({1}).expand({4}));
  state.model = untouched.get();
  EXPECT_THAT(ErrorOfRestore(state), HasSubstr("tensor scale is expanded"));
  EXPECT_TRUE(torch::equal(untouched->named_parameters()["weight"], torch::zeros({3})));
}

TEST_F(CheckpointerTest, WhatCannotBeSavedIsNamed) {
  Trainer trainer(
      [](Net& net) { return std::make_unique<torch::optim::RMSprop>(net->parameters()); });
  EXPECT_THROW(Checkpointer(Options()).save(trainer.state), CheckpointError);
  trainer.state.optimizer = nullptr;
  trainer.net->register_buffer("wave", torch::zeros({2}, torch::kComplexDouble));
  try {
    Checkpointer(Options()).save(trainer.state);
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("tensor wave"), HasSubstr("ComplexDouble")));
  }
  EXPECT_FALSE(Checkpointer(Options()).has_checkpoint());
}

TEST_F(CheckpointerTest, FolderThatCannotBeMadeIsNamed) {
  const std::string file = absl::StrCat(::testing::TempDir(), "/a_file");
  std::ofstream(file) << "not a folder";
  Checkpointer::Options options = Options();
  options.folder = file + "/checkpoints";
  Trainer trainer(Sgd());
  try {
    Checkpointer(options).save(trainer.state);
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("the checkpoint of step 0 was not saved"),
                                    HasSubstr(options.folder), HasSubstr("Not a directory")));
  }
}

TEST_F(CheckpointerTest, FolderMayBeALink) {
  const std::string real = folder_ + "-real";
  ASSERT_EQ(mkdir(real.c_str(), 0700), 0);
  ASSERT_EQ(symlink(real.c_str(), folder_.c_str()), 0);
  Trainer trainer(Sgd());
  Checkpointer(Options()).save(trainer.state);
  EXPECT_TRUE(Checkpointer(Options(2)).restore(trainer.state).has_value());
}

TEST_F(CheckpointerTest, ForeignFilesInTheFolderOutliveEverySave) {
  const std::string precious = folder_ + "-precious";
  std::filesystem::create_directories(precious + "/inner");
  std::ofstream(precious + "/model-00001-of-00001.safetensors") << "text";
  std::ofstream(precious + "/MANIFEST.json") << "text";
  std::filesystem::create_directories(folder_ + "/.tmp-mine");
  std::ofstream(folder_ + "/.tmp-mine/notes.txt") << "text";
  const std::string leftover = folder_ + "/.tmp-step-000000000007.g0001.gone";
  std::filesystem::create_directories(leftover + "/inner");
  std::ofstream(leftover + "/extra-00000.safetensors") << "text";
  const std::string swept = folder_ + "/.tmp-step-000000000008.g0001.gone";
  std::filesystem::create_directories(swept);
  std::ofstream(swept + "/extra-00000.safetensors") << "text";
  for (const char* link : {"/.tmp-x", "/.tmp-step-000000000009.g0001.gone", "/.del-x"}) {
    ASSERT_EQ(symlink(precious.c_str(), (folder_ + link).c_str()), 0);
  }
  const std::string file = precious + "/MANIFEST.json";
  ASSERT_EQ(symlink(file.c_str(), (leftover + "/MANIFEST.json").c_str()), 0);

  Trainer trainer(Sgd());
  Checkpointer(Options(2)).save(trainer.state);
  EXPECT_THAT(NamesIn(precious), ::testing::UnorderedElementsAre(
                                     "inner", "MANIFEST.json", "model-00001-of-00001.safetensors"));
  EXPECT_EQ(Contents(file), "text");
  EXPECT_THAT(NamesIn(folder_ + "/.tmp-mine"), ElementsAre("notes.txt"));
  EXPECT_THAT(NamesIn(leftover), ::testing::UnorderedElementsAre("inner", "MANIFEST.json"));
  EXPECT_THAT(NamesIn(folder_),
              ::testing::UnorderedElementsAre(
                  ".owner", "step-000000000000.g0002", ".tmp-mine", ".tmp-x", ".del-x",
                  ".tmp-step-000000000007.g0001.gone", ".tmp-step-000000000009.g0001.gone"));
}

// Bounds the size of every file that this process writes: a write beyond it fails, as on a full
// disk.
class FullDisk {
 public:
  FullDisk() {
    (void)signal(SIGXFSZ, SIG_IGN);
    EXPECT_EQ(getrlimit(RLIMIT_FSIZE, &before_), 0);
    const rlimit small = {.rlim_cur = 2000, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  ~FullDisk() { EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before_), 0); }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
};

TEST_F(CheckpointerTest, AFullDiskFailsASaveAndNotTheJob) {
  Checkpointer::Options options = Options();
  options.retry_pause = std::chrono::hours(1);
  options.retry_pause_max = std::chrono::hours(1);
  Checkpointer checkpointer(options);
  Trainer trainer(Sgd());
  const std::string first = checkpointer.save(trainer.state);
  {
    const FullDisk full;
    trainer.Train(1);
    EXPECT_EQ(checkpointer.save(trainer.state), "");
  }
  EXPECT_EQ(checkpointer.stats().failed, 1);
  EXPECT_EQ(checkpointer.stats().failed_in_a_row, 1);
  EXPECT_THAT(checkpointer.stats().last_error,
              AllOf(HasSubstr(".safetensors"), HasSubstr("File too large")));
  EXPECT_THAT(NamesIn(folder_),
              ::testing::UnorderedElementsAre(".owner", "step-000000000000.g0001"));
  // The pause holds back a routine save and not the last one.
  trainer.Train(1);
  EXPECT_EQ(checkpointer.save(trainer.state), "");
  EXPECT_EQ(checkpointer.stats().held_back, 1);
  EXPECT_EQ(checkpointer.save(trainer.state, Checkpointer::Urgency::kLast),
            folder_ + "/step-000000000002.g0001");
  EXPECT_EQ(checkpointer.stats().saved, 2);
  EXPECT_EQ(checkpointer.stats().failed_in_a_row, 0);
  trainer.Train(1);
  EXPECT_EQ(checkpointer.save(trainer.state), folder_ + "/step-000000000003.g0001");
  EXPECT_EQ(checkpointer.restore(trainer.state)->step, 3);
}

TEST_F(CheckpointerTest, AFailedSaveThrowsOnRequest) {
  Checkpointer::Options options = Options();
  options.on_error = Checkpointer::OnError::kThrow;
  Checkpointer checkpointer(options);
  Trainer trainer(Sgd());
  const FullDisk full;
  EXPECT_THAT(
      ErrorOfSave(checkpointer, trainer.state),
      AllOf(HasSubstr("the checkpoint of step 0 was not saved"), HasSubstr("File too large")));
  EXPECT_EQ(checkpointer.stats().failed, 1);
}

TEST_F(CheckpointerTest, AnObstacleThatIsNoDamageIsNoReasonToTakeAnOlderCheckpoint) {
  Trainer trainer(Sgd());
  Checkpointer checkpointer(Options());
  checkpointer.save(trainer.state);
  trainer.Train(1);
  const std::string file = checkpointer.save(trainer.state) + "/model-00001-of-00001.safetensors";
  ASSERT_EQ(rename(file.c_str(), (file + ".away").c_str()), 0);
  ASSERT_EQ(mkdir(file.c_str(), 0700), 0);
  EXPECT_THAT(ErrorOfRestore(trainer.state),
              AllOf(HasSubstr("no older one was taken"),
                    HasSubstr("rank 0: " + file + " is not a plain file")));
  ASSERT_EQ(rmdir(file.c_str()), 0);
  ASSERT_EQ(rename((file + ".away").c_str(), file.c_str()), 0);
  EXPECT_EQ(Checkpointer(Options(2)).restore(trainer.state)->step, 1);
}

TEST_F(CheckpointerTest, AnOlderGenerationCannotSaveAfterALaterOne) {
  Trainer trainer(Sgd());
  Checkpointer older(Options(1));  // suspended before its first save
  Checkpointer newer(Options(2));
  newer.save(trainer.state);
  EXPECT_THAT(ErrorOfSave(older, trainer.state),
              AllOf(HasSubstr("generation 1"), HasSubstr("is older than generation 2")));
  ++trainer.state.step;
  EXPECT_NE(newer.save(trainer.state), "");
}

// A cut-off rank of generation 1 would otherwise commit a step that generation 2 has undone.
TEST_F(CheckpointerTest, ARestoreEndsTheSavesOfTheGenerationBefore) {
  Trainer trainer(Sgd());
  Checkpointer older(Options(1));
  older.save(trainer.state);
  Trainer restored(Sgd());
  Checkpointer newer(Options(2));
  ASSERT_TRUE(newer.restore(restored.state).has_value());
  trainer.Train(3);
  EXPECT_THAT(ErrorOfSave(older, trainer.state), HasSubstr("now belongs to another generation"));
  EXPECT_NE(newer.save(restored.state), "");
  EXPECT_EQ(newer.restore(restored.state)->step, 0);
}

TEST_F(CheckpointerTest, ARestoreOfAnotherProgramClaimsNothing) {
  Trainer trainer(Sgd());
  Checkpointer writer(Options(1));
  writer.save(trainer.state);
  Checkpointer::Options options = Options(0);
  options.run_id = "evaluation";
  Trainer evaluated(Sgd());
  ASSERT_TRUE(Checkpointer(options).restore(evaluated.state).has_value());
  trainer.Train(1);
  EXPECT_NE(writer.save(trainer.state), "");
}

// A launcher without generations gives all of its jobs the same nonces.
TEST_F(CheckpointerTest, TwoJobsUnderTorchrunNeverShareAWorkFolder) {
  Checkpointer::Options options = Options(0);
  options.generation_nonce = "restart-0";
  Trainer trainer(Sgd());
  Checkpointer first(options);
  Checkpointer second(options);
  std::set<std::string> nonces;
  for (Checkpointer* checkpointer : {&first, &second}) {
    ++trainer.state.step;
    const std::string manifest = Contents(checkpointer->save(trainer.state) + "/MANIFEST.json");
    const size_t begin = manifest.find("\"generation_nonce\": \"restart-0-");
    ASSERT_NE(begin, std::string::npos) << manifest;
    nonces.insert(manifest.substr(begin, manifest.find('\n', begin) - begin));
  }
  EXPECT_THAT(nonces, SizeIs(2));
  ++trainer.state.step;
  EXPECT_THAT(ErrorOfSave(first, trainer.state), HasSubstr("now belongs to another generation"));
  EXPECT_NE(second.save(trainer.state), "");
}

TEST_F(CheckpointerTest, OptionsAreChecked) {
  const auto refused = [this](const std::function<void(Checkpointer::Options&)>& change) {
    Checkpointer::Options options = Options();
    change(options);
    EXPECT_THROW(Checkpointer{options}, CheckpointError);
  };
  refused([](auto& options) { options.folder = ""; });
  refused([](auto& options) { options.rank = 1; });
  refused([](auto& options) { options.world_size = 2; });  // without a store
  refused([](auto& options) { options.generation_nonce = "../up"; });
  refused([](auto& options) { options.timeout = {}; });
  refused([](auto& options) { options.retry_pause_max = {}; });
  refused([](auto& options) { options.stall_warning_after = {}; });
}

// ---- Several ranks, over a store ----

// Runs `body` on one thread per rank. (All ranks share the CPU's generator.)
void RunRanks(int world_size, Checkpointer::Options options,
              const std::function<void(Checkpointer&, int)>& body) {
  options.world_size = world_size;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    options.rank = rank;
    threads.emplace_back([options, rank, &body] {
      Checkpointer checkpointer(options);
      body(checkpointer, rank);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CheckpointerTest, RanksSaveAndRestoreTogetherThroughAStore) {
  Checkpointer::Options options = Options();
  options.store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (int rank = 0; rank < 3; ++rank) {
    trainers.push_back(std::make_unique<Trainer>(AdamW()));
    trainers.back()->Train(2);
  }
  const std::vector<torch::Tensor> saved = trainers[0]->Values();
  // A group, then a second group on the same store, then a generation of another size.
  for (const int world_size : {3, 3, 2}) {
    options.generation = world_size == 3 ? 1 : 2;
    RunRanks(world_size, options, [&](Checkpointer& checkpointer, int rank) {
      Trainer& trainer = *trainers[static_cast<size_t>(rank)];
      EXPECT_EQ(checkpointer.restore(trainer.state).has_value(),
                world_size == 2 || trainer.state.step > 2);
      const std::string folder = checkpointer.save(trainer.state);
      EXPECT_EQ(folder, absl::StrCat(folder_, "/step-00000000000", trainer.state.step, ".g000",
                                     options.generation));
      ++trainer.state.step;
      checkpointer.save(trainer.state);
    });
    options.store->getNumKeys();
    options.generation_nonce = absl::StrCat("world-", world_size);
  }
  ExpectEqual(trainers[1]->Values(), saved);
}

// Gives the parameters values that are the same in every network, and returns them.
std::vector<torch::Tensor> FillAndList(Net& net) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> parameters = net->parameters();
  for (torch::Tensor& parameter : parameters) {
    parameter.copy_(torch::arange(parameter.numel()).sin().view(parameter.sizes()));
  }
  return parameters;
}

void StepOnce(const std::vector<torch::Tensor>& parameters, torch::optim::Optimizer& optimizer) {
  for (const torch::Tensor& parameter : parameters) {
    parameter.mutable_grad() = (parameter.detach() * 3).cos();
  }
  optimizer.step();
}

// Returns the bytes of a checkpoint's tensors, by file.
std::map<std::string, std::string> TensorFiles(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("model-") && !name.starts_with("optimizer-")) continue;
    std::ifstream stream(entry.path(), std::ios::binary);
    files[name] = std::string(std::istreambuf_iterator<char>(stream), {});
  }
  return files;
}

// A plain optimizer, and a sharded one in each mode, on `group`'s ranks.
std::vector<MakeOptimizer> ShardedOnes(const MakeOptimizer& plain,
                                       const std::shared_ptr<ProcessGroup>& group) {
  std::vector<MakeOptimizer> all = {plain};
  for (const auto shard :
       {ZeroRedundancyOptions::Shard::kEven, ZeroRedundancyOptions::Shard::kWhole}) {
    all.push_back([=](Net& net) -> std::unique_ptr<torch::optim::Optimizer> {
      const auto model = plain(net);
      const auto copy = [plain](std::vector<torch::optim::OptimizerParamGroup> groups) {
        Net other;
        auto made = plain(other);
        made->param_groups().clear();
        for (const auto& added : groups) made->add_param_group(added);
        return made;
      };
      return std::make_unique<ZeroRedundancyOptimizerBase>(copy, model->param_groups(), group,
                                                           ZeroRedundancyOptions{.shard = shard});
    });
  }
  return all;
}

// The files of a sharded optimizer are those of the plain one. They are restored into either, on
// three ranks and on two.
TEST_F(CheckpointerTest, AShardedOptimizerIsSavedAsThePlainOne) {
  int kind = 0;
  for (const MakeOptimizer& plain : {Sgd(), Adam(), AdamW()}) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const std::string root = absl::StrCat(folder_, ".", kind++);
    ddp::testing::RunThreadRanks({.world_size = 3}, [&](std::shared_ptr<ProcessGroup> group) {
      const auto pair = group->new_group({0, 1});
      const auto checkpointer = [&](const std::shared_ptr<ProcessGroup>& of, int number) {
        Checkpointer::Options options;
        options.folder = absl::StrCat(root, ".", number);
        options.rank = of->rank();
        options.world_size = of->size();
        options.generation = of == pair ? 2 : 1;
        options.store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat(of->size()), store);
        return std::make_unique<Checkpointer>(options);
      };
      std::vector<std::map<std::string, std::string>> files;
      const std::vector<MakeOptimizer> saving = ShardedOnes(plain, group);
      for (size_t i = 0; i < saving.size(); ++i) {
        Net net;
        const auto parameters = FillAndList(net);
        const auto optimizer = saving[i](net);
        for (int step = 0; step < 3; ++step) StepOnce(parameters, *optimizer);
        const auto saver = checkpointer(group, static_cast<int>(i));
        TrainingState state{.model = net.get(), .optimizer = optimizer.get(), .step = 3};
        files.push_back(TensorFiles(saver->save(state)));
      }
      EXPECT_FALSE(files[0].empty());
      EXPECT_EQ(files[1], files[0]);
      EXPECT_EQ(files[2], files[0]);
      if (!pair) return;
      std::vector<std::vector<torch::Tensor>> results;
      const std::vector<MakeOptimizer> restoring = ShardedOnes(plain, pair);
      for (size_t i = 0; i < restoring.size(); ++i) {
        Net net;
        const auto optimizer = restoring[i](net);
        TrainingState state{.model = net.get(), .optimizer = optimizer.get()};
        const auto restored = checkpointer(pair, (static_cast<int>(i) + 1) % 3)->restore(state);
        EXPECT_EQ(restored->step, 3);
        StepOnce(net->parameters(), *optimizer);
        if (auto* zero = dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer.get())) zero->wait();
        results.push_back(net->parameters());
      }
      for (size_t i = 1; i < results.size(); ++i) {
        for (size_t p = 0; p < results[0].size(); ++p) {
          EXPECT_TRUE(torch::equal(results[i][p], results[0][p])) << i << " " << p;
        }
      }
    });
  }
}

// Counts the ranks that collect the state of each parameter.
class CountingZero : public ZeroRedundancyOptimizerBase {
 public:
  using Counts = std::vector<std::atomic<int>>;
  CountingZero(const Factory& make, const Groups& groups, std::shared_ptr<ProcessGroup> group,
               Counts* counts)
      : ZeroRedundancyOptimizerBase(make, groups, std::move(group)), counts_(counts) {}
  void FillState(torch::optim::Optimizer& whole, const std::vector<bool>& needed) override {
    ASSERT_EQ(needed.size(), counts_->size());
    for (size_t i = 0; i < needed.size(); ++i) (*counts_)[i] += needed[i] ? 1 : 0;
    ZeroRedundancyOptimizerBase::FillState(whole, needed);
  }

 private:
  Counts* const counts_;
};

TEST_F(CheckpointerTest, ARankCollectsTheStateThatItWrites) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CountingZero::Counts counts(ddp::testing::Net().parameters().size());
  ddp::testing::RunThreadRanks({.world_size = 3}, [&](std::shared_ptr<ProcessGroup> group) {
    ddp::testing::Net net;
    CountingZero zero(ddp::testing::AdamW(), ddp::testing::GroupsOf(net, ddp::testing::AdamW()),
                      group, &counts);
    for (const torch::Tensor& parameter : net.parameters()) {
      parameter.mutable_grad() = torch::ones_like(parameter);
    }
    zero.step();
    Checkpointer::Options options = Options();
    options.rank = group->rank();
    options.world_size = 3;
    options.store = store;
    EXPECT_NE(Checkpointer(options).save({.model = &net, .optimizer = &zero, .step = 1}), "");
  });
  for (const std::atomic<int>& count : counts) EXPECT_EQ(count, 1);
}

// Trains on three ranks, continues on two from a checkpoint, and ends as the plain optimizer that
// has moved likewise. The checkpoint is saved while values of the last step are on their way.
TEST_F(CheckpointerTest, AScatteredAndOverlappedOptimizerMovesAsThePlainOne) {
  using Trained = ddp::testing::Trainer;
  for (const auto& [name, make] : ddp::testing::Optimizers()) {
    if (name != "SGD" && name != "Adam" && name != "AdamW") continue;
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const std::string root = absl::StrCat(folder_, ".", name);
    ddp::testing::RunThreadRanks({.world_size = 3}, [&](std::shared_ptr<ProcessGroup> group) {
      const auto pair = group->new_group({0, 1});
      const auto trainer = [&](const std::shared_ptr<ProcessGroup>& of, bool sharded) {
        return sharded ? Trained::Zero(of, make,
                                       {.scatter_gradients = true,
                                        .overlap_with_forward = true,
                                        .bucket_cap_mb = 0.001})
                       : Trained::Plain(of, make);
      };
      const auto checkpointer = [&](const std::shared_ptr<ProcessGroup>& of, bool sharded) {
        Checkpointer::Options options;
        options.folder = absl::StrCat(root, sharded ? ".sharded" : ".plain");
        options.rank = of->rank();
        options.world_size = of->size();
        options.generation = of == pair ? 2 : 1;
        options.store = c10::make_intrusive<c10d::PrefixStore>(absl::StrCat(of->size()), store);
        return std::make_unique<Checkpointer>(options);
      };
      std::vector<std::map<std::string, std::string>> files;
      for (const bool sharded : {false, true}) {
        Trained three = trainer(group, sharded);
        for (int step = 0; step < 4; ++step) three.Step(step);
        TrainingState state{
            .model = three.net.get(), .optimizer = three.optimizer.get(), .step = 4};
        files.push_back(TensorFiles(checkpointer(group, sharded)->save(state)));
      }
      EXPECT_EQ(files[1], files[0]) << name;
      if (!pair) return;
      std::vector<Trained> moved;
      for (const bool sharded : {false, true}) {
        moved.push_back(trainer(pair, sharded));
        Trained& two = moved.back();
        EXPECT_EQ(two.zero != nullptr && two.zero->scatters_gradients(), sharded);
        TrainingState state{.model = two.net.get(), .optimizer = two.optimizer.get()};
        EXPECT_EQ(checkpointer(pair, sharded)->restore(state)->step, 4);
        two.Steps(4, 8);
      }
      ExpectEqual(moved[0], moved[1], name);
    });
  }
}

TEST_F(CheckpointerTest, RankThatDoesNotComeIsNamed) {
  Checkpointer::Options options = Options();
  options.store = c10::make_intrusive<c10d::HashStore>();
  options.timeout = std::chrono::milliseconds(300);
  Trainer trainer(Sgd());
  RunRanks(3, options, [&](Checkpointer& checkpointer, int rank) {
    if (rank == 1) return;
    try {
      checkpointer.save(trainer.state);
      ADD_FAILURE() << "saved without rank 1";
    } catch (const CheckpointError& error) {
      EXPECT_THAT(error.what(), HasSubstr(rank == 0 ? "for rank 1" : "for rank 0"));
    }
  });
  EXPECT_FALSE(Checkpointer(Options()).has_checkpoint());
}

// The store fails once, in one call of one rank in the first save. No rank waits for that rank, and
// no rank throws. The ranks may disagree on whether the first save has succeeded. The second save,
// of the same state, succeeds on every rank.
TEST_F(CheckpointerTest, OneFaultOfTheStoreFailsOneSaveAtMost) {
  struct Fault {
    int rank;
    std::string call;
    std::string key;  // the end of it: attempt, round, name
  };
  int number = 0;
  for (const Fault& fault : {Fault{1, "set", "/1/0/value/1"}, Fault{1, "multiGet", "/1/0/answer"},
                             Fault{1, "set", "/1/1/value/1"}, Fault{1, "deleteKey", "/value/1"},
                             Fault{1, "multiGet", "/1/1/answer"}, Fault{0, "set", "/1/0/answer"},
                             Fault{0, "deleteKey", "/answer"}, Fault{0, "set", "/1/1/answer"}}) {
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    const std::string folder = absl::StrCat(folder_, ".", number++);
    const Trainer trainer(Sgd());
    std::atomic<int> faults = 0;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; ++rank) {
      ranks.emplace_back([&, rank] {
        Checkpointer::Options options = Options();
        options.folder = folder;
        options.rank = rank;
        options.world_size = 3;
        options.store = c10::make_intrusive<FaultyStore>(
            shared, [&, rank](const std::string& call, const std::string& key) {
              return rank == fault.rank && call == fault.call && absl::EndsWith(key, fault.key) &&
                     ++faults == 1;
            });
        Checkpointer checkpointer(options);
        const std::string saved = absl::StrCat(folder, "/step-000000000000.g0001");
        try {
          EXPECT_THAT(checkpointer.save(trainer.state), ::testing::AnyOf("", saved));
          EXPECT_EQ(checkpointer.save(trainer.state, Checkpointer::Urgency::kLast), saved);
        } catch (const CheckpointError& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
    EXPECT_GE(faults, 1) << fault.call << " of " << fault.key;
    EXPECT_THAT(NamesIn(folder),
                ::testing::UnorderedElementsAre(".owner", "step-000000000000.g0001"));
  }
}

// Two ranks whose store is away for 15 minutes of their clocks. A call to the store then takes 5 s
// and throws. The ranks gather texts without the store.
class OutageTest : public CheckpointerTest {
 protected:
  struct Rank {
    testing::FakeClock clock;
    std::vector<std::string> results;  // of its saves
    absl::Duration longest_save;
    SaveStats stats;
  };
  static constexpr absl::Duration kOutage = absl::Minutes(15);

  // Trains `steps` steps of 1 s on each rank and saves every 25th. The last save is urgent. The
  // store goes away after the 30th.
  void Run(int steps) {
    const auto shared = c10::make_intrusive<c10d::HashStore>();
    InProcessMeeting meeting(2);
    testing::RunThreads(2, [&](int rank) {
      Rank& self = ranks_[rank];
      const absl::Time gone = self.clock.Now() + absl::Seconds(30);
      Checkpointer::Options options = Options();
      options.rank = rank;
      options.world_size = 2;
      options.clock = &self.clock;
      options.store = c10::make_intrusive<FaultyStore>(
          shared, [&self, gone](const std::string&, const std::string&) {
            const bool away = self.clock.Now() >= gone && self.clock.Now() < gone + kOutage;
            if (away) self.clock.Advance(absl::Seconds(5));
            return away;
          });
      options.gather = [&meeting, rank](const std::string& mine) {
        const auto join = [](const std::vector<std::string>& all) {
          return absl::StrJoin(all, "\x1e");
        };
        return std::vector<std::string>(absl::StrSplit(*meeting.Decide(rank, mine, join), '\x1e'));
      };
      Trainer trainer(Sgd());
      Checkpointer checkpointer(options);
      for (trainer.state.step = 1; trainer.state.step <= steps; ++trainer.state.step) {
        self.clock.Advance(absl::Seconds(1));
        if (trainer.state.step % 25 != 0) continue;
        const bool last = trainer.state.step == steps;
        const absl::Time start = self.clock.Now();
        self.results.push_back(checkpointer.save(
            trainer.state, last ? Checkpointer::Urgency::kLast : Checkpointer::Urgency::kRoutine));
        self.longest_save = std::max(self.longest_save, self.clock.Now() - start);
      }
      self.stats = checkpointer.stats();
    });
  }

  std::array<Rank, 2> ranks_;
};

TEST_F(OutageTest, SkipsSavesOnAllRanksTogetherAndSavesAfterwards) {
  Run(/*steps=*/1500);
  for (const Rank& rank : ranks_) {
    EXPECT_EQ(rank.results, ranks_[0].results);
    EXPECT_LE(rank.longest_save, absl::Seconds(10));
    EXPECT_THAT(rank.results.front(), HasSubstr("step-000000000025"));
    EXPECT_THAT(rank.results[1], "");
    EXPECT_THAT(rank.results.back(), HasSubstr("step-000000001500"));
    EXPECT_GE(rank.stats.failed, 3);
    EXPECT_GE(rank.stats.held_back, 10);
    EXPECT_EQ(rank.stats.failed_in_a_row, 0);
    EXPECT_EQ(rank.stats.saved + rank.stats.failed + rank.stats.held_back, 60);
    EXPECT_THAT(rank.stats.last_error, HasSubstr("cannot reach the others through the store"));
  }
}

TEST_F(OutageTest, TheLastSaveNeedsNoStore) {
  Run(/*steps=*/100);
  for (const Rank& rank : ranks_) {
    EXPECT_THAT(rank.results, ElementsAre(HasSubstr("step-000000000025"), "", "",
                                          HasSubstr("step-000000000100")));
  }
  Trainer trainer(Sgd());
  EXPECT_EQ(Checkpointer(Options(2)).restore(trainer.state)->step, 100);
}

TEST_F(CheckpointerTest, OptionsForASessionOutsideOfALauncher) {
  for (const char* name : {"RANK", "WORLD_SIZE", "DDP_STORE", "DDP_HEALTH_FD"}) unsetenv(name);
  const Checkpointer::Options options =
      Checkpointer::options_for(WorkerSession::from_environment(), nullptr, folder_);
  EXPECT_EQ(options.world_size, 1);
  Trainer trainer(Sgd());
  EXPECT_EQ(Checkpointer(options).save(trainer.state), folder_ + "/step-000000000000.g0000");
}

}  // namespace
}  // namespace ddp::elastic
