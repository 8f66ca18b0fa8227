#include "ddp/graph/trace_capture.h"

#include <algorithm>
#include <array>
#include <exception>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_set>
#include <utility>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/equal.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/dead_code_elimination.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"

namespace ddp::internal {
namespace {

namespace jit = torch::jit;

constexpr std::array<absl::string_view, 5> kGivesValues = {
    "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose"};

// The sizes of their results depend on values. So do those of kMayGiveSizes with some arguments,
// for which they call aten::nonzero.
constexpr std::array<absl::string_view, 12> kGivesSizes = {"aten::nonzero",
                                                           "aten::nonzero_numpy",
                                                           "aten::argwhere",
                                                           "aten::masked_select",
                                                           "aten::_unique",
                                                           "aten::_unique2",
                                                           "aten::unique_dim",
                                                           "aten::unique_consecutive",
                                                           "aten::unique_dim_consecutive",
                                                           "aten::bincount",
                                                           "aten::histogramdd",
                                                           "aten::_pack_padded_sequence"};
constexpr std::array<absl::string_view, 3> kMayGiveSizes = {"aten::index", "aten::_unsafe_index",
                                                            "aten::where"};

bool Contains(const auto& names, absl::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// True when the operation, as it is called, changes a tensor.
bool Writes(const at::RecordFunction& function) {
  const auto operation = function.operator_name();
  if (!operation.has_value()) return true;
  const auto handle = c10::Dispatcher::singleton().findSchema(*operation);
  return !handle.has_value() || handle->schema().is_mutable();
}

std::string ShapeOf(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << tensor.sizes();
  return text.str();
}

// Watches the operations of this thread while it lives. A callback must not throw: LibTorch would
// drop the exception. So the watch keeps the first operation that a graph cannot hold.
class OperationWatch {
 public:
  OperationWatch() {
    CHECK_EQ(current_, nullptr);
    current_ = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&OnStart, &OnEnd)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  }
  ~OperationWatch() {
    at::removeCallback(handle_);
    current_ = nullptr;
  }
  OperationWatch(const OperationWatch&) = delete;
  OperationWatch& operator=(const OperationWatch&) = delete;

  // "aten::item gives ...", or "".
  const std::string& problem() const { return problem_; }
  // True for a tensor whose memory has values of C++ code and nothing else, such as the result of
  // torch::tensor({...}), which the tracer does not see. So it is a constant of the graph.
  bool IsLiteral(const at::Tensor& tensor) const {
    return tensor.has_storage() && literals_.count(tensor.storage().unsafeGetStorageImpl()) != 0;
  }

  // Returns the operations whose results are still in use, without those that `known` accepts.
  // Destroy the results of the forward first.
  std::vector<std::string> Kept(const std::unordered_set<const c10::TensorImpl*>& known) const {
    std::vector<std::string> kept;
    for (const auto& [name, weak] : results_) {
      const auto tensor = weak.lock();
      if (!tensor.defined() || known.count(tensor.get()) != 0) continue;
      kept.push_back(absl::StrCat("a result of ", name, ", ", ShapeOf(at::Tensor(tensor))));
    }
    return kept;
  }

 private:
  static std::unique_ptr<at::ObserverContext> OnStart(const at::RecordFunction& function) {
    OperationWatch* watch = current_;
    if (watch == nullptr || !watch->problem_.empty()) return nullptr;
    const absl::string_view name = function.name();
    const bool traced = IsTraced();
    if (traced) watch->traced_ = std::string(name);
    if (traced ? Contains(kGivesSizes, name) || (name == "aten::repeat_interleave" &&
                                                 function.overload_name() != kRepeatsAreANumber)
               : name == "aten::nonzero" && Contains(kMayGiveSizes, watch->traced_)) {
      watch->problem_ = absl::StrCat(
          watch->traced_,
          " gives a result whose size depends on the values of tensors, while a graph keeps the "
          "sizes that C++ code reads");
    }
    // Operations inside of another one, which the tracer does not see, are part of that one.
    if (!traced) return nullptr;
    if (Contains(kGivesValues, name)) {
      watch->problem_ = absl::StrCat(
          name, " gives C++ code a value of a tensor, which is another one in every forward");
    } else if (!c10::GradMode::is_enabled() && !FillsWithANumber(function)) {  // see FindLiteral()
      watch->RefuseWithoutGradients(name);
    }
    return nullptr;
  }

  static void OnEnd(const at::RecordFunction& function, at::ObserverContext*) {
    OperationWatch* watch = current_;
    if (watch == nullptr) return;
    for (const c10::IValue& output : function.outputs()) {
      if (output.isTensor()) watch->Add(function.name(), output.toTensor());
      if (!output.isTensorList()) continue;
      for (const at::Tensor& tensor : output.toTensorVector()) watch->Add(function.name(), tensor);
    }
    if (!jit::tracer::isTracing()) return;
    for (const c10::IValue& output : function.outputs()) {
      if (output.isTensor()) watch->FindLiteral(function, output.toTensor());
    }
  }

  static bool FillsWithANumber(const at::RecordFunction& function) {
    return absl::string_view(function.name()) == "aten::fill_" &&
           absl::string_view(function.overload_name()) == "Scalar";
  }

  static bool IsTraced() {
    return jit::tracer::isTracing() &&
           !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Tracer);
  }

