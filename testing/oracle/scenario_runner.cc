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
#include "ddp/rpc/rpc.h"
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

// Reads the tensors of a file into memory of their own, as PyTorch's side does: the last bits of a
// matrix product depend on the alignment.
Tensors ReadTensors(const std::string& path) {
  elastic::PosixFileSystem files;
  auto opened = files.OpenFile(path);
  CHECK(opened.ok()) << opened.status();
  auto loaded = elastic::LoadSafetensors(**opened, path);
  CHECK(loaded.ok()) << loaded.status();
  Tensors tensors;
  for (const elastic::TensorView& view : loaded->tensors) {
    tensors[view.name] = elastic::TensorOver(view).clone();
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

// Makes a model with the weights and buffers that PyTorch's side starts from.
std::shared_ptr<OracleModel> MakeModel(const std::string& name, const Tensors& inputs) {
  std::shared_ptr<OracleModel> net = MakeOracleModel(name);
  CHECK(net != nullptr) << "unknown model " << name;
  torch::NoGradGuard no_grad;
  for (auto& [key, tensor] : StateOf(*net)) {
    const auto initial = inputs.find(absl::StrCat(name, "/state/", key));
    if (initial != inputs.end()) tensor.copy_(initial->second);
  }
  return net;
}

DistributedDataParallelOptions OptionsOf(const Scenario& scenario) {
  DistributedDataParallelOptions options;
  options.broadcast_buffers = scenario.broadcast_buffers;
  options.bucket_cap_mb = scenario.bucket_cap_mb;
  options.bucket_cap_mb_list = scenario.bucket_cap_mb_list;
  options.find_unused_parameters = scenario.find_unused_parameters;
  options.gradient_as_bucket_view = scenario.gradient_as_bucket_view;
  options.static_graph = scenario.static_graph;
  options.require_manual_backward_finalization = scenario.finalize;
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
        net_(MakeModel(scenario.model, inputs)) {}

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
    if (scenario_.finalize && micro == 0) model.finalize_backward();
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

// The parameter server's part of the model.
class Table {
 public:
  Table(const at::Tensor& weight, bool sparse)
      : weight_(weight.clone().requires_grad_()), sparse_(sparse) {}
  at::Tensor lookup(const at::Tensor& ids) const {
    return torch::embedding(weight_, ids, -1, /*scale_grad_by_freq=*/false, sparse_);
  }
  at::Tensor values() const { return weight_.detach(); }
  std::vector<at::Tensor> parameters() const { return {weight_}; }

 private:
  const at::Tensor weight_;
  const bool sparse_;
};

// Trains one model on both trainers, whose gradients of the table are sparse or dense.
void TrainWithTable(bool sparse, const Tensors& inputs, const std::shared_ptr<ProcessGroup>& group,
                    Tensors& results) {
  const int rank = group->rank();
  const auto net = MakeModel("mlp", inputs);
  Model model(net, group);
  const auto table = rpc::sync<rpc::RRef<Table>>("rank2", "table", sparse);
  // The trainers' updates of the table add up, and are not averaged.
  rpc::DistributedOptimizer table_optimizer(rpc::sgd(kOracleLearningRate / group->size()), {table});
  rpc::DistributedOptimizer net_optimizer(rpc::sgd(kOracleLearningRate), {}, net->parameters());
  const at::Tensor ids = inputs.at("embedding/x")[rank], y = inputs.at("mlp/y")[rank];
  std::vector<at::Tensor> losses;
  for (int step = 0; step < kOracleSteps; ++step) {
    rpc::AutogradContext context;
    const auto rows = table.sync<at::Tensor>("lookup", ids[step][0]);
    const at::Tensor loss = net->Loss(model.forward(rows.mean(1), rank, step), y[step][0]);
    context.backward(loss);
    losses.push_back(loss.detach());
    group->barrier();  // every row is fetched before the table changes
    for (int turn = 0; turn < group->size(); ++turn) {
      if (rank == turn) table_optimizer.step(context);
      group->barrier();
    }
    net_optimizer.step(context);
  }
  const std::string name = sparse ? "rpc_sparse" : "rpc_dense";
  results[absl::StrCat(name, "/loss/", rank)] = torch::stack(losses);
  results[name + "/final/table"] = table.sync<at::Tensor>("values");
  for (const auto& [key, tensor] : StateOf(*net)) results[name + "/final/" + key] = tensor.detach();
}

}  // namespace

int RunOracleScenarios() {
  torch::set_num_threads(1);
  const auto scenarios = ParseScenarios(ReadText(Variable(kOracleTable)));
  CHECK(scenarios.ok()) << scenarios.status();
  const Tensors inputs = ReadTensors(Variable(kOracleModels));
  const auto group = init_process_group(
      {.backend = Variable(kOracleBackend), .timeout = std::chrono::seconds(60)});
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

int RunOracleRpc() {
  torch::set_num_threads(1);
  const Tensors inputs = ReadTensors(Variable(kOracleModels));
  const auto world = init_process_group({.timeout = std::chrono::seconds(60)});
  const auto trainers = world->new_group({0, 1});  // null on the server
  std::map<bool, rpc::RRef<Table>> tables;         // on the server, by sparseness
  rpc::Registry registry;
  registry.module<Table, at::Tensor, bool>("Table")
      .method("lookup", &Table::lookup)
      .method("values", &Table::values);
  registry.function("table", [&tables](bool sparse) { return tables.at(sparse); });
  const auto workers = rpc::init(
      absl::StrCat("rank", world->rank()), world->store(),
      {.rank = world->rank(), .world_size = world->size(), .registry = std::move(registry)});
  if (!trainers) {
    for (const bool sparse : {false, true}) {
      tables.emplace(sparse, rpc::share(std::make_shared<Table>(inputs.at("rpc/table"), sparse)));
    }
  }
  workers->barrier();
  if (trainers) {
    Tensors results;
    for (const bool sparse : {false, true}) TrainWithTable(sparse, inputs, trainers, results);
    WriteTensors(absl::StrCat(Variable(kOracleResults), "/rpc_", world->rank(), ".safetensors"),
                 results);
  }
  workers->barrier();  // both trainers are done with the tables
  tables.clear();
  workers->shutdown();
  return 0;
}

}  // namespace ddp::testing
