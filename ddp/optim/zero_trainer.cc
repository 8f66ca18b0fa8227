#include "ddp/optim/zero_trainer.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <cstdint>
#include <type_traits>

#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

int64_t Product(at::IntArrayRef shape) {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

}  // namespace

Net::Net() {
  int64_t seed = 0;
  const auto add = [&](const std::string& name, at::IntArrayRef shape, bool trained = true) {
    const at::Tensor value = torch::arange(Product(shape), at::kFloat).add_(++seed).sin_();
    return register_parameter(name, value.view(shape).clone(), trained);
  };
  first = add("first", {33, 17});
  scale = add("scale", {});
  frozen = add("frozen", {5}, false);
  image = register_parameter("image", torch::arange(72, at::kFloat)
                                          .sin_()
                                          .view({2, 3, 3, 4})
                                          .contiguous(at::MemoryFormat::ChannelsLast));
  gaps =
      register_parameter("gaps", torch::arange(20, at::kFloat).cos_().view({10, 2}).select(1, 0));
  second = add("second", {7, 33});
  unused = add("unused", {11});
}

at::Tensor Net::forward(const at::Tensor& inputs) {
  const at::Tensor hidden = at::tanh(at::matmul(inputs, first.t())) * scale;
  const at::Tensor outputs = at::matmul(hidden, second.t());
  return outputs.sum() * frozen.sum() + outputs.square().mean() + (image * image).sum() * 0.1 +
         (gaps * gaps.sin()).sum();
}

at::Tensor Inputs(int rank, int step) {
  return torch::arange(4 * 17, at::kFloat).mul_(0.37 * (step + 1)).add_(rank).sin_().view({4, 17});
}

std::vector<std::pair<std::string, Factory>> Optimizers() {
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

Factory AdamW() { return Optimizers()[2].second; }

std::vector<std::pair<std::string, ZeroRedundancyOptions>> Modes(bool scatter) {
  std::vector<std::pair<std::string, ZeroRedundancyOptions>> modes = {
      {"whole", {.shard = Shard::kWhole, .bucket_cap_mb = 0.001}},
      {"even", {.scatter_gradients = false, .bucket_cap_mb = 0.001}},
      {"overlap", {.scatter_gradients = false, .overlap_with_forward = true}}};
  if (scatter) {
    modes.push_back({"scatter", {.scatter_gradients = true, .bucket_cap_mb = 0.001}});
    modes.push_back({"scatter in one bucket", {.scatter_gradients = true}});
  }
  return modes;
}

Groups GroupsOf(const Net& net, const Factory& make) {
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

Trainer Trainer::Plain(const std::shared_ptr<ProcessGroup>& group, const Factory& make,
                       const ModelOptions& model_options) {
  Trainer trainer(group, model_options);
  trainer.optimizer = make(GroupsOf(*trainer.net, make));
  return trainer;
}

Trainer Trainer::Zero(const std::shared_ptr<ProcessGroup>& group, const Factory& make,
                      const ZeroRedundancyOptions& options, const ModelOptions& model_options) {
  Trainer trainer(group, model_options);
  auto zero = std::make_unique<ZeroRedundancyOptimizerBase>(make, GroupsOf(*trainer.net, make),
                                                            trainer.model, options);
  trainer.zero = zero.get();
  trainer.optimizer = std::move(zero);
  return trainer;
}

void Trainer::Step(int step) {
  optimizer->zero_grad();
  model.forward(Inputs(group->rank(), step)).backward();
  optimizer->step();
}

void Trainer::Steps(int begin, int end) {
  for (int step = begin; step < end; ++step) Step(step);
  if (zero != nullptr) zero->wait();
}

at::Tensor Unsaved::step(LossClosure) {
  for (const auto& group : param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      auto state = std::make_unique<State>();
      state->broken = broken_;
      this->state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }
  return {};
}

void ExpectEqual(const Trainer& a, const Trainer& b, const std::string& about) {
  const auto mine = a.net->named_parameters();
  const auto others = b.net->named_parameters();
  for (const auto& item : mine) {
    EXPECT_TRUE(at::equal(item.value(), others[item.key()]))
        << about << ": " << item.key() << " differs by "
        << (item.value() - others[item.key()]).abs().max().item<double>();
  }
}

}  // namespace ddp::testing