  void RefuseWithoutGradients(absl::string_view name) {
    problem_ = absl::StrCat(
        name,
        " runs with gradients disabled, under a NoGradGuard or in a torch::autograd::Function");
  }

  // Keeps literals_ right. torch::tensor() is `empty`, and a `fill_` with a number for each element
  // or a copy from memory, which is no operation.
  void FindLiteral(const at::RecordFunction& function, const at::Tensor& output) {
    if (!output.defined() || !output.has_storage()) return;
    const absl::string_view name = function.name();
    const c10::Storage& storage = output.storage();
    const bool empties = name.substr(0, 11) == "aten::empty";
    if (empties) {
      literals_.insert(storage.unsafeGetStorageImpl());
      memory_.emplace_back(storage.getWeakStorageImpl());
    } else if (FillsWithANumber(function)) {
      if (IsTraced() && !c10::GradMode::is_enabled() && !IsLiteral(output) && problem_.empty()) {
        RefuseWithoutGradients(name);
      }
    } else if (Writes(function)) {
      literals_.erase(storage.unsafeGetStorageImpl());
    }
  }

  void Add(const char* name, const at::Tensor& tensor) {
    if (!tensor.defined() || !seen_.insert(tensor.unsafeGetTensorImpl()).second) return;
    results_.push_back({name, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                                  tensor.getIntrusivePtr())});
  }

  static constexpr absl::string_view kRepeatsAreANumber = "self_int";

  static thread_local OperationWatch* current_;
  at::CallbackHandle handle_ = 0;
  std::string problem_;
  std::string traced_;                               // the latest operation that the tracer saw
  std::unordered_set<const c10::TensorImpl*> seen_;  // results
  std::unordered_set<const c10::StorageImpl*> literals_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> memory_;  // so no address is used twice
  std::vector<
      std::pair<std::string, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>>
      results_;
};

thread_local OperationWatch* OperationWatch::current_ = nullptr;

// Restores the values of tensors when it is destroyed.
class ValuesGuard {
 public:
  explicit ValuesGuard(const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      saved_.push_back({tensor, tensor.detach().clone(), tensor._version()});
    }
  }
  ~ValuesGuard() {
    const c10::NoGradGuard no_grad;
    for (Saved& saved : saved_) {
      try {
        PutBack(saved);
      } catch (const std::exception& error) {
        LOG(ERROR) << "a value that a trace has changed cannot be put back: " << error.what();
      }
    }
  }
  ValuesGuard(const ValuesGuard&) = delete;
  ValuesGuard& operator=(const ValuesGuard&) = delete;

 private:
  struct Saved {
    at::Tensor tensor, value;
    int64_t version;
  };

  // A write would make the tensor useless for a backward that waits for it. A batch norm writes its
  // running statistics without a new version, so they get their values back without one.
  static void PutBack(Saved& saved) {
    if (saved.tensor._version() == saved.version) {
      if (!at::equal(saved.tensor, saved.value)) saved.tensor.variable_data().copy_(saved.value);
    } else if (saved.tensor.sizes() == saved.value.sizes()) {
      saved.tensor.copy_(saved.value);
    } else {
      saved.tensor.set_data(saved.value);
    }
  }

  std::vector<Saved> saved_;
};

