#include "ddp/graph/graph_module.h"

#include <cstring>
#include <map>
#include <ostream>
#include <set>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/model/nn_module_view.h"
#include "ddp/nn/convert_sync_batchnorm.h"
#include "ddp/statistics/module_marks.h"

namespace ddp::internal {
namespace {

// Marks in a key, so that different values have different keys.
enum Mark : int64_t {
  kUndefined = -100,
  kTensor,
  kNone,
  kNumber,
  kText,
  kSequence,
  kEnd,
};

void AppendTensor(const at::Tensor& tensor, std::vector<int64_t>& key) {
  if (!tensor.defined()) {
    key.push_back(kUndefined);
    return;
  }
  key.push_back(kTensor);
  key.push_back(static_cast<int64_t>(tensor.scalar_type()));
  key.push_back(static_cast<int64_t>(tensor.device().type()));
  key.push_back(tensor.device().index());
  key.push_back(static_cast<int64_t>(tensor.layout()));
  key.push_back(tensor.requires_grad() ? (tensor.is_leaf() ? 2 : 1) : 0);
  key.push_back(tensor.dim());
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  if (tensor.layout() != at::kStrided) return;
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
}

void AppendText(const std::string& text, std::vector<int64_t>& key) {
  key.push_back(kText);
  key.push_back(static_cast<int64_t>(text.size()));
  key.insert(key.end(), text.begin(), text.end());
}

void AppendNumber(int64_t kind, int64_t bits, std::vector<int64_t>& key) {
  key.insert(key.end(), {kNumber, kind, bits});
}

int64_t BitsOf(double value) {
  int64_t bits = 0;
  static_assert(sizeof(bits) == sizeof(value));
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// The properties that all parameters of a bucket share.
using Kind = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>;

Kind KindOf(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.device().type(), tensor.device().index()};
}

}  // namespace

void RefuseStatisticsLayers(const torch::nn::Module& module) {
  const auto refuse = [](const std::string& layer) {
    throw ConfigurationError(absl::StrCat(
        layer,
        " takes its statistics over all ranks, by a collective that a graph cannot hold: "
        "use a batch norm of one rank, or train the model without optimize_graph()"));
  };
  if (has_sync_batch_norm(module)) refuse("a SyncBatchNorm of the model");
  // A script that Python wrote has it by name only.
  const auto refuse_by_name = [&](const std::string& name, const std::string& path) {
    if (name.find("SyncBatchNorm") != std::string::npos)
      refuse(absl::StrCat(path, " (", name, ")"));
  };
  refuse_by_name(module.name(), "the model");
  const auto modules = module.named_modules("", /*include_self=*/false);
  for (const auto& item : modules) refuse_by_name(item.value()->name(), item.key());
}

GraphModuleBase::GraphModuleBase(const std::string& name, const GraphOptions& options)
    : torch::nn::Module(name), options_(options) {}

bool GraphModuleBase::MayAddGraph(const char* combination) {
  if (static_cast<int64_t>(graphs()) < options_.max_graphs()) return true;
  LOG_IF(WARNING, !std::exchange(warned_, true))
      << name() << " has " << graphs() << " graphs, one for each combination of " << combination
      << "; calls with further combinations run without a graph (max_graphs)";
  return false;
}

void GraphModuleBase::ListParameters(const std::set<const c10::TensorImpl*>& sparse) {
  std::unordered_set<const c10::TensorImpl*> seen;
  const std::set<std::string>& to_ignore = options_.params_to_ignore();
  std::set<std::string> unknown = to_ignore;
  const auto buffers = named_buffers();
  for (const auto& item : buffers) unknown.erase(item.key());
  const auto parameters = named_parameters();
  for (const bool excluded : {false, true}) {  // a tensor may have names of both kinds
    for (const auto& item : parameters) {
      const at::Tensor& tensor = item.value();
      unknown.erase(item.key());
      if ((to_ignore.count(item.key()) != 0) != excluded) continue;
      if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      model_parameters_.push_back({.name = item.key(),
                                   .tensor = tensor,
                                   .excluded = excluded,
                                   .sparse = sparse.count(tensor.unsafeGetTensorImpl()) != 0});
    }
  }
  if (unknown.empty()) return;
  throw ConfigurationError(absl::StrCat("params_to_ignore names ", *unknown.begin(), ", which ",
                                        name(), " does not have"));
}

const CutProgram& GraphModuleBase::RequireProgram() const {
  if (FirstProgram() != nullptr) return *FirstProgram();
  throw ConfigurationError(
      absl::StrCat("the graph of ", name(),
                   " is not captured yet; give optimize_graph() example inputs, or run a forward "
                   "with gradients enabled"));
}

std::vector<std::vector<std::string>> GraphModuleBase::bucket_layout() const {
  const std::vector<PieceRow>& rows = RequireProgram().rows();
  std::map<std::string, const ModelParameter*> waiting;
  for (const ModelParameter& parameter : model_parameters_) {
    if (!parameter.ignored()) waiting[parameter.name] = &parameter;
  }
  std::vector<std::vector<std::string>> layout;
  std::map<Kind, size_t> last_of_kind;  // bucket
  const auto add = [&](const ModelParameter& parameter, std::map<Kind, size_t>& buckets) {
    if (parameter.sparse) {
      layout.push_back({parameter.name});
      return;
    }
    const Kind kind = KindOf(parameter.tensor);
    const auto [bucket, added] = buckets.try_emplace(kind, layout.size());
    if (added) layout.emplace_back();
    layout[bucket->second].push_back(parameter.name);
    last_of_kind[kind] = bucket->second;
  };
  for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
    std::map<Kind, size_t> buckets;
    for (const std::string& name : row->parameters) {
      const auto parameter = waiting.extract(name);
      if (!parameter.empty()) add(*parameter.mapped(), buckets);
    }
  }
  for (const ModelParameter& parameter : model_parameters_) {
    if (waiting.count(parameter.name) != 0) add(parameter, last_of_kind);
  }
  return layout;
}

