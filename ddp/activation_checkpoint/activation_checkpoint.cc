#include "ddp/activation_checkpoint.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/custom_class.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/common/error.h"
#include "ddp/common/torch_versions.h"
#include "ddp/random/random_replay.h"
#include "ddp/statistics/statistics_context.h"

namespace ddp {
namespace internal::checkpointing {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch_versions::NodePtr;
namespace impl = torch::autograd::impl;

bool RequiresGrad(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

// Returns `tensors` without repetitions, because autograd gives a tensor one place in the graph.
// `places`: the index in the result for each of `tensors`.
Tensors Unique(const Tensors& tensors, std::vector<size_t>* places = nullptr) {
  Tensors unique;
  std::unordered_map<const c10::TensorImpl*, size_t> seen;
  for (const at::Tensor& tensor : tensors) {
    const auto [found, is_new] = seen.try_emplace(tensor.unsafeGetTensorImpl(), unique.size());
    if (is_new) unique.push_back(tensor);
    if (places != nullptr) places->push_back(found->second);
  }
  return unique;
}

std::string Describe(const at::Tensor& tensor) {
  return absl::StrCat(c10::toString(tensor.scalar_type()), "[",
                      absl::StrJoin(tensor.sizes().vec(), ", "), "]");
}

std::string Describe(const Tensors& tensors) {
  return absl::StrJoin(tensors, ", ", [](std::string* out, const at::Tensor& tensor) {
    out->append(Describe(tensor));
  });
}

// The states of the accelerators' random generators that a segment may use.
class RandomState {
 public:
  static RandomState Now(std::vector<at::Device> devices) {
    RandomState state;
    for (const at::Device& device : devices) {
      WithGenerator(device, [&](at::Generator& generator) {
        state.states_.emplace_back(device, generator.get_state());
      });
    }
    return state;
  }

  void Restore() const {
    for (const auto& item : states_) {
      WithGenerator(item.first,
                    [&](at::Generator& generator) { generator.set_state(item.second); });
    }
  }

  std::vector<at::Device> devices() const {
    std::vector<at::Device> devices;
    for (const auto& item : states_) devices.push_back(item.first);
    return devices;
  }

 private:
  template <typename F>
  static void WithGenerator(at::Device device, F&& f) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    generator.mutex().lock();
    try {
      f(generator);
    } catch (...) {
      generator.mutex().unlock();
      throw;
    }
    generator.mutex().unlock();
  }

  std::vector<std::pair<at::Device, at::Tensor>> states_;
};

// The autocast state of this thread. The cache is off around a segment: a copy of a weight made
// without gradients must not be used where gradients are needed, nor a copy of another graph in the
// recomputation.
class Autocast {
 public:
  static Autocast Now() {
    Autocast state;
    for (Device& device : state.devices_) {
      device.enabled = at::autocast::is_autocast_enabled(device.type);
      device.dtype = at::autocast::get_autocast_dtype(device.type);
    }
    state.cache_ = at::autocast::is_autocast_cache_enabled();
    return state;
  }

  Autocast WithoutCache() const {
    Autocast state = *this;
    state.cache_ = false;
    return state;
  }

