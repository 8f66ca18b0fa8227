#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include "ddp/common/error.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"
#include "testing/ranks/rank_test.h"
#include "train/optim/elementwise.h"
#include "train/optim/fused_adam.h"
#include "train/optim/layerwise.h"

namespace ddp::train {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Tensors = std::vector<torch::Tensor>;
using Shard = ZeroRedundancyOptions::Shard;

std::string ErrorOf(const std::function<void()>& action) {
  return ddp::testing::ErrorOf<ConfigurationError>(action);
}

// Parameters of several forms, the same in every call.
Tensors Parameters(torch::TensorOptions options = {}) {
  return {torch::linspace(-1, 1, 35, options).view({5, 7}), torch::linspace(0, 2, 3, options),
          torch::linspace(-2, 1, 24, options).view({2, 3, 2, 2})};
}

void SetGradients(Tensors& parameters, int step) {
  for (torch::Tensor& parameter : parameters) {
    parameter.mutable_grad() = (parameter * (step + 1)).cos();
  }
}

void Train(torch::optim::Optimizer& optimizer, Tensors& parameters, int from, int to) {
  for (int step = from; step < to; ++step) {
    SetGradients(parameters, step);
    optimizer.step();
  }
}

void ExpectClose(const Tensors& ours, const Tensors& theirs, double bound = 1e-6) {
  for (size_t i = 0; i < ours.size(); ++i) {
    const double difference = (ours[i] - theirs[i]).abs().max().item<double>();
    EXPECT_LE(difference, bound * theirs[i].abs().max().item<double>()) << i;
  }
}

std::string Saved(const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::ostringstream file;
  archive.save_to(file);
  return file.str();
}

void Load(const std::string& bytes, torch::optim::Optimizer& optimizer) {
  std::istringstream file(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(file);
  optimizer.load(archive);
}

template <typename Fused, typename Plain, typename Options>
void ExpectAsLibTorch(Options options) {
  Tensors ours = Parameters();
  Tensors theirs = Parameters();
  Fused fused(ours, options);
  Plain plain(theirs, options);
  Train(fused, ours, 0, 20);
  Train(plain, theirs, 0, 20);
  ExpectClose(ours, theirs);
  // Each goes on from the state of the other.
  const std::string of_fused = Saved(fused);
  Load(Saved(plain), fused);
  Load(of_fused, plain);
  Train(fused, ours, 20, 30);
  Train(plain, theirs, 20, 30);
  ExpectClose(ours, theirs);
}

TEST(FusedAdamTest, ValuesAndStatesAreLibTorchs) {
  ExpectAsLibTorch<FusedAdam, torch::optim::Adam>(torch::optim::AdamOptions(0.01));
  ExpectAsLibTorch<FusedAdam, torch::optim::Adam>(
      torch::optim::AdamOptions(0.01).weight_decay(0.1).amsgrad(true));
  ExpectAsLibTorch<FusedAdamW, torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
  ExpectAsLibTorch<FusedAdamW, torch::optim::AdamW>(
      torch::optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true).eps(1e-3));
}

// The kernel goes through memory, so strides must agree.
TEST(FusedAdamTest, AnyStridesWork) {
  const auto permuted = [](const torch::Tensor& t) { return t.clone().permute({1, 0}); };
  const torch::Tensor start = torch::linspace(-1, 1, 12).view({3, 4});
  Tensors ours = {permuted(start), torch::linspace(0, 1, 12).view({4, 3})};
  Tensors theirs = {permuted(start), torch::linspace(0, 1, 12).view({4, 3})};
  FusedAdamW fused(ours, torch::optim::AdamWOptions(0.1));
  torch::optim::AdamW plain(theirs, torch::optim::AdamWOptions(0.1));
  for (int step = 0; step < 5; ++step) {
    for (Tensors* tensors : {&ours, &theirs}) {
      (*tensors)[0].mutable_grad() = (*tensors)[0].contiguous().sin();
      (*tensors)[1].mutable_grad() = (*tensors)[1].t().contiguous().t().cos();
    }
    fused.step();
    plain.step();
  }
  ExpectClose(ours, theirs);
}

TEST(FusedAdamTest, TypesAndStepsMayDiffer) {
  Tensors ours = {torch::ones({9}, torch::kFloat64), torch::ones({9}), torch::ones({9})};
  Tensors theirs = {torch::ones({9}, torch::kFloat64), torch::ones({9}), torch::ones({9})};
  FusedAdam fused(ours, torch::optim::AdamOptions(0.1));
  torch::optim::Adam plain(theirs, torch::optim::AdamOptions(0.1));
  for (int step = 0; step < 4; ++step) {
    for (Tensors* tensors : {&ours, &theirs}) {
      SetGradients(*tensors, step);
      if (step % 2 == 1) (*tensors)[2].mutable_grad().reset();
    }
    fused.step();
    plain.step();
  }
  ExpectClose(ours, theirs);
}

TEST(FusedAdamTest, ParametersWithGapsTakeLibTorchsWay) {
  Tensors ours = {torch::ones({4, 4}).narrow(1, 0, 2)};
  Tensors theirs = {torch::ones({4, 4}).narrow(1, 0, 2)};
  FusedAdam fused(ours, torch::optim::AdamOptions(0.1));
  torch::optim::Adam plain(theirs, torch::optim::AdamOptions(0.1));
  Train(fused, ours, 0, 3);
  Train(plain, theirs, 0, 3);
  EXPECT_TRUE(torch::equal(ours[0], theirs[0]));
}

TEST(FusedAdamTest, AClosureIsCalledOnce) {
  Tensors parameters = Parameters();
  FusedAdam optimizer(parameters);
  int calls = 0;
  const torch::Tensor loss = optimizer.step([&] {
    ++calls;
    SetGradients(parameters, 0);
    return torch::ones({}) * 3;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(loss.item<float>(), 3);
}

TEST(OptimizersTest, ComplexParametersArePairs) {
  const torch::Tensor real = torch::linspace(-1, 1, 8).view({4, 2});
  Tensors pairs = {real.clone()};
  Tensors complex = {torch::view_as_complex(real.clone())};
  NAdam of_pairs(pairs, NAdamOptions(0.1));
  NAdam of_complex(complex, NAdamOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    SetGradients(pairs, step);
    complex[0].mutable_grad() = torch::view_as_complex(pairs[0].grad().clone());
    of_pairs.step();
    of_complex.step();
  }
  EXPECT_TRUE(torch::equal(torch::view_as_real(complex[0]), pairs[0]));
}

TEST(OptimizersTest, StatesHavePyTorchsNames) {
  const auto names_of = [](auto optimizer) {
    torch::serialize::OutputArchive out;
    optimizer.state().begin()->second->serialize(out);
    std::stringstream file;
    out.save_to(file);
    torch::serialize::InputArchive in;
    in.load_from(file);
    return in.keys();
  };
  Tensors matrix = {torch::ones({3, 2})};
  SetGradients(matrix, 0);
  const auto stepped = [&](auto optimizer) {
    optimizer.step();
    return optimizer;
  };
  EXPECT_THAT(names_of(stepped(NAdam(matrix))),
              UnorderedElementsAre("step", "mu_product", "exp_avg", "exp_avg_sq"));
  EXPECT_THAT(names_of(stepped(Adafactor(matrix))),
              UnorderedElementsAre("step", "row_var", "col_var"));
  EXPECT_THAT(names_of(stepped(Muon(matrix))), UnorderedElementsAre("momentum_buffer"));
}

TEST(OptimizersTest, MistakesAreNamed) {
  Tensors parameters = Parameters();
  const std::vector<std::pair<std::string, std::function<void()>>> cases = {
      {"NAdam: lr is -1.0", [&] { NAdam(parameters, NAdamOptions(-1)); }},
      {"NAdam: momentum_decay", [&] { NAdam(parameters, NAdamOptions().momentum_decay(-1)); }},
      {"RAdam: a beta is 1.0",
       [&] {
         RAdam(parameters, RAdamOptions().betas({0.9, 1}));
       }},
      {"Adamax: eps is -1.0", [&] { Adamax(parameters, AdamaxOptions().eps(-1)); }},
      {"Adadelta: rho is 2.0", [&] { Adadelta(parameters, AdadeltaOptions().rho(2)); }},
      {"Adafactor: d must be", [&] { Adafactor(parameters, AdafactorOptions().d(0.5)); }},
      {"Adafactor: beta2_decay", [&] { Adafactor(parameters, AdafactorOptions().beta2_decay(1)); }},
      {"Muon: ns_steps", [&] { Muon(parameters, MuonOptions().ns_steps(100)); }},
      {"Muon: adjust_lr_fn is \"x\"", [&] { Muon(parameters, MuonOptions().adjust_lr_fn("x")); }},
      {"Muon: a parameter has 4 dimensions",
       [&] {
         Tensors conv = {parameters[2]};
         SetGradients(conv, 0);
         Muon(conv).step();
       }},
      {"LAMB: weight_decay is -1.0", [&] { LAMB(parameters, LAMBOptions().weight_decay(-1)); }},
      {"LARS: nesterov needs", [&] { LARS(parameters, LARSOptions().momentum(0).nesterov(true)); }},
      {"LARS: a parameter is complex",
       [&] {
         Tensors complex = {torch::ones({2}, torch::kComplexFloat)};
         complex[0].mutable_grad() = torch::ones({2}, torch::kComplexFloat);
         LARS(complex).step();
       }},
      {"SparseAdam: a gradient is dense",
       [&] {
         Tensors table = {torch::ones({2, 2})};
         SetGradients(table, 0);
         SparseAdam(table).step();
       }},
      {"RAdam: a gradient is sparse",
       [&] {
         Tensors table = {torch::ones({2, 2})};
         table[0].mutable_grad() = torch::ones({2, 2}).to_sparse();
         RAdam(table).step();
       }},
  };
  for (const auto& [text, action] : cases) {
    const std::string error = ErrorOf(action);
    EXPECT_THAT(error, HasSubstr(text));
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
  }
}

// Both update the same parameters by the same gradients; the sharded one in two ranks, with a
// restart between from the state that both ranks have put together.
template <typename Plain, typename Options>
void ExpectSharded(const std::shared_ptr<ProcessGroup>& group, Shard shard, Options options) {
  Tensors ours, theirs;
  for (Tensors* tensors : {&ours, &theirs}) {
    for (const torch::Tensor& parameter : Parameters(group->device())) {
      if (std::is_same_v<Plain, Muon> && parameter.dim() != 2) continue;
      tensors->push_back(parameter.clone());
    }
  }
  using Sharded = ZeroRedundancyOptimizer<Plain>;
  auto sharded =
      std::make_unique<Sharded>(ours, options, group, ZeroRedundancyOptions{.shard = shard});
  Plain plain(theirs, options);
  Train(*sharded, ours, 0, 5);
  Train(plain, theirs, 0, 5);
  sharded->consolidate_state_dict(Sharded::kAllRanks);
  const std::string state = Saved(*sharded);
  sharded = std::make_unique<Sharded>(ours, options, group, ZeroRedundancyOptions{.shard = shard});
  Load(state, *sharded);
  Train(*sharded, ours, 5, 10);
  Train(plain, theirs, 5, 10);
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(torch::allclose(ours[i], theirs[i])) << i;
}

RANK_TEST(OptimizersTest, ZeroCutsElementwiseOnesAnywhere, 2) {
  const auto group = init_process_group();
  ExpectSharded<FusedAdam>(group, Shard::kEven, torch::optim::AdamOptions(0.01));
  ExpectSharded<FusedAdamW>(group, Shard::kEven, torch::optim::AdamWOptions(0.01).amsgrad(true));
  ExpectSharded<NAdam>(group, Shard::kEven, NAdamOptions(0.01));
  ExpectSharded<RAdam>(group, Shard::kEven, RAdamOptions(0.01));
  ExpectSharded<Adamax>(group, Shard::kEven, AdamaxOptions(0.01));
  ExpectSharded<Adadelta>(group, Shard::kEven, AdadeltaOptions(0.1));
}

RANK_TEST(OptimizersTest, ZeroGivesWholeParametersToLayerwiseOnes, 2) {
  const auto group = init_process_group();
  ExpectSharded<Adafactor>(group, Shard::kWhole, AdafactorOptions(0.1));
  ExpectSharded<LAMB>(group, Shard::kWhole, LAMBOptions(0.01).weight_decay(0.1));
  ExpectSharded<LARS>(group, Shard::kWhole, LARSOptions(1));
  ExpectSharded<Muon>(group, Shard::kWhole, MuonOptions(0.01));
}

}  // namespace
}  // namespace ddp::train