// Restores the random generators of the CPU and of the devices of `tensors`.
class GeneratorsGuard {
 public:
  explicit GeneratorsGuard(const std::vector<NamedState>& state) {
    Save(at::Device(at::kCPU));
    for (const NamedState& item : state) {
      if (at::isAccelerator(item.tensor.device().type())) Save(item.tensor.device());
    }
  }
  ~GeneratorsGuard() {
    for (const auto& [generator, value] : saved_) {
      at::Generator target = generator;
      const std::lock_guard<std::mutex> lock(target.mutex());
      target.set_state(value);
    }
  }
  GeneratorsGuard(const GeneratorsGuard&) = delete;
  GeneratorsGuard& operator=(const GeneratorsGuard&) = delete;

 private:
  void Save(at::Device device) {
    if (!devices_.insert({static_cast<int>(device.type()), device.index()}).second) return;
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    saved_.push_back({generator, generator.get_state()});
  }
  std::set<std::pair<int, int>> devices_;
  std::vector<std::pair<at::Generator, at::Tensor>> saved_;
};

// Returns a tensor of the same values, sizes, strides and requires_grad in memory of its own. Like
// the argument, it is a leaf or not.
at::Tensor CopyOf(const at::Tensor& argument) {
  at::Tensor copy;
  const at::Tensor detached = argument.detach();
  if (argument.layout() != at::kStrided || argument.numel() == 0) {
    copy = detached.clone();
  } else {
    int64_t span = 1;
    for (int64_t i = 0; i < argument.dim(); ++i) {
      span += (argument.size(i) - 1) * argument.stride(i);
    }
    copy = detached.as_strided({span}, {1}, argument.storage_offset())
               .clone()
               .as_strided(argument.sizes(), argument.strides(), 0);
  }
  if (!argument.requires_grad()) return copy;
  copy = copy.detach().requires_grad_();
  return argument.is_leaf() ? copy : copy.view_as(copy);
}

// Refuses constants of the graph that are tensors from outside of the forward.
void CheckConstants(const std::string& name, const jit::Graph& graph, const OperationWatch& watch) {
  for (const jit::Node* node : graph.nodes()) {
    if (node->kind() != c10::prim::Constant) continue;
    const auto constant = jit::toIValue(node->output());
    if (!constant.has_value() || !constant->isTensor() || watch.IsLiteral(constant->toTensor()))
      continue;
    std::string reader = "nothing";
    if (!node->output()->uses().empty()) {
      reader = node->output()->uses()[0].user->kind().toQualString();
    }
    throw ConfigurationError(absl::StrCat(
        "the forward of ", name, " gives ", reader, " a tensor ", ShapeOf(constant->toTensor()),
        " that is neither an argument nor registered, so a graph would keep its present value; "
        "register it with register_buffer(), or set allow_unregistered_tensors"));
  }
}

// Refuses memory that the forward reads before an operation has written it: C++ code has, which the
// graph would not do.
void CheckMemory(const std::string& name, const jit::Graph& graph) {
  static const auto kTo = c10::Symbol::fromQualString("aten::to");
  for (const jit::Node* node : graph.nodes()) {
    if (absl::string_view(node->kind().toQualString()).substr(0, 11) != "aten::empty") continue;
    const auto type = node->output()->type()->cast<c10::TensorType>();
    if (type != nullptr && type->numel() == std::optional<size_t>(0)) continue;
    const jit::Use* first = nullptr;
    for (const jit::Use& use : node->output()->uses()) {
      if (first == nullptr || use.user->isBefore(first->user)) first = &use;
    }
    if (first == nullptr) continue;
    const c10::FunctionSchema* schema = first->user->maybeSchema();
    const bool is_view_or_write = schema != nullptr && first->user->kind() != kTo &&
                                  first->offset < schema->arguments().size() &&
                                  schema->arguments()[first->offset].alias_info() != nullptr;
    if (is_view_or_write) continue;
    throw ConfigurationError(absl::StrCat(
        "the forward of ", name, " gives ", first->user->kind().toQualString(), " memory of ",
        node->kind().toQualString(),
        " that no operation has written, so a graph would have other values; give "
        "torch::tensor() a vector of the tensor's own type, and convert the tensor with to()"));
  }
}

