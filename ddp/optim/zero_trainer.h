// A small model, its optimizers and a training loop, for the tests of ZeroRedundancyOptimizer.
#ifndef DDP_OPTIM_ZERO_TRAINER_H_
#define DDP_OPTIM_ZERO_TRAINER_H_

#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ddp/distributed_data_parallel.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "ddp/process_group.h"

namespace ddp::testing {

using Groups = ZeroRedundancyOptimizerBase::Groups;
using Factory = ZeroRedundancyOptimizerBase::Factory;
using Shard = ZeroRedundancyOptions::Shard;
using torch::optim::OptimizerParamGroup;

// Sizes that no number of ranks divides, a parameter without a gradient, a frozen one, one in
// channels_last and one with gaps in its memory.
struct Net : torch::nn::Module {
  Net();

  at::Tensor forward(const at::Tensor& inputs);

  at::Tensor first, scale, frozen, image, gaps, second, unused;
};

// The inputs of one rank in one step.
at::Tensor Inputs(int rank, int step);

std::vector<std::pair<std::string, Factory>> Optimizers();

Factory AdamW();

// The kinds of sharding, by name.
std::vector<std::pair<std::string, ZeroRedundancyOptions>> Modes(bool scatter);

// Two groups with options of their own.
Groups GroupsOf(const Net& net, const Factory& make);

// A model with its optimizer.
struct Trainer {
  using ModelOptions = DistributedDataParallelOptions;

  explicit Trainer(const std::shared_ptr<ProcessGroup>& group,
                   const ModelOptions& options = {.find_unused_parameters = true})
      : group(group), model(net, group, options) {}

  static Trainer Plain(const std::shared_ptr<ProcessGroup>& group, const Factory& make,
                       const ModelOptions& model_options = {.find_unused_parameters = true});
  static Trainer Zero(const std::shared_ptr<ProcessGroup>& group, const Factory& make,
                      const ZeroRedundancyOptions& options,
                      const ModelOptions& model_options = {.find_unused_parameters = true});

  void Step(int step);
  void Steps(int begin, int end);

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
  at::Tensor step(LossClosure) override;

 private:
  const bool broken_;
};

void ExpectEqual(const Trainer& a, const Trainer& b, const std::string& about);

}  // namespace ddp::testing

#endif  // DDP_OPTIM_ZERO_TRAINER_H_
