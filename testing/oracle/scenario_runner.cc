#include "testing/oracle/scenario_runner.h"

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "ddp/common/logging.h"
#include "ddp/ddp.h"
#include "ddp/default_hooks.h"
#include "ddp/join.h"
#include "ddp/optim/zero_redundancy_optimizer.h"
#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "elastic/checkpoint/format/safetensors_reader.h"
#include "elastic/checkpoint/format/safetensors_writer.h"
#include "elastic/checkpoint/tensors/torch_tensors.h"
#include "nlohmann/json.hpp"
#include "testing/oracle/models.h"
#include "testing/oracle/scenario.h"

namespace ddp::testing {
namespace {

using Model = DistributedDataParallel<OracleModel>;
using Names = std::vector<std::string>;
using Tensors = std::map<std::string, at::Tensor>;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  CHECK(value != nullptr) << name << " is not set";
  return value;
}

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  CHECK(file) << "cannot read " << path;
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// Reads the tensors of a file. The tensors share the memory of `file`, which must outlive them.
Tensors ReadTensors(const std::string& path, elastic::LoadedFile& file) {
  elastic::PosixFileSystem files;
  auto opened = files.OpenFile(path);
  CHECK(opened.ok()) << opened.status();
  auto loaded = elastic::LoadSafetensors(**opened, path);
  CHECK(loaded.ok()) << loaded.status();
  file = *std::move(loaded);
  Tensors tensors;
  for (const elastic::TensorView& view : file.tensors) {
    tensors[view.name] = elastic::TensorOver(view);
  }
  return tensors;
}

void WriteTensors(const std::string& path, const Tensors& tensors) {
  std::vector<elastic::NamedTensor> named;
  for (const auto& [name, tensor] : tensors) named.push_back({name, tensor});
  std::vector<at::Tensor> keep;
  const auto views = elastic::ViewsOf(named, keep);
  CHECK(views.ok()) << views.status();
  elastic::PosixFileSystem files;
  const auto written = elastic::WriteSafetensors(files, path, *views);
  CHECK(written.ok()) << written.status();
}

Tensors StateOf(const OracleModel& net) {
  Tensors state;
  for (const auto& item : net.named_parameters()) state[item.key()] = item.value();
  for (const auto& item : net.named_buffers()) state[item.key()] = item.value();
  return state;
}

DistributedDataParallelOptions OptionsOf(const Scenario& scenario) {
  DistributedDataParallelOptions options;
  options.broadcast_buffers = scenario.broadcast_buffers;
  options.bucket_cap_mb = scenario.bucket_cap_mb;
  options.bucket_cap_mb_list = scenario.bucket_cap_mb_list;
  options.find_unused_parameters = scenario.find_unused_parameters;
  options.gradient_as_bucket_view = scenario.gradient_as_bucket_view;
  options.static_graph = scenario.static_graph;
  return options;
}

void RegisterHook(const std::string& name, const std::shared_ptr<ProcessGroup>& group,
                  Model& model) {
  if (name == "allreduce_hook") {
    model.register_comm_hook(group, allreduce_hook);
  } else if (name == "fp16_compress_hook") {
    model.register_comm_hook(group, fp16_compress_hook);
  } else if (name == "bf16_compress_hook") {
    model.register_comm_hook(group, bf16_compress_hook);
  } else if (name == "fp16_compress_wrapper") {
    model.register_comm_hook(group, fp16_compress_wrapper(allreduce_hook));
  } else {
    CHECK(name.empty()) << "unknown comm hook " << name;
  }
}

// Runs a scenario on one rank.
class Run {
 public:
  Run(const Scenario& scenario, const Tensors& inputs, std::shared_ptr<ProcessGroup> group)
      : scenario_(scenario),
        group_(std::move(group)),
        x_(inputs.at(scenario.model + "/x")[group_->rank()]),
        y_(inputs.at(scenario.model + "/y")[group_->rank()]),
        net_(MakeOracleModel(scenario.model)) {
    CHECK(net_ != nullptr) << "unknown model " << scenario.model;
    torch::NoGradGuard no_grad;
    for (auto& [name, tensor] : StateOf(*net_)) {
      const auto initial = inputs.find(absl::StrCat(scenario.model, "/state/", name));
      if (initial != inputs.end()) tensor.copy_(initial->second);
    }
  }

