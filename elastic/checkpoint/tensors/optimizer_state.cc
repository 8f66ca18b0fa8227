#include "elastic/checkpoint/tensors/optimizer_state.h"

#include <memory>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace ddp::elastic {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;
using Option = OptimizerRecord::Option;
using Options = std::map<std::string, Option>;

// ---- The three kinds of optimizer ----

struct SgdKind {
  using Type = torch::optim::SGD;
  using State = torch::optim::SGDParamState;
  static constexpr char kName[] = "SGD";
  static constexpr bool kCountsSteps = false;

  static Options Get(const OptimizerOptions& base) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(base);
    return {{"lr", options.lr()},
            {"momentum", options.momentum()},
            {"dampening", options.dampening()},
            {"weight_decay", options.weight_decay()},
            {"nesterov", options.nesterov()}};
  }
  static void Set(const Options& values, OptimizerOptions& base) {
    auto& options = static_cast<torch::optim::SGDOptions&>(base);
    options.lr(std::get<double>(values.at("lr")));
    options.momentum(std::get<double>(values.at("momentum")));
    options.dampening(std::get<double>(values.at("dampening")));
    options.weight_decay(std::get<double>(values.at("weight_decay")));
    options.nesterov(std::get<bool>(values.at("nesterov")));
  }

  // Returns the member of the state with the Python name `key`; null when there is none.
  template <typename AnyState>
  static auto* Tensor(AnyState& state, const std::string& key) {
    return key == "momentum_buffer" ? &state.momentum_buffer() : nullptr;
  }
  static constexpr const char* kTensors[] = {"momentum_buffer"};
  static constexpr size_t kRequiredTensors = 0;
};

template <typename OptimizerT, typename OptionsT, typename StateT>
struct AdamKindOf {
  using Type = OptimizerT;
  using State = StateT;
  static constexpr bool kCountsSteps = true;

  static Options Get(const OptimizerOptions& base) {
    const auto& options = static_cast<const OptionsT&>(base);
    return {
        {"lr", options.lr()},
        {"betas", std::vector<double>{std::get<0>(options.betas()), std::get<1>(options.betas())}},
        {"eps", options.eps()},
        {"weight_decay", options.weight_decay()},
        {"amsgrad", options.amsgrad()}};
  }
  static void Set(const Options& values, OptimizerOptions& base) {
    auto& options = static_cast<OptionsT&>(base);
    const auto& betas = std::get<std::vector<double>>(values.at("betas"));
    options.lr(std::get<double>(values.at("lr")));
    options.betas(std::make_tuple(betas[0], betas[1]));
    options.eps(std::get<double>(values.at("eps")));
    options.weight_decay(std::get<double>(values.at("weight_decay")));
    options.amsgrad(std::get<bool>(values.at("amsgrad")));
  }

  template <typename AnyState>
  static auto* Tensor(AnyState& state, const std::string& key) {
    if (key == "exp_avg") return &state.exp_avg();
    if (key == "exp_avg_sq") return &state.exp_avg_sq();
    return key == "max_exp_avg_sq" ? &state.max_exp_avg_sq() : nullptr;
  }
  static constexpr const char* kTensors[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr size_t kRequiredTensors = 2;  // the first two of kTensors, if there is a state
};
struct AdamKind
    : AdamKindOf<torch::optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState> {
  static constexpr char kName[] = "Adam";
};
struct AdamWKind
    : AdamKindOf<torch::optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState> {
  static constexpr char kName[] = "AdamW";
};

// Calls `with` with the kind of `optimizer`. Returns false for a kind that is not supported.
template <typename With>
bool WithKind(const Optimizer& optimizer, With with) {
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer) != nullptr) {
    with(AdamWKind());
  } else if (dynamic_cast<const torch::optim::Adam*>(&optimizer) != nullptr) {
    with(AdamKind());
  } else if (dynamic_cast<const torch::optim::SGD*>(&optimizer) != nullptr) {
    with(SgdKind());
  } else {
    return false;
  }
  return true;
}

constexpr char kNotOurs[] =
    "the optimizer is none of torch::optim::SGD, Adam and AdamW, which are the ones that can be "
    "saved";

std::string TensorName(const std::string& parameter, const std::string& key) {
  return absl::StrCat("state.", parameter, ".", key);
}

// ---- Taking the state ----

absl::StatusOr<std::string> NameOf(const at::Tensor& parameter, const ModelTensors& model) {
  const auto found = model.parameter_names.find(parameter.unsafeGetTensorImpl());
  if (found != model.parameter_names.end()) return found->second;
  return absl::InvalidArgumentError(
      "the optimizer has a parameter that the model does not have: make the optimizer from "
      "model->parameters(), after the model has been moved to its device");
}

template <typename Kind>
void TakeParameter(const typename Kind::State& state, const std::string& name,
                   OptimizerState& taken) {
  for (const char* key : Kind::kTensors) {
    const at::Tensor* tensor = Kind::Tensor(state, key);
    if (tensor->defined()) taken.tensors.push_back({TensorName(name, key), *tensor});
  }
  if constexpr (Kind::kCountsSteps) {
    taken.record.steps[name] = state.step();
    taken.tensors.push_back(
        {TensorName(name, "step"), at::full({}, static_cast<double>(state.step()), at::kFloat)});
  }
}

