// The state of a ZeroRedundancyOptimizer: its shares, its collection and its loading, compared with
// LibTorch's plain optimizers. The ranks are threads on a fake backend.
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <malloc.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/optim/shard_state.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/optim/zero_trainer.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/thread_ranks.h"
#include "testing/distributed_checks.h"

namespace ddp {
namespace {

using ::ddp::testing::AdamW;
using ::ddp::testing::ExpectEqual;
using ::ddp::testing::Factory;
using ::ddp::testing::Groups;
using ::ddp::testing::Modes;
using ::ddp::testing::Optimizers;
using ::ddp::testing::Shard;
using ::ddp::testing::Trainer;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

// The numbers of PyTorch's test_state_dict.
THREAD_RANK_TEST(ZeroStateTest, AStateHasOptionsAndMomentum, 1, 2) {
  using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;
  const at::Tensor x = torch::ones({1}).requires_grad_();
  const auto momentum = [&](const Zero& zero) {
    double sum = 0;
    for (const auto& [key, state] : zero.local_optimizer().state()) {
      const auto& own = static_cast<const torch::optim::SGDParamState&>(*state);
      sum += own.momentum_buffer().item<double>();
    }
    at::Tensor all = torch::full({1}, sum);
    group->all_reduce(all);
    return all.item<double>();
  };
  Zero first(std::vector<at::Tensor>{x}, torch::optim::SGDOptions(0.1).momentum(0.9), group);
  x.sum().backward();
  first.step();
  EXPECT_FLOAT_EQ(x.item<float>(), 0.9F);
  EXPECT_FLOAT_EQ(momentum(first), 1);
  first.zero_grad();
  EXPECT_FALSE(x.grad().defined());
  first.consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
  std::stringstream archive;
  torch::save(first, archive);

  Zero second(std::vector<at::Tensor>{x}, torch::optim::SGDOptions(0.01), group);
  torch::load(second, archive);
  const auto& options =
      static_cast<const torch::optim::SGDOptions&>(second.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.1);
  EXPECT_EQ(options.momentum(), 0.9);
  EXPECT_FLOAT_EQ(momentum(second), 1);
  x.sum().backward();
  second.step();
  EXPECT_FLOAT_EQ(x.item<float>(), 0.71F);
  EXPECT_FLOAT_EQ(momentum(second), 1.9);
}

// PyTorch's test_local_optimizer_parity: a parameter is frozen and trained in turn, and each
// optimizer loads the other's state.
THREAD_RANK_TEST(ZeroStateTest, StatesAreExchangedWithThePlainOptimizer, 2) {
  for (const auto& [name, make] : Optimizers()) {
    for (const auto& [mode, options] : Modes(true)) {
      Trainer plain = Trainer::Plain(group, make);
      Trainer zero = Trainer::Zero(group, make, options);
      for (int step = 0; step < 6; ++step) {
        for (Trainer* const trainer : {&plain, &zero}) {
          trainer->Steps(step, step + 1);
          if (step > 2) trainer->net->image.requires_grad_(step % 2 == 0);
        }
        ExpectEqual(plain, zero, name + " " + mode);
      }
      std::stringstream of_zero;
      std::stringstream of_plain;
      zero.zero->consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
      torch::save(*zero.optimizer, of_zero);
      torch::save(*plain.optimizer, of_plain);
      torch::load(*plain.optimizer, of_zero, group->device());
      torch::load(*zero.optimizer, of_plain, group->device());
      plain.Steps(6, 8);
      zero.Steps(6, 8);
      ExpectEqual(plain, zero, name + " " + mode + " exchanged");
    }
  }
}

// Returns the elements of an AdamW's states.
int64_t StateElements(const torch::optim::Optimizer& optimizer) {
  int64_t elements = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*state);
    elements += moments.exp_avg().numel() + moments.exp_avg_sq().numel();
  }
  return elements;
}

