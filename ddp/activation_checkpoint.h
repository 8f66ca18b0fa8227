#ifndef DDP_ACTIVATION_CHECKPOINT_H_
#define DDP_ACTIVATION_CHECKPOINT_H_

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ddp/option.h"
#include "ddp/tensor_traversal.h"

namespace ddp {

struct CheckpointOptions {
  using Self = CheckpointOptions;

  // Which of the two kinds below; their differences matter to DistributedDataParallel.
  DDP_OPTION(use_reentrant, bool) = false;

  // Draws the same random numbers in the recomputation (dropout!) as in the forward: of the CPU's
  // generator and those of the GPUs on which inputs and parameters are. Costs a copy of their
  // states; switch it off where nothing is random.
  DDP_OPTION(preserve_rng_state, bool) = true;

  // Not reentrant only: the leaf tensors with gradient that a function uses beside its inputs. A
  // module's own parameters are known without this; give those that it borrows from elsewhere.
  DDP_OPTION(parameters, std::vector<at::Tensor>) = {};
};

// Runs a segment of a model without keeping its activations for the backward; the backward computes
// them again when it gets there. Memory for time: a segment costs its inputs and one more forward.
//
//   at::Tensor h = ddp::checkpoint(block, x);           // block: a module's holder or shared_ptr
//   at::Tensor y = ddp::checkpoint({.parameters = {w}}, [w](at::Tensor h) { ... }, h);
//
// The segment is a module (its forward is called) or a function. It is kept, with all it captures,
// until the graph of its outputs is gone: capture by value. It is called twice and must do the same
// both times; what it changes outside (running statistics of a batch norm, counters) changes
// twice. The first call is without gradients.
//
// Inputs: tensors; optionals, vectors, pairs and tuples of them; and any copyable values without
// tensors. Outputs: what for_each_tensor looks into, the tensors in it fresh ones of this call.
// The backward's gradients equal those without a checkpoint to the bit where the operations are
// deterministic; autocast is in the recomputation as it was in the forward. Nested and repeated
// segments and retain_graph are allowed. Without gradients to record, it just calls the segment.
//
// Two kinds:
// - Not reentrant, the default and right with every option of DistributedDataParallel. The
//   segment's parameters take part in the graph of the model: each gets one gradient per backward,
//   when all of its uses are done, unused-parameter search sees them, torch::autograd::grad() and
//   create_graph work. A parameter that the segment did not use gets an undefined gradient.
// - Reentrant: the backward runs a second backward inside, where the parameters' gradients
//   accumulate, so that there is one gradient for every use of a segment or parameter, and the
//   graph of the model does not show the parameters. With DistributedDataParallel it therefore
//   takes static_graph, unless every segment is used once and no parameter goes unused;
//   find_unused_parameters would take all parameters of the segments for unused. An input has to
//   require a gradient. Made for code that counts on that behavior.
//
// Errors: ConfigurationError if a reentrant segment has no input that requires a gradient, if the
// segment changes an input in place, gives other outputs the second time, or uses a tensor that
// requires a gradient but is neither an input nor among the parameters (its gradient would be lost;
// not found out when reentrant, where it just works); for a reentrant one also in a backward with
// create_graph or of torch::autograd::grad(). All but the first two come from the backward.
//
// Thread-compatible. While a segment is recomputed no other thread may run its parameters' modules.
template <typename Segment, typename... Inputs>
auto checkpoint(const CheckpointOptions& options, const Segment& segment, const Inputs&... inputs);

template <typename Segment, typename... Inputs>
requires(!std::is_same_v<Segment, CheckpointOptions>) auto checkpoint(const Segment& segment,
                                                                      const Inputs&... inputs) {
  return checkpoint(CheckpointOptions(), segment, inputs...);
}

namespace internal::checkpointing {

using Tensors = std::vector<at::Tensor>;

// Inputs to outputs; both without undefined tensors.
using Function = std::function<Tensors(const Tensors& inputs)>;

Tensors Run(const CheckpointOptions& options, Function function, const Tensors& inputs);

// A defined tensor without elements.
at::Tensor Placeholder();

// Copies of these share no tensors with the original: what is put into one stays there.
template <typename T>
constexpr bool kIsValue = !may_hold_tensors_v<T> || std::is_same_v<T, at::Tensor>;
template <typename T>
constexpr bool kIsValue<std::vector<T>> = kIsValue<T>;
template <typename T>
constexpr bool kIsValue<std::optional<T>> = kIsValue<T>;
template <typename... Ts>
constexpr bool kIsValue<std::tuple<Ts...>> = (kIsValue<Ts> && ...);
template <typename T, typename U>
constexpr bool kIsValue<std::pair<T, U>> = kIsValue<T>&& kIsValue<U>;

template <typename Segment, typename... Inputs>
auto Call(Segment& segment, Inputs&... inputs) {
  if constexpr (requires { segment->forward(inputs...); }) {
    return segment->forward(inputs...);
  } else {
    return segment(inputs...);
  }
}

template <typename T>
Tensors DefinedTensors(const T& value) {
  Tensors tensors;
  for_each_tensor(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) tensors.push_back(tensor);
  });
  return tensors;
}