std::string GraphModuleBase::describe() const {
  return PieceTable(name(), RequireProgram().rows());
}

std::string GraphModuleBase::describe_as_json() const {
  return PiecesAsJson(name(), RequireProgram().rows());
}

void AppendToKey(const c10::IValue& value, std::vector<int64_t>& key) {
  if (value.isTensor()) return AppendTensor(value.toTensor(), key);
  if (value.isNone()) return key.push_back(kNone);
  if (value.isString()) return AppendText(value.toStringRef(), key);
  if (value.isBool()) return AppendNumber(0, value.toBool(), key);
  if (value.isInt()) return AppendNumber(1, value.toInt(), key);
  if (value.isDouble()) return AppendNumber(2, BitsOf(value.toDouble()), key);
  if (value.isDevice()) return AppendText(value.toDevice().str(), key);
  key.push_back(kSequence);
  if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) AppendToKey(element, key);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) AppendToKey(element, key);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      AppendToKey(entry.key(), key);
      AppendToKey(entry.value(), key);
    }
  } else {
    throw ConfigurationError(absl::StrCat(
        "an argument of the type ", value.tagKind(),
        "; the forward of an optimized module takes tensors, numbers, strings and containers"));
  }
  key.push_back(kEnd);
}

TracedModuleBase::TracedModuleBase(std::shared_ptr<torch::nn::Module> original,
                                   const GraphOptions& options)
    : GraphModuleBase(original->name(), options),
      original_(original),
      modules_(original->modules(/*include_self=*/false)) {
  marks_seen_ = ModuleMarks::OfProcess().changes();
  RefuseStatisticsLayers(*original_);
  const auto parameters = original_->named_parameters(/*recurse=*/false);
  for (const auto& item : parameters) {
    register_parameter(item.key(), item.value(), item.value().requires_grad());
  }
  const auto buffers = original_->named_buffers(/*recurse=*/false);
  for (const auto& item : buffers) register_buffer(item.key(), item.value());
  const auto children = original_->named_children();
  for (const auto& item : children) register_module(item.key(), item.value());
  ListParameters(NnModuleView(original_).sparse_parameters());
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const ModelParameter& parameter : model_parameters()) {
    seen.insert(parameter.tensor.unsafeGetTensorImpl());
    state_.push_back({parameter.name, parameter.tensor});
  }
  const auto all_buffers = original_->named_buffers();
  for (const auto& item : all_buffers) {
    if (!item.value().defined()) continue;
    if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
    state_.push_back({item.key(), item.value()});
    buffers_of_state_.push_back(item.value());
  }
}

