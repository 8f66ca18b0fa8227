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

#include "ddp/tensor_traversal.h"

namespace ddp {

// Options of checkpoint().
struct CheckpointOptions {
  // Selects one of the two kinds below; the difference matters to DistributedDataParallel.
  bool use_reentrant = false;

  // When true, the recomputation draws the same random numbers as the forward (dropout!). Covers
  // LibTorch's operations on the CPU that run on the segment's thread, and the generator of every
  // device that holds inputs or parameters. Other threads may draw meanwhile: the CPU's default
  // generator is never set back, so that no number comes twice. A device's generator is set back
  // for the time of the recomputation. Costs copies of the generators' states; switch it off where
  // nothing is random.
  bool preserve_rng_state = true;

  // Leaf tensors with gradients that a function uses besides its inputs; for the non-reentrant kind
  // only. A module's own parameters are found without this; add those that it borrows from
  // elsewhere.
  std::vector<at::Tensor> parameters = {};
};

// Runs a segment of a model without keeping its activations. The backward runs the segment again to
// get them. This saves memory and costs time: the segment keeps only its inputs, and its forward
// runs once more.
//
//   at::Tensor h = ddp::checkpoint(block, x);           // block: a module's holder or shared_ptr
//   at::Tensor y = ddp::checkpoint({.parameters = {w}}, [w](at::Tensor h) { ... }, h);
//
// The segment is a module (its forward is called) or a function. The graph of its outputs keeps the
// segment with all that it captures: capture by value. The segment runs once in the forward,
// without recording gradients, and once more in each backward. It must compute the same each time.
// Its side effects (running statistics of a batch norm, counters) happen each time. A SyncBatchNorm
// (ddp/nn) is an exception: its running statistics change in the forward only.
//
// Inputs: tensors; optionals, vectors, pairs and tuples of tensors; and any copyable values without
// tensors. Outputs: any type that for_each_tensor looks into; its tensors are inputs, or made by
// the segment in this call. Gradients equal those without a checkpoint bit for bit, where the
// operations are deterministic and each parameter is used in one segment. The recomputation uses
// the autocast state of the forward. Segments may be nested and repeated, and retain_graph is
// allowed. When no gradients are recorded, checkpoint() only calls the segment.
//
// Two kinds:
// - Non-reentrant: the default, which works with every option of DistributedDataParallel. The
//   segment's parameters are part of the model's graph. Each gets one gradient per backward, when
//   all of its uses are done. The search for unused parameters sees them; torch::autograd::grad()
//   and create_graph work. A parameter that the segment did not use gets an undefined gradient.
// - Reentrant: the backward runs a second backward inside, where the parameters' gradients
//   accumulate. Each run of a segment gives each of its parameters one gradient, and the model's
//   graph does not show the parameters. At least one input must require a gradient. With
//   DistributedDataParallel, set static_graph, unless every segment is used once, no parameter is
//   shared with other segments, and no parameter goes unused. find_unused_parameters does not work:
//   it takes all parameters of the segments for unused. Use this kind only for code that relies on
//   the second backward.
//
// Throws ConfigurationError when:
// - a reentrant segment has no input that requires a gradient;
// - the segment changes an input in place;
// - the segment returns other outputs in the recomputation (thrown by the backward);
// - the segment uses a tensor that requires a gradient but is neither an input nor a parameter
//   (thrown by the backward). Such a tensor would get no gradient. The reentrant kind does not
//   check this: there the tensor gets one;
// - a reentrant segment is in a backward with create_graph or with the argument `inputs`, or in
//   torch::autograd::grad() (thrown by the backward);
// - CheckpointOptions::parameters has a tensor that requires a gradient and is not a leaf.
//
// Thread-compatible. While a segment is recomputed, no other thread may run modules with its
// parameters.
template <typename Segment, typename... Inputs>
auto checkpoint(const CheckpointOptions& options, const Segment& segment, const Inputs&... inputs);

template <typename Segment, typename... Inputs>
requires(!std::is_same_v<Segment, CheckpointOptions>) auto checkpoint(const Segment& segment,
                                                                      const Inputs&... inputs) {
  return checkpoint(CheckpointOptions(), segment, inputs...);
}

namespace internal::checkpointing {

using Tensors = std::vector<at::Tensor>;

// A function from inputs to outputs; both without undefined tensors.
using Function = std::function<Tensors(const Tensors& inputs)>;

Tensors Run(const CheckpointOptions& options, Function function, const Tensors& inputs);

// Returns a defined tensor without elements.
at::Tensor Placeholder();

// True for types whose copies share no tensors with the original: replacing a tensor in a copy does
// not change the original.
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

// Replaces the defined tensors in `value` by `tensors`, in order.
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
  // The arguments with placeholders for their tensors. The function must not keep `tensors`: the
  // graph keeps them, and frees them after the backward.
  Arguments places(inputs...);
  checkpointing::Replace(places,
                         checkpointing::Tensors(tensors.size(), checkpointing::Placeholder()));
  // The output of the first run; its tensors are replaced by those of the graph.
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
