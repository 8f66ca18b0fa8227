// A small model, its optimizers and a training loop, for the tests of ZeroRedundancyOptimizer.
#ifndef DDP_OPTIM_ZERO_TRAINER_H_
#define DDP_OPTIM_ZERO_TRAINER_H_

#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/process_group.h"
#include "gtest/gtest.h"

namespace ddp::testing {

using Groups = ZeroRedundancyOptimizerBase::Groups;
using Factory = ZeroRedundancyOptimizerBase::Factory;
using Shard = ZeroRedundancyOptions::Shard;
using torch::optim::OptimizerParamGroup;

// Sizes that no number of ranks divides, a parameter without a gradient, a frozen one, one in
// channels_last and one with gaps in its memory.
struct Net : torch::nn::Module {
  Net() {
    int64_t seed = 0;
    const auto add = [&](const std::string& name, at::IntArrayRef shape, bool trained = true) {
      const at::Tensor value = at::arange(Product(shape), at::kFloat).add_(++seed).sin_();
      return register_parameter(name, value.view(shape).clone(), trained);
    };
    first = add("first", {33, 17});
    scale = add("scale", {});
    frozen = add("frozen", {5}, false);
    image = register_parameter("image", at::arange(72, at::kFloat)
                                            .sin_()
                                            .view({2, 3, 3, 4})
                                            .contiguous(at::MemoryFormat::ChannelsLast));
    gaps = register_parameter("gaps", at::arange(20, at::kFloat).cos_().view({10, 2}).select(1, 0));
    second = add("second", {7, 33});
    unused = add("unused", {11});
  }

  at::Tensor forward(const at::Tensor& inputs) {
    const at::Tensor hidden = at::tanh(at::matmul(inputs, first.t())) * scale;
    const at::Tensor outputs = at::matmul(hidden, second.t());
    return outputs.sum() * frozen.sum() + outputs.square().mean() + (image * image).sum() * 0.1 +
           (gaps * gaps.sin()).sum();
  }

  static int64_t Product(at::IntArrayRef shape) {
    int64_t product = 1;
    for (const int64_t size : shape) product *= size;
    return product;
  }

  at::Tensor first, scale, frozen, image, gaps, second, unused;
};

// The inputs of one rank in one step.
inline at::Tensor Inputs(int rank, int step) {
  return at::arange(4 * 17, at::kFloat).mul_(0.37 * (step + 1)).add_(rank).sin_().view({4, 17});
}

inline std::vector<std::pair<std::string, Factory>> Optimizers() {
  namespace optim = torch::optim;
  const auto of = []<typename Optimizer, typename Defaults>(std::type_identity<Optimizer>,
                                                            Defaults defaults) -> Factory {
    return [defaults](Groups groups) { return std::make_unique<Optimizer>(groups, defaults); };
  };
  return {
      {"SGD", of(std::type_identity<optim::SGD>(),
                 optim::SGDOptions(0.01).momentum(0.9).nesterov(true).weight_decay(0.01))},
      {"Adam", of(std::type_identity<optim::Adam>(), optim::AdamOptions(0.01).amsgrad(true))},
      {"AdamW", of(std::type_identity<optim::AdamW>(), optim::AdamWOptions(0.01))},
      {"RMSprop", of(std::type_identity<optim::RMSprop>(),
                     optim::RMSpropOptions(0.01).momentum(0.5).centered(true))},
      {"Adagrad", of(std::type_identity<optim::Adagrad>(), optim::AdagradOptions(0.01))},
  };
}

inline Factory AdamW() { return Optimizers()[2].second; }

// Two groups with options of their own.
inline Groups GroupsOf(const Net& net, const Factory& make) {
  Groups one;
  one.emplace_back(std::vector<at::Tensor>{});
  const auto defaults = make(std::move(one));
  Groups groups;
  groups.emplace_back(std::vector<at::Tensor>{net.first, net.scale, net.frozen, net.gaps},
                      defaults->defaults().clone());
  groups.emplace_back(std::vector<at::Tensor>{net.image, net.second, net.unused},
                      defaults->defaults().clone());
  groups[1].options().set_lr(0.02);
  return groups;
}

// A model with its optimizer.
struct Trainer {
  using ModelOptions = DistributedDataParallelOptions;

  explicit Trainer(const std::shared_ptr<ProcessGroup>& group,
                   const ModelOptions& options = {.find_unused_parameters = true})
      : group(group), model(net, group, options) {}

  static Trainer Plain(const std::shared_ptr<ProcessGroup>& group, const Factory& make,
                       const ModelOptions& model_options = {.find_unused_parameters = true}) {
    Trainer trainer(group, model_options);
    trainer.optimizer = make(GroupsOf(*trainer.net, make));
    return trainer;
  }
  static Trainer Zero(const std::shared_ptr<ProcessGroup>& group, const Factory& make,
                      const ZeroRedundancyOptions& options,
                      const ModelOptions& model_options = {.find_unused_parameters = true}) {
    Trainer trainer(group, model_options);
    auto zero = std::make_unique<ZeroRedundancyOptimizerBase>(make, GroupsOf(*trainer.net, make),
                                                              trainer.model, options);
    trainer.zero = zero.get();
    trainer.optimizer = std::move(zero);
    return trainer;
  }

  void Step(int step) {
    optimizer->zero_grad();
    model.forward(Inputs(group->rank(), step)).backward();
    optimizer->step();
  }
  void Steps(int begin, int end) {
    for (int step = begin; step < end; ++step) Step(step);
    if (zero != nullptr) zero->wait();
  }

  std::shared_ptr<ProcessGroup> group;
  std::shared_ptr<Net> net = std::make_shared<Net>();
  DistributedDataParallel<Net> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  ZeroRedundancyOptimizerBase* zero = nullptr;
};

// An optimizer whose state cannot be saved when `broken`.
class Unsaved : public torch::optim::SGD {
 public:
  struct State : torch::optim::OptimizerCloneableParamState<State> {
    bool broken = false;
    void serialize(torch::serialize::OutputArchive&) const override {
      if (broken) throw std::runtime_error("the state is lost");
    }
  };
  Unsaved(Groups groups, bool broken)
      : SGD(groups, torch::optim::SGDOptions(0.1)), broken_(broken) {}
  at::Tensor step(LossClosure) override {
    for (const auto& group : param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        auto state = std::make_unique<State>();
        state->broken = broken_;
        this->state()[parameter.unsafeGetTensorImpl()] = std::move(state);
      }
    }
    return {};
  }

 private:
  const bool broken_;
};

inline void ExpectEqual(const Trainer& a, const Trainer& b, const std::string& about) {
  const auto mine = a.net->named_parameters();
  const auto others = b.net->named_parameters();
  for (const auto& item : mine) {
    EXPECT_TRUE(at::equal(item.value(), others[item.key()]))
        << about << ": " << item.key() << " differs by "
        << (item.value() - others[item.key()]).abs().max().item<double>();
  }
}

}  // namespace ddp::testing

#endif  // DDP_OPTIM_ZERO_TRAINER_H_