  void Restore() const {
    for (const Device& device : devices_) {
      at::autocast::set_autocast_enabled(device.type, device.enabled);
      at::autocast::set_autocast_dtype(device.type, device.dtype);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  struct Device {
    at::DeviceType type;
    bool enabled = false;
    at::ScalarType dtype = at::kFloat;
  };
  Device devices_[2] = {{at::kCPU}, {at::getAccelerator().value_or(at::kCUDA)}};
  bool cache_ = true;
};

// Restores a state of random generators or of autocast, and restores the previous state at its end.
template <typename State>
class [[nodiscard]] Within {
 public:
  Within(const State& state, State before) : before_(std::move(before)) { state.Restore(); }
  ~Within() { before_.Restore(); }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

 private:
  const State before_;
};

// Returns a node in front of `tensor`, at which gradients of the recomputation stop. They would
// otherwise run the model's hooks a second time. With create_graph, the node's edge continues the
// graph.
NodePtr StopBefore(const at::Tensor& tensor) {
  auto stop = torch_versions::MakeNode<torch::autograd::Identity>();
  stop->add_next_edge(impl::gradient_edge(tensor));
  stop->add_input_metadata(tensor);
  return stop;
}

// Records operations on the parameters as operations on their stops, while it lives.
class [[nodiscard]] StoppedParameters {
 public:
  explicit StoppedParameters(const Tensors& parameters) : parameters_(parameters) {
    for (const at::Tensor& parameter : parameters_) {
      NodePtr stop = StopBefore(parameter);
      // The stop's edge owns the accumulator.
      accumulators_.push_back(impl::try_get_grad_accumulator(parameter));
      impl::set_grad_accumulator(parameter, torch_versions::WeakNode(stop));
      stops_.push_back(std::move(stop));
    }
  }
  ~StoppedParameters() {
    for (size_t i = 0; i < stops_.size(); ++i) {
      impl::set_grad_accumulator(parameters_[i], torch_versions::WeakNode(accumulators_[i]));
    }
  }
  StoppedParameters(const StoppedParameters&) = delete;
  StoppedParameters& operator=(const StoppedParameters&) = delete;

  const std::vector<NodePtr>& stops() const { return stops_; }

 private:
  const Tensors& parameters_;
  std::vector<NodePtr> stops_;
  std::vector<NodePtr> accumulators_;
};

// The data that the backward needs. The graph's node owns it, together with the inputs.
struct Recomputation : torch::CustomClassHolder {
  Function function;
  bool reentrant = false;
  Tensors parameters;  // leaves that require a gradient, each once; empty if reentrant
  bool repeats_random = false;
  RandomNumbers random;  // of the CPU
  RandomState device_random;
  Autocast autocast;
  std::vector<StatisticsRanks> ranks;  // of the layers that need them, in the order of the forward
  std::string outputs;                 // types and shapes of the forward's outputs
  std::vector<size_t> places;          // of the function's outputs among the graph's outputs

  // Runs the function again, with gradients, and compares the form of its outputs. `markers`: see
  // StatisticsReplay.
  Tensors Run(const Tensors& inputs, Tensors* markers) const {
    const RandomReplay random_as_then(repeats_random ? &random : nullptr);
    const Within<RandomState> as_then(device_random, RandomState::Now(device_random.devices()));
    const Within<Autocast> cast_as_then(autocast.WithoutCache(), Autocast::Now());
    const StatisticsReplay ranks_as_then(ranks, markers);
    Tensors again = Unique(function(inputs));
    const std::string now = Describe(again);
    if (now == outputs) return again;
    throw ConfigurationError(absl::StrCat("a checkpointed segment returned ", now,
                                          " when it was recomputed in the "
                                          "backward, but ",
                                          outputs,
                                          " in the forward: it must do the same both times"));
  }
};

// The outputs of a recomputation that have a defined gradient, and these gradients.
struct Roots {
  torch::autograd::edge_list edges;
  Tensors gradients;
};

Roots DefinedRoots(const Tensors& outputs, const Tensors& gradients) {
  Roots roots;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
    roots.edges.push_back(impl::gradient_edge(outputs[i]));
    roots.gradients.push_back(gradients[i]);
  }
  return roots;
}

// Throws when the graph behind `roots` has other leaves than `stops`.
void CheckLeaves(const Roots& roots, const std::vector<NodePtr>& stops) {
  std::unordered_set<const Node*> seen;
  for (const NodePtr& stop : stops) seen.insert(stop.get());
  std::vector<Node*> left;
  for (const Edge& edge : roots.edges) left.push_back(edge.function.get());
  while (!left.empty()) {
    Node* node = left.back();
    left.pop_back();
    if (!seen.insert(node).second) continue;
    if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) {
      throw ConfigurationError(absl::StrCat(
          "a checkpointed segment depends on a tensor ", Describe(leaf->variable),
          " that requires a gradient and would not get one: it is neither an input nor one of the "
          "segment's parameters. Name it in CheckpointOptions::parameters, or pass what the "
          "segment uses of it as an input"));
    }
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid()) left.push_back(edge.function.get());
    }
  }
}