// Refuses hooks on the way from the results to the arguments and the state: later runs of the graph
// would not call them. The hooks of the state itself stay.
void RefuseHooks(const std::string& name, const jit::Stack& results,
                 const std::vector<NamedState>& state) {
  std::unordered_set<const torch::autograd::Node*> seen;
  for (const NamedState& item : state) {
    seen.insert(torch::autograd::impl::try_get_grad_accumulator(item.tensor).get());
  }
  std::vector<torch::autograd::Node*> waiting;
  const auto add = [&](torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) waiting.push_back(node);
  };
  for (const c10::IValue& result : results) add(result.toTensor().grad_fn().get());
  while (!waiting.empty()) {
    torch::autograd::Node& node = *waiting.back();
    waiting.pop_back();
    if (!node.tensor_pre_hooks().empty() || !node.pre_hooks().empty() ||
        !node.post_hooks().empty()) {
      throw ConfigurationError(absl::StrCat(
          "the forward of ", name, " registers a hook on a tensor, at ", node.name(),
          ", which a graph would not call; change the forward, or train the module without "
          "optimize_graph()"));
    }
    for (const torch::autograd::Edge& edge : node.next_edges()) add(edge.function.get());
  }
}

std::unordered_set<const c10::TensorImpl*> TensorsOf(const jit::Graph& graph) {
  std::unordered_set<const c10::TensorImpl*> tensors;
  for (const jit::Node* node : graph.nodes()) {
    if (node->kind() != c10::prim::Constant) continue;
    const auto constant = jit::toIValue(node->output());
    if (constant.has_value() && constant->isTensor()) {
      tensors.insert(constant->toTensor().unsafeGetTensorImpl());
    }
  }
  return tensors;
}

}  // namespace

CapturedGraph TraceForward(const std::string& name, const TracedForward& forward,
                           const std::vector<at::Tensor>& arguments,
                           const std::vector<NamedState>& state,
                           const std::vector<at::Tensor>& buffers, bool allow_unregistered) {
  const ValuesGuard values(buffers);
  const GeneratorsGuard generators(state);
  const c10::AutoGradMode with_grad(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  jit::Stack inputs;
  for (const at::Tensor& argument : arguments) inputs.push_back(CopyOf(argument));
  std::unordered_set<const c10::TensorImpl*> known;
  for (const NamedState& item : state) {
    inputs.push_back(item.tensor);
    known.insert(item.tensor.unsafeGetTensorImpl());
  }

  CapturedGraph captured{.name = name, .arguments = arguments.size()};
  for (const NamedState& item : state)
    captured.state.push_back({.name = item.name, .value = item.tensor});
  OperationWatch watch;
  const auto traced = [&](jit::Stack stack) {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < arguments.size(); ++i) tensors.push_back(stack[i].toTensor());
    jit::Stack results;
    for (at::Tensor& result : forward(std::move(tensors))) results.emplace_back(std::move(result));
    return results;
  };
  auto [tracing, results] = jit::tracer::trace(
      std::move(inputs), traced, [](const at::Tensor&) { return ""; },
      /*strict=*/true, /*force_outplace=*/false);
  captured.graph = tracing->graph;
  tracing.reset();
  if (watch.problem().empty()) RefuseHooks(name, results, state);
  results.clear();
  if (!watch.problem().empty()) {
    throw ConfigurationError(
        absl::StrCat("the forward of ", name, " cannot become a graph: ", watch.problem(),
                     "; change the forward, or train the module without optimize_graph()"));
  }
  CheckMemory(name, *captured.graph);
  if (!allow_unregistered) CheckConstants(name, *captured.graph, watch);
  known.merge(TensorsOf(*captured.graph));
  const std::vector<std::string> kept = watch.Kept(known);
  if (!kept.empty()) {
    throw ConfigurationError(absl::StrCat(
        "the forward of ", name, " keeps ", kept[0],
        ", outside of its result. A graph would not; write into a registered buffer instead"));
  }
  jit::EliminateDeadCode(captured.graph);
  return captured;
}

}  // namespace ddp::internal
