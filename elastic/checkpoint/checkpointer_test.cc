// Tests Checkpointer with real models, optimizers and files: what a checkpoint holds, and what
// comes back. The tests in save_load/ cover faults of the disk and between ranks.
#include "elastic/checkpoint/checkpointer.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "absl/strings/str_cat.h"
#include "elastic/checkpoint/checkpointer_fixture.h"
#include "elastic/data/elastic_sampler.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

using CheckpointerTest = CheckpointerFixture;

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

TEST_F(CheckpointerTest, TheLastOnesAndTheBestStay) {
  Trainer trainer(Sgd());
  Checkpointer::Options options = Options();
  options.retention = {.keep_last = 2, .keep_best = 1};
  Checkpointer checkpointer(options);
  // The loss of step 2 is the lowest. That of step 3 is not a number.
  for (const double loss : {0.5, 0.1, std::nan(""), 0.3, 0.4}) {
    trainer.Train(1);
    trainer.state.metric = loss;
    checkpointer.save(trainer.state);
  }
  EXPECT_THAT(NamesIn(folder_), ::testing::UnorderedElementsAre(".owner", "step-000000000002.g0001",
                                                                "step-000000000004.g0001",
                                                                "step-000000000005.g0001"));
  EXPECT_EQ(checkpointer.restore(trainer.state)->step, 5);
  options.retention.keep_last = 0;
  EXPECT_THROW(Checkpointer{options}, CheckpointError);
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

}  // namespace
}  // namespace ddp::elastic