// Returns gradients of the inputs, then of the parameters; undefined where not needed or not
// reached.
Tensors Gradients(const Recomputation& recomputation, const Tensors& saved,
                  const Tensors& gradients, const std::function<bool(size_t)>& is_needed) {
  const bool create_graph = at::GradMode::is_enabled();
  std::vector<NodePtr> stops;  // null: no gradient
  Tensors inputs;
  for (const at::Tensor& tensor : saved) {
    inputs.push_back(tensor.variable_data());
    stops.push_back(tensor.requires_grad() ? StopBefore(tensor) : NodePtr());
    if (stops.back()) impl::set_gradient_edge(inputs.back(), {stops.back(), 0});
  }
  Tensors outputs;
  Tensors markers;
  {
    const StoppedParameters stopped(recomputation.parameters);
    stops.insert(stops.end(), stopped.stops().begin(), stopped.stops().end());
    const at::AutoGradMode with_gradients(true);
    outputs = recomputation.Run(inputs, &markers);
  }
  const Roots roots = DefinedRoots(outputs, gradients);
  std::vector<NodePtr> leaves = stops;
  for (const at::Tensor& marker : markers) leaves.push_back(impl::gradient_edge(marker).function);
  CheckLeaves(roots, leaves);
  torch::autograd::edge_list wanted;
  std::vector<size_t> places;
  for (size_t i = 0; i < stops.size(); ++i) {
    if (!stops[i] || !is_needed(i)) continue;
    wanted.emplace_back(stops[i], 0);
    places.push_back(i);
  }
  // A layer with a marker has collectives in the backward, although no gradient comes of them.
  for (const at::Tensor& marker : markers) wanted.push_back(impl::gradient_edge(marker));
  Tensors result(stops.size());
  if (roots.edges.empty() || wanted.empty()) return result;
  Tensors found = Engine::get_default_engine().execute(roots.edges, roots.gradients,
                                                       /*keep_graph=*/create_graph, create_graph,
                                                       /*accumulate_grad=*/false, wanted);
  for (size_t i = 0; i < places.size(); ++i) result[places[i]] = std::move(found[i]);
  return result;
}