THREAD_RANK_TEST(ZeroStateTest, EachRankHoldsItsShareOfTheState, 2, 3) {
  const int64_t ranks = group->size();
  for (const Shard shard : {Shard::kEven, Shard::kWhole}) {
    const int64_t size = 3 * ranks;
    std::vector<at::Tensor> parameters;
    for (int64_t i = 0; i < ranks; ++i)
      parameters.push_back(torch::ones({size, 4}).requires_grad_());
    ZeroRedundancyOptimizer<torch::optim::AdamW> zero(parameters, torch::optim::AdamWOptions(0.1),
                                                      group, {.shard = shard});
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = torch::ones({size, 4});
    zero.step();
    EXPECT_EQ(StateElements(zero.local_optimizer()) * ranks, 2 * ranks * size * 4);
    for (const at::Tensor& parameter : parameters) EXPECT_LT(parameter.max().item<float>(), 1);
  }
}

// A state from before a change of the options that makes new states impossible.
THREAD_RANK_TEST(ZeroStateTest, StatesOutliveTheOptionsThatMadeThem, 2) {
  const Factory make = [](Groups groups) {
    return std::make_unique<torch::optim::SGD>(groups,
                                               torch::optim::SGDOptions(0.01).momentum(0.9));
  };
  const auto set_momentum = [](Trainer& trainer, double momentum) {
    for (auto& each : trainer.optimizer->param_groups()) {
      static_cast<torch::optim::SGDOptions&>(each.options()).momentum(momentum);
    }
  };
  const auto train = [&](Trainer trainer) {
    trainer.Steps(0, 3);
    set_momentum(trainer, 0);
    trainer.Steps(3, 4);
    if (trainer.zero != nullptr) trainer.zero->consolidate_state_dict(-1);
    std::stringstream archive;
    torch::save(*trainer.optimizer, archive);
    torch::load(*trainer.optimizer, archive, group->device());
    set_momentum(trainer, 0.9);
    trainer.Steps(4, 6);
    return trainer;
  };
  const Trainer plain = train(Trainer::Plain(group, make));
  for (const auto& [mode, options] : Modes(true)) {
    ExpectEqual(plain, train(Trainer::Zero(group, make, options)), mode);
  }
}