template <typename Kind>
absl::Status Take(const Optimizer& optimizer, const ModelTensors& model, OptimizerState& taken) {
  taken.record.type = Kind::kName;
  size_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    OptimizerRecord::Group record;
    record.options = Kind::Get(group.options());
    for (const at::Tensor& parameter : group.params()) {
      DDP_ASSIGN_OR_RETURN(const std::string name, NameOf(parameter, model));
      record.parameters.push_back(name);
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (state != optimizer.state().end()) {
        TakeParameter<Kind>(static_cast<const typename Kind::State&>(*state->second), name, taken);
      }
      taken.parameters.resize(taken.tensors.size(), number++);
    }
    taken.record.groups.push_back(std::move(record));
  }
  return absl::OkStatus();
}

// ---- Comparing ----

void CompareOptions(const Options& here, const Options& saved, const std::string& group,
                    std::vector<std::string>& mismatches) {
  for (const auto& [name, value] : here) {
    const auto found = saved.find(name);
    const auto* betas = std::get_if<std::vector<double>>(&value);
    if (found == saved.end() || found->second.index() != value.index() ||
        (betas != nullptr &&
         betas->size() != std::get<std::vector<double>>(found->second).size())) {
      mismatches.push_back(
          absl::StrCat(group, ": the checkpoint has no usable option \"", name, "\""));
    }
  }
}

void CompareParameters(const std::vector<std::string>& here, const std::vector<std::string>& saved,
                       const std::string& group, std::vector<std::string>& mismatches) {
  if (here == saved) return;
  const std::set<std::string> here_set(here.begin(), here.end());
  const std::set<std::string> saved_set(saved.begin(), saved.end());
  for (const std::string& name : here_set) {
    if (saved_set.contains(name)) continue;
    mismatches.push_back(
        absl::StrCat(group, ": ", name, " is in the optimizer, not in the checkpoint"));
  }
  for (const std::string& name : saved_set) {
    if (here_set.contains(name)) continue;
    mismatches.push_back(
        absl::StrCat(group, ": ", name, " is in the checkpoint, not in the optimizer"));
  }
  if (here_set == saved_set) {
    mismatches.push_back(absl::StrCat(group, ": the parameters have another order"));
  }
}

// Checks that the checkpoint has all or nothing of one parameter's state, in the parameter's shape.
template <typename Kind>
void CompareState(const std::string& name, const TensorType& type,
                  const std::map<std::string, const TensorRecord*>& saved,
                  const OptimizerRecord& record, size_t& used,
                  std::vector<std::string>& mismatches) {
  size_t found_required = 0;
  size_t found_any = 0;
  for (size_t i = 0; i < std::size(Kind::kTensors); ++i) {
    const auto found = saved.find(TensorName(name, Kind::kTensors[i]));
    if (found == saved.end()) continue;
    ++found_any;
    if (i < Kind::kRequiredTensors) ++found_required;
    if (found->second->type != type) {
      mismatches.push_back(absl::StrCat(found->first, ": ", TensorTypeText(found->second->type),
                                        " in the checkpoint, the parameter is ",
                                        TensorTypeText(type)));
    }
  }
  used += found_any;
  if constexpr (!Kind::kCountsSteps) return;
  const bool counted = record.steps.contains(name);
  used += saved.contains(TensorName(name, "step")) ? 1 : 0;
  if ((counted || found_any > 0) && (!counted || found_required != Kind::kRequiredTensors)) {
    mismatches.push_back(
        absl::StrCat(TensorName(name, "*"), ": the checkpoint has only a part of it"));
  }
}

template <typename Kind>
std::vector<std::string> Compare(const Optimizer& optimizer, const ModelTensors& model,
                                 const OptimizerState& here, const Manifest& manifest) {
  const OptimizerRecord& record = *manifest.optimizer;
  std::vector<std::string> mismatches;
  if (record.type != Kind::kName) {
    return {absl::StrCat("the optimizer is ", Kind::kName, " here, ", record.type,
                         " in the checkpoint")};
  }
  if (record.groups.size() != here.record.groups.size()) {
    return {absl::StrCat("the optimizer has ", here.record.groups.size(),
                         " parameter groups here, ", record.groups.size(), " in the checkpoint")};
  }
  std::map<std::string, const TensorRecord*> saved;
  for (const TensorRecord& tensor : manifest.tensors) {
    if (absl::StartsWith(tensor.file, "optimizer-")) saved[tensor.name] = &tensor;
  }
  size_t used = 0;
  for (size_t i = 0; i < record.groups.size(); ++i) {
    const std::string group = absl::StrCat("parameter group ", i);
    CompareOptions(here.record.groups[i].options, record.groups[i].options, group, mismatches);
    CompareParameters(here.record.groups[i].parameters, record.groups[i].parameters, group,
                      mismatches);
    const std::vector<at::Tensor>& parameters = optimizer.param_groups()[i].params();
    for (size_t p = 0; p < parameters.size(); ++p) {
      const std::string& name = here.record.groups[i].parameters[p];
      const absl::StatusOr<TensorType> type = TypeOf({name, parameters[p]});
      if (type.ok()) CompareState<Kind>(name, *type, saved, record, used, mismatches);
    }
  }
  if (mismatches.empty() && used != saved.size()) {
    mismatches.push_back("the checkpoint has optimizer tensors that this optimizer does not know");
  }
  return mismatches;
}