void TracedModuleBase::to(torch::Device device, torch::Dtype dtype, bool non_blocking) {
  original_->to(device, dtype, non_blocking);
}
void TracedModuleBase::to(torch::Dtype dtype, bool non_blocking) {
  original_->to(dtype, non_blocking);
}
void TracedModuleBase::to(torch::Device device, bool non_blocking) {
  original_->to(device, non_blocking);
}
void TracedModuleBase::save(torch::serialize::OutputArchive& archive) const {
  original_->save(archive);
}
void TracedModuleBase::load(torch::serialize::InputArchive& archive) { original_->load(archive); }
void TracedModuleBase::pretty_print(std::ostream& stream) const { original_->pretty_print(stream); }

bool TracedModuleBase::RunsGraph() {
  return c10::GradMode::is_enabled() && !torch::jit::tracer::isTracing();
}

const CutProgram* TracedModuleBase::FirstProgram() const {
  return programs_.empty() ? nullptr : programs_[0]->program.get();
}

void TracedModuleBase::AppendState(std::vector<int64_t>& key) const {
  key.push_back(original_->is_training());
  for (const auto& module : modules_) key.push_back(module->is_training());
  for (const NamedState& item : state_) AppendTensor(item.tensor, key);
  key.push_back(at::autocast::is_autocast_enabled(at::kCPU));
  key.push_back(at::autocast::is_autocast_enabled(at::getAccelerator().value_or(at::kCUDA)));
}

// convert_sync_batchnorm() may have come after the constructor.
void TracedModuleBase::RefuseNewStatisticsLayers() {
  const int64_t changes = ModuleMarks::OfProcess().changes();
  if (changes == marks_seen_) return;
  RefuseStatisticsLayers(*original_);
  marks_seen_ = changes;
}

const TracedModuleBase::Program* TracedModuleBase::ProgramFor(Call call,
                                                              const TypedForward& forward) {
  if (torch::jit::tracer::isTracing()) {
    throw ConfigurationError(absl::StrCat("a capture of ", name(),
                                          " inside of the forward of a module that is captured; "
                                          "call capture() outside of a forward"));
  }
  RefuseNewStatisticsLayers();
  AppendState(call.key);
  for (const auto& program : programs_) {
    if (program->key == call.key) return program.get();
  }
  if (!MayAddGraph("shapes, types and modes")) return nullptr;
  auto program = std::make_unique<Program>();
  std::vector<at::Tensor> defined;
  for (const at::Tensor& tensor : call.tensors) {
    if (tensor.defined()) defined.push_back(tensor);
  }
  const auto traced = [&](std::vector<at::Tensor> arguments) {
    std::vector<at::Tensor> tensors;
    auto next = arguments.begin();
    for (const at::Tensor& tensor : call.tensors) {
      tensors.push_back(tensor.defined() ? *next++ : at::Tensor());
    }
    arguments.clear();
    std::vector<at::Tensor> results;
    for (at::Tensor& result : forward(std::move(tensors), program->result)) {
      program->defined.push_back(result.defined());
      if (result.defined()) results.push_back(std::move(result));
    }
    return results;
  };
  CapturedGraph captured = TraceForward(name(), traced, defined, state_, buffers_of_state_,
                                        options().allow_unregistered_tensors());
  program->program = std::make_unique<CutProgram>(std::move(captured), model_parameters(),
                                                  options(), /*tolerant=*/!programs_.empty());
  program->key = std::move(call.key);
  programs_.push_back(std::move(program));
  return programs_.back().get();
}

std::vector<at::Tensor> TracedModuleBase::Run(const Program& program,
                                              std::vector<at::Tensor> tensors) {
  std::vector<c10::IValue> arguments;
  for (at::Tensor& tensor : tensors) {
    if (tensor.defined()) arguments.emplace_back(std::move(tensor));
  }
  std::vector<c10::IValue> outputs = program.program->Run(std::move(arguments));
  std::vector<at::Tensor> results;
  auto next = outputs.begin();
  for (const bool defined : program.defined) {
    results.push_back(defined ? std::move(*next++).toTensor() : at::Tensor());
  }
  return results;
}

}  // namespace ddp::internal