  nlohmann::json Execute() {
    Model model(net_, group_, OptionsOf(scenario_));
    RegisterHook(scenario_.hook, group_, model);
    const std::unique_ptr<torch::optim::Optimizer> optimizer = MakeOptimizer(model);
    if (scenario_.batches.empty()) {
      Train(model, *optimizer);
    } else {
      std::vector<JoinableRef> joinables = {&model};
      if (auto* zero = dynamic_cast<ZeroRedundancyOptimizerBase*>(optimizer.get())) {
        joinables.emplace_back(zero);
      }
      join(joinables, {.divide_by_initial_world_size = scenario_.divide_by_initial_world_size},
           [&] { Train(model, *optimizer); });
    }
    tensors_["loss"] = torch::stack(losses_);
    for (const auto& [name, tensor] : StateOf(*net_)) Record("final/" + name, tensor);
    return {{"buckets", model.bucket_layout()}, {"undefined", undefined_}, {"sparse", sparse_}};
  }

  const Tensors& tensors() const { return tensors_; }

 private:
  std::unique_ptr<torch::optim::Optimizer> MakeOptimizer(const Model& model) const {
    const auto options = torch::optim::SGDOptions(kOracleLearningRate).momentum(scenario_.momentum);
    using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;
    using Shard = ZeroRedundancyOptions::Shard;
    const std::string& zero = scenario_.zero;
    if (zero.empty()) return std::make_unique<torch::optim::SGD>(net_->parameters(), options);
    if (zero == "scatter") {
      return std::make_unique<Zero>(model, options,
                                    ZeroRedundancyOptions{.scatter_gradients = true});
    }
    CHECK(zero == "whole" || zero == "even") << "unknown way to shard: " << zero;
    const Shard shard = zero == "whole" ? Shard::kWhole : Shard::kEven;
    return std::make_unique<Zero>(net_->parameters(), options, group_,
                                  ZeroRedundancyOptions{.shard = shard});
  }

  void Train(Model& model, torch::optim::Optimizer& optimizer) {
    for (int step = 0; step < scenario_.StepsOf(group_->rank()); ++step) {
      optimizer.zero_grad(scenario_.set_to_none);
      if (scenario_.accumulate) {
        const auto guard = model.no_sync();
        Backward(model, step, 1);
      }
      Backward(model, step, 0);
      RecordGradients(step);
      optimizer.step();
    }
  }

  void Backward(Model& model, int step, int micro) {
    const at::Tensor outputs = model.forward(x_[step][micro], group_->rank(), step);
    const at::Tensor loss = net_->Loss(outputs, y_[step][micro]);
    loss.backward();
    losses_.push_back(loss.detach());
  }

  void RecordGradients(int step) {
    Names& undefined = undefined_.emplace_back();
    for (const auto& item : net_->named_parameters()) {
      const at::Tensor gradient = item.value().grad();
      if (!gradient.defined()) {
        undefined.push_back(item.key());
        continue;
      }
      if (gradient.is_sparse()) sparse_.insert(item.key());
      Record(absl::StrCat("grad/", step, "/", item.key()),
             gradient.is_sparse() ? gradient.to_dense() : gradient);
    }
  }

  void Record(const std::string& name, const at::Tensor& tensor) {
    // Scattered gradients differ from rank to rank.
    const bool scattered = scenario_.zero == "scatter" && name.starts_with("grad/");
    if (scenario_.model != "wide" && !scattered) tensors_[name] = tensor.detach().clone();
  }

  const Scenario& scenario_;
  const std::shared_ptr<ProcessGroup> group_;
  const at::Tensor x_, y_;
  const std::shared_ptr<OracleModel> net_;
  Tensors tensors_;
  std::vector<at::Tensor> losses_;
  std::vector<Names> undefined_;
  std::set<std::string> sparse_;
};

}  // namespace

int RunOracleScenarios() {
  torch::set_num_threads(1);
  const auto scenarios = ParseScenarios(ReadText(Variable(kOracleTable)));
  CHECK(scenarios.ok()) << scenarios.status();
  elastic::LoadedFile file;
  const Tensors inputs = ReadTensors(Variable(kOracleModels), file);
  const auto group = init_process_group({.timeout = std::chrono::seconds(60)});
  Tensors results;
  nlohmann::json facts = nlohmann::json::object();
  for (const Scenario& scenario : *scenarios) {
    try {
      Run run(scenario, inputs, group);
      facts[scenario.name] = run.Execute();
      for (const auto& [name, tensor] : run.tensors()) {
        results[absl::StrCat(scenario.name, "/", name)] = tensor;
      }
    } catch (const std::exception& error) {
      facts[scenario.name] = {{"error", error.what()}};
    }
  }
  const std::string folder = Variable(kOracleResults);
  WriteTensors(absl::StrCat(folder, "/tensors_", group->rank(), ".safetensors"), results);
  std::ofstream(absl::StrCat(folder, "/facts_", group->rank(), ".json")) << facts.dump(1);
  return 0;
}

}  // namespace ddp::testing