// Puts `tensors` in the places of the defined ones.
template <typename T>
void Replace(T& value, const Tensors& tensors) {
  size_t next = 0;
  for_each_tensor(value, [&](at::Tensor& tensor) {
    if (tensor.defined()) tensor = tensors.at(next++);
  });
}

}  // namespace internal::checkpointing

template <typename Segment, typename... Inputs>
auto checkpoint(const CheckpointOptions& options, const Segment& segment, const Inputs&... inputs) {
  namespace checkpointing = internal::checkpointing;
  static_assert((checkpointing::kIsValue<std::decay_t<Inputs>> && ...),
                "an input of ddp::checkpoint is a tensor; an optional, vector, pair or tuple of "
                "tensors; or a value without tensors");
  using Arguments = std::tuple<std::decay_t<Inputs>...>;
  using Output = decltype(checkpointing::Call(std::declval<Segment&>(),
                                              std::declval<std::decay_t<Inputs>&>()...));
  static_assert(may_hold_tensors_v<Output>,
                "for_each_tensor finds no tensor in what the segment of ddp::checkpoint returns");
  CheckpointOptions all_options = options;
  if constexpr (requires { segment->parameters(); }) {
    for (const at::Tensor& parameter : segment->parameters()) {
      all_options.parameters.push_back(parameter);
    }
  }

  const checkpointing::Tensors tensors = checkpointing::DefinedTensors(std::tie(inputs...));
  // The arguments with empty tensors of the function's own in the places of `tensors`, which it
  // must not keep: the graph does, and frees them after the backward.
  Arguments places(inputs...);
  checkpointing::Replace(places,
                         checkpointing::Tensors(tensors.size(), checkpointing::Placeholder()));
  // The output of the first call, whose tensors become those that the graph knows.
  auto first = std::make_shared<std::optional<Output>>();
  auto function = [kept = Segment(segment), places,
                   weak = std::weak_ptr(first)](const checkpointing::Tensors& values) mutable {
    Arguments arguments = places;
    checkpointing::Replace(arguments, values);
    Output output =
        std::apply([&](auto&... all) { return checkpointing::Call(kept, all...); }, arguments);
    checkpointing::Tensors outputs = checkpointing::DefinedTensors(output);
    if (const auto keep = weak.lock()) *keep = std::move(output);
    return outputs;
  };
  checkpointing::Tensors outputs = checkpointing::Run(all_options, function, tensors);
  Output result = *std::move(*first);
  checkpointing::Replace(result, outputs);
  return result;
}

}  // namespace ddp

#endif  // DDP_ACTIVATION_CHECKPOINT_H_