// Returns gradients of the inputs; the parameters' gradients accumulate.
Tensors AccumulateGradients(const Recomputation& recomputation, const Tensors& saved,
                            const Tensors& gradients) {
  if (!Engine::get_default_engine().is_checkpoint_valid()) {
    throw ConfigurationError(
        "a reentrant checkpoint works in backward() alone, not in torch::autograd::grad() or a "
        "backward with inputs: set CheckpointOptions::use_reentrant to false");
  }
  if (at::GradMode::is_enabled()) {
    throw ConfigurationError(
        "a reentrant checkpoint has no second derivatives: set CheckpointOptions::use_reentrant "
        "to false, or call backward without create_graph");
  }
  Tensors inputs;
  Roots roots;
  {
    const at::AutoGradMode with_gradients(true);
    for (const at::Tensor& tensor : saved) {
      inputs.push_back(tensor.variable_data());
      if (tensor.requires_grad()) inputs.back().requires_grad_();
    }
    Tensors markers;  // the graph reaches them
    roots = DefinedRoots(recomputation.Run(inputs, &markers), gradients);
  }
  if (!roots.edges.empty()) {
    Engine::get_default_engine().execute(roots.edges, roots.gradients, /*keep_graph=*/false,
                                         /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  Tensors result;
  for (const at::Tensor& input : inputs) result.push_back(input.grad());
  return result;
}

class CheckpointFunction : public torch::autograd::Function<CheckpointFunction> {
 public:
  // The parameters are arguments so that the node has edges to them.
  static Tensors forward(torch::autograd::AutogradContext* context, at::TensorList inputs,
                         at::TensorList parameters,
                         c10::intrusive_ptr<Recomputation> recomputation) {
    std::vector<int64_t> versions;
    for (const at::Tensor& input : inputs) versions.push_back(input._version());
    Tensors outputs;
    {
      const Within<Autocast> uncached(recomputation->autocast.WithoutCache(),
                                      recomputation->autocast);
      const StatisticsRecording notes(&recomputation->ranks);
      const RandomRecording numbers(recomputation->repeats_random ? &recomputation->random
                                                                  : nullptr);
      outputs = Unique(recomputation->function(inputs.vec()), &recomputation->places);
    }
    for (size_t i = 0; i < versions.size(); ++i) {
      if (inputs[i]._version() == versions[i]) continue;
      throw ConfigurationError(absl::StrCat(
          "a checkpointed segment changed its input ", i, ", ", Describe(inputs[i]),
          ", in place, so that it cannot be recomputed from it: let it work on a clone"));
    }
    recomputation->outputs = Describe(outputs);
    context->save_for_backward(inputs.vec());
    context->saved_data["recomputation"] = c10::IValue::make_capsule(recomputation);
    context->set_materialize_grads(false);
    return outputs;
  }

  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
    const auto holder = context->saved_data["recomputation"].toCapsule();
    const auto& recomputation = static_cast<const Recomputation&>(*holder);
    const Tensors saved = context->get_saved_variables();
    Tensors result;
    if (std::any_of(gradients.begin(), gradients.end(),
                    [](const at::Tensor& gradient) { return gradient.defined(); })) {
      result = recomputation.reentrant ? AccumulateGradients(recomputation, saved, gradients)
                                       : Gradients(recomputation, saved, gradients, [&](size_t i) {
                                           return context->needs_input_grad(i);
                                         });
    }
    result.resize(saved.size() + recomputation.parameters.size() + 1);  // the recomputation too
    return result;
  }
};

Tensors TrainableParameters(const Tensors& parameters) {
  Tensors trainable;
  for (const at::Tensor& parameter : Unique(parameters)) {
    if (!parameter.defined() || !parameter.requires_grad()) continue;
    if (!parameter.is_leaf()) {
      throw ConfigurationError(absl::StrCat("CheckpointOptions::parameters has a tensor ",
                                            Describe(parameter),
                                            " that is computed from others: pass it as an input"));
    }
    trainable.push_back(parameter);
  }
  return trainable;
}

// Returns the accelerators whose generators the segment may use, as far as its tensors show.
std::vector<at::Device> RandomDevices(const CheckpointOptions& options, const Tensors& inputs) {
  if (!options.preserve_rng_state) return {};
  std::vector<at::Device> devices;
  for (const Tensors* tensors : {&inputs, &options.parameters}) {
    for (const at::Tensor& tensor : *tensors) {
      if (at::isAccelerator(tensor.device().type()) &&
          std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
        devices.push_back(tensor.device());
      }
    }
  }
  return devices;
}

}  // namespace

at::Tensor Placeholder() { return at::empty({0}); }

Tensors Run(const CheckpointOptions& options, Function function, const Tensors& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto recomputation = c10::make_intrusive<Recomputation>();
  if (options.use_reentrant) {
    if (!RequiresGrad(inputs)) {
      throw ConfigurationError(
          "no input of a reentrant checkpoint requires a gradient, so the segment's parameters "
          "would get none: set CheckpointOptions::use_reentrant to false, or call "
          "requires_grad_() on an input");
    }
  } else {
    recomputation->parameters = TrainableParameters(options.parameters);
    if (recomputation->parameters.empty() && !RequiresGrad(inputs)) return function(inputs);
  }
  recomputation->function = std::move(function);
  recomputation->reentrant = options.use_reentrant;
  recomputation->repeats_random = options.preserve_rng_state;
  recomputation->device_random = RandomState::Now(RandomDevices(options, inputs));
  recomputation->autocast = Autocast::Now();
  const Tensors outputs = CheckpointFunction::apply(
      at::TensorList(inputs), at::TensorList(recomputation->parameters), recomputation);
  Tensors result;
  for (const size_t place : recomputation->places) result.push_back(outputs[place]);
  return result;
}

}  // namespace internal::checkpointing
}  // namespace ddp