// Returns the values of a state by their names in its serialization.
std::map<std::string, c10::IValue> ValuesOf(const torch::optim::OptimizerParamState& state) {
  torch::serialize::OutputArchive out;
  state.serialize(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  std::map<std::string, c10::IValue> values;
  for (const std::string& key : in.keys()) in.read(key, values[key]);
  return values;
}

// Expects the types and sizes of `expected`. Its values too where the state is `filled`; else no
// tensor has the memory of more than one element.
void ExpectSameState(const torch::optim::OptimizerParamState& state,
                     const torch::optim::OptimizerParamState& expected, bool filled,
                     const std::string& about) {
  const auto mine = ValuesOf(state);
  const auto others = ValuesOf(expected);
  ASSERT_EQ(mine.size(), others.size()) << about;
  for (const auto& [name, value] : mine) {
    const c10::IValue& other = others.at(name);
    ASSERT_EQ(value.isTensor(), other.isTensor()) << about << " " << name;
    if (!value.isTensor()) {
      EXPECT_EQ(value, other) << about << " " << name;
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    ASSERT_EQ(tensor.sizes(), other.toTensor().sizes()) << about << " " << name;
    EXPECT_EQ(tensor.scalar_type(), other.toTensor().scalar_type()) << about << " " << name;
    if (filled) {
      EXPECT_TRUE(at::equal(tensor, other.toTensor())) << about << " " << name;
    } else {
      EXPECT_LE(tensor.storage().nbytes(), tensor.element_size()) << about << " " << name;
    }
  }
}

// Keeps the largest number of bytes in use at a time, as seen when a tensor gets memory.
class PeakOfMemory : public c10::Allocator {
 public:
  PeakOfMemory() { c10::SetCPUAllocator(this, 1); }
  ~PeakOfMemory() override { c10::SetCPUAllocator(plain_, 1); }

  static int64_t InUse() {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  }
  int64_t peak() const { return peak_; }

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = plain_->allocate(bytes);
    peak_ = std::max(peak_, InUse());
    return data;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  c10::Allocator* const plain_ = c10::GetCPUAllocator();
  int64_t peak_ = 0;
};

TEST(ZeroStateTest, AStateIsPutTogetherInTwiceItsMemory) {
  constexpr int64_t kPart = 200'000;
  constexpr int kParameters = 10;
  const auto make = [](Groups groups) {
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < kParameters; ++i) parameters.push_back(torch::zeros({3 * kPart}));
  const auto whole = make({OptimizerParamGroup(parameters)});
  const int64_t before = PeakOfMemory::InUse();
  std::vector<std::string> texts;
  for (int rank = 0; rank < 3; ++rank) {
    std::vector<torch::optim::SGDParamState> states(kParameters);
    std::vector<internal::StatePart> parts;
    for (int i = 0; i < kParameters; ++i) {
      states[i].momentum_buffer(torch::full({kPart}, rank, at::kFloat));
      parts.push_back(
          {.parameter = i, .begin = rank * kPart, .end = (rank + 1) * kPart, .state = &states[i]});
    }
    texts.push_back(internal::StateBytes(parts));
    texts.back().shrink_to_fit();  // as CollectTexts() returns it
  }
  const PeakOfMemory memory;
  internal::AssembleState(std::move(texts), make, nullptr, *whole);
  const auto& state = static_cast<const torch::optim::SGDParamState&>(
      *whole->state().at(parameters[4].unsafeGetTensorImpl()));
  EXPECT_EQ(state.momentum_buffer()[2 * kPart].item<float>(), 2);
  EXPECT_LE(memory.peak() - before, 2 * int64_t{4} * 3 * kPart * kParameters);
}

// Returns the bytes of memory of an optimizer's SGD states. Elements may share one place.
int64_t MomentumBytes(const torch::optim::Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& own = static_cast<const torch::optim::SGDParamState&>(*state);
    bytes += static_cast<int64_t>(own.momentum_buffer().storage().nbytes());
  }
  return bytes;
}

// A rank that needs two of ten states holds these, and about four times one batch.
TEST(ZeroStateTest, AShareOfAStateIsFilledInBatches) {
  constexpr int64_t kSize = 600'000;
  constexpr int64_t kBytes = 4 * kSize;
  constexpr int kParameters = 10;
  const auto make = [](Groups groups) {
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  ProcessGroup group(c10::make_intrusive<c10d::HashStore>(), {});
  std::vector<at::Tensor> parameters;
  std::vector<torch::optim::SGDParamState> states(kParameters);
  std::vector<internal::StatePart> parts;
  for (int i = 0; i < kParameters; ++i) {
    parameters.push_back(torch::zeros({kSize}));
    states[i].momentum_buffer(torch::full({kSize}, i, at::kFloat));
    parts.push_back({.parameter = i, .begin = 0, .end = kSize, .state = &states[i]});
  }
  const auto whole = make({OptimizerParamGroup(parameters)});
  const int64_t before = PeakOfMemory::InUse();
  const PeakOfMemory memory;
  constexpr auto kForms = internal::StateContent::kForms;
  internal::AssembleState({internal::StateBytes(parts, kForms)}, make, nullptr, *whole, kForms);
  EXPECT_EQ(MomentumBytes(*whole), kParameters * 4);
  std::vector<bool> needed(kParameters);
  needed[3] = needed[7] = true;
  const int64_t held =
      internal::FillStates(group, parts, needed, *whole, {.batch_bytes = kBytes + 1});
  EXPECT_GE(held, kBytes);
  EXPECT_LT(held, kBytes + kBytes / 10);
  EXPECT_EQ(MomentumBytes(*whole), 2 * kBytes + (kParameters - 2) * 4);
  EXPECT_LT(memory.peak() - before, (2 + 4) * kBytes + kBytes / 2);
  for (const int i : {3, 7}) {
    const auto& state = static_cast<const torch::optim::SGDParamState&>(
        *whole->state().at(parameters[i].unsafeGetTensorImpl()));
    EXPECT_TRUE(at::equal(state.momentum_buffer(), states[i].momentum_buffer()));
  }
}

// Ranks need different states, and some of them the same one.
THREAD_RANK_TEST(ZeroStateTest, EachRankGetsTheStatesThatItNeeds, 1, 2, 3) {
  for (const auto& [name, make] : Optimizers()) {
    for (const auto& [mode, options] : Modes(group->size() > 1)) {
      Trainer zero = Trainer::Zero(group, make, options);
      zero.Steps(0, 3);
      const auto described = zero.zero->DescribeState();
      const size_t count = zero.net->parameters().size();
      std::vector<bool> needed(count);
      for (size_t i = 0; i < count; ++i) {
        needed[i] = i % 3 == 0 || static_cast<int>(i) % group->size() == group->rank();
      }
      zero.zero->FillState(*described, needed);
      zero.zero->consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
      std::stringstream archive;
      torch::save(*zero.optimizer, archive);
      const auto whole = zero.zero->EmptyOptimizer();
      torch::load(*whole, archive);
      ASSERT_EQ(described->state().size(), whole->state().size());
      size_t number = 0;
      for (const OptimizerParamGroup& params : whole->param_groups()) {
        for (const at::Tensor& parameter : params.params()) {
          const void* const key = parameter.unsafeGetTensorImpl();
          const auto expected = whole->state().find(const_cast<void*>(key));
          const bool filled = needed[number++];
          if (expected == whole->state().end()) continue;
          ExpectSameState(*described->state().at(const_cast<void*>(key)), *expected->second, filled,
                          absl::StrCat(name, " ", mode, " parameter ", number - 1));
        }
      }
    }
  }
}

// Saves in one mode and loads in another, on another number of ranks, and by the plain optimizer.
THREAD_RANK_TEST(ZeroStateTest, StatesMoveBetweenModesAndWorldSizes, 3) {
  for (const auto& [name, make] : Optimizers()) {
    Trainer zero = Trainer::Zero(group, make, {.bucket_cap_mb = 0.001});
    zero.Steps(0, 3);
    zero.zero->param_groups()[0].options().set_lr(0.03);
    zero.zero->consolidate_state_dict(ZeroRedundancyOptimizerBase::kAllRanks);
    std::stringstream archive;
    torch::save(*zero.optimizer, archive);
    const auto pair = group->new_group({0, 1});
    if (!pair) continue;
    Trainer plain = Trainer::Plain(pair, make);
    Trainer whole = Trainer::Zero(pair, make, {.shard = Shard::kWhole});
    Trainer even = Trainer::Zero(pair, make, {.scatter_gradients = true, .bucket_cap_mb = 0.01});
    for (Trainer* const trainer : {&plain, &whole, &even}) {
      const at::NoGradGuard no_grad;
      for (const auto& item : trainer->net->named_parameters()) {
        item.value().copy_(zero.net->named_parameters()[item.key()]);
      }
      std::stringstream copy(archive.str());
      torch::load(*trainer->optimizer, copy, group->device());
      EXPECT_EQ(trainer->optimizer->param_groups()[0].options().get_lr(), 0.03);
    }
    for (Trainer* const trainer : {&plain, &whole, &even}) trainer->Steps(3, 6);
    ExpectEqual(plain, whole, name + " whole");
    ExpectEqual(plain, even, name + " even");
  }
}

THREAD_RANK_TEST(ZeroStateTest, TheStateIsOnTheRankThatWasAskedFor, 3) {
  Trainer zero = Trainer::Zero(group, AdamW(), {});
  zero.Steps(0, 2);
  std::stringstream archive;
  const auto save = [&] { torch::save(*zero.optimizer, archive); };
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>(save), HasSubstr("consolidate_state_dict(to)"));
  zero.zero->consolidate_state_dict(1);
  if (group->rank() == 1) {
    save();
  } else {
    EXPECT_THAT(testing::ErrorOf<ConfigurationError>(save), HasSubstr("has not the whole state"));
  }
  zero.Steps(2, 3);  // the collected state is now old
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>(save), HasSubstr("after the last step()"));
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>(
                  [&] { zero.zero->consolidate_state_dict(group->rank() == 2 ? 0 : 1); }),
              HasSubstr("different arguments of consolidate_state_dict()"));
  EXPECT_THAT(testing::ErrorOf<ConfigurationError>([&] { zero.zero->consolidate_state_dict(3); }),
              HasSubstr("ranks 0 to 2"));
  EXPECT_FALSE(group->failed());
}

}  // namespace
}  // namespace ddp