std::string OptionText(const Option& option) {
  if (const auto* number = std::get_if<double>(&option)) return absl::StrCat(*number);
  if (const auto* flag = std::get_if<bool>(&option)) return *flag ? "true" : "false";
  return absl::StrCat("(", absl::StrJoin(std::get<std::vector<double>>(option), ", "), ")");
}

// ---- Putting it in place ----

using States = std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>>;

template <typename Kind>
States BuildStates(const Optimizer& optimizer, const ModelTensors& model,
                   const OptimizerRecord& record, const std::map<std::string, TensorView>& values,
                   bool in_host_memory) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions place =
      in_host_memory ? at::TensorOptions(at::kCPU) : at::TensorOptions();
  States states;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const std::string& name = model.parameter_names.at(parameter.unsafeGetTensorImpl());
      auto state = std::make_unique<typename Kind::State>();
      bool any = false;
      for (const char* key : Kind::kTensors) {
        const auto value = values.find(TensorName(name, key));
        if (value == values.end()) continue;
        // The optimizer itself also creates the state with the parameter's strides.
        *Kind::Tensor(*state, key) =
            at::empty_like(parameter, place).copy_(TensorOver(value->second));
        any = true;
      }
      if constexpr (Kind::kCountsSteps) {
        if (any) state->step(record.steps.at(name));
      }
      if (any) states.emplace_back(parameter.unsafeGetTensorImpl(), std::move(state));
    }
  }
  return states;
}

template <typename Kind>
std::function<void()> Prepare(Optimizer& optimizer, const ModelTensors& model,
                              const OptimizerRecord& record,
                              const std::map<std::string, TensorView>& values,
                              bool in_host_memory) {
  auto states =
      std::make_shared<States>(BuildStates<Kind>(optimizer, model, record, values, in_host_memory));
  // The table is reserved now, so that installing the states does not grow it.
  optimizer.state().reserve(optimizer.state().size() + states->size());
  return [&optimizer, states, groups = record.groups] {
    for (size_t i = 0; i < groups.size(); ++i) {
      Kind::Set(groups[i].options, optimizer.param_groups()[i].options());
    }
    optimizer.state().clear();
    for (auto& [parameter, state] : *states) optimizer.state()[parameter] = std::move(state);
  };
}

}  // namespace

absl::StatusOr<OptimizerState> StateOf(const Optimizer& optimizer, const ModelTensors& model) {
  OptimizerState taken;
  absl::Status status;
  const bool known = WithKind(
      optimizer, [&]<typename Kind>(Kind) { status = Take<Kind>(optimizer, model, taken); });
  if (!known) return absl::InvalidArgumentError(kNotOurs);
  DDP_RETURN_IF_ERROR(status);
  return taken;
}

std::vector<std::string> OptimizerMismatches(const Optimizer& optimizer, const ModelTensors& model,
                                             const Manifest& manifest) {
  const absl::StatusOr<OptimizerState> here = StateOf(optimizer, model);
  if (!here.ok()) return {std::string(here.status().message())};
  if (!manifest.optimizer.has_value()) {
    return {absl::StrCat("the optimizer is ", here->record.type, " here, the checkpoint has none")};
  }
  std::vector<std::string> mismatches;
  WithKind(optimizer, [&]<typename Kind>(Kind) {
    mismatches = Compare<Kind>(optimizer, model, *here, manifest);
  });
  return mismatches;
}

std::vector<std::string> DifferentOptions(const OptimizerRecord& program,
                                          const OptimizerRecord& checkpoint) {
  std::vector<std::string> lines;
  for (size_t i = 0; i < program.groups.size(); ++i) {
    for (const auto& [name, value] : program.groups[i].options) {
      const Option& saved = checkpoint.groups[i].options.at(name);
      if (value == saved) continue;
      lines.push_back(absl::StrCat(name, " of group ", i, ": ", OptionText(value),
                                   " in the program, ", OptionText(saved), " in the checkpoint"));
    }
  }
  return lines;
}

std::function<void()> PrepareOptimizer(Optimizer& optimizer, const ModelTensors& model,
                                       const OptimizerRecord& record,
                                       const std::map<std::string, TensorView>& values,
                                       bool in_host_memory) {
  std::function<void()> put;
  WithKind(optimizer, [&]<typename Kind>(Kind) {
    put = Prepare<Kind>(optimizer, model, record, values, in_host_memory);
  });
  return put;
}

}  // namespace ddp::elastic
