// optimize_graph: runs a model as a graph, cut into pieces whose gradients are buckets, so that the
// reduction of the first buckets overlaps the rest of the backward.
//
//   auto graph = ddp::optimize_graph(net, {.bucket_cap_mb = 4}, example_input);
//   std::cout << graph->describe();
//   ddp::DistributedDataParallel model(graph, group, {.bucket_layout = graph->bucket_layout()});
//
// The result is a torch::nn::Module that shares its parameters, buffers and modes with the original
// module, and has the same names. docs/graph.md says what a graph can hold.
#ifndef DDP_GRAPH_OPTIMIZE_GRAPH_H_
#define DDP_GRAPH_OPTIMIZE_GRAPH_H_

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "ddp/common/error.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/graph/graph_module.h"
#include "ddp/graph/graph_options.h"
#include "ddp/graph/script_module.h"
#include "ddp/tensor_traversal.h"

namespace ddp {
namespace internal {

// False for containers that an argument may not be: those that share their elements with their
// copies, and those whose copies may have another order.
template <typename T>
constexpr bool kIsPlainArgument = !std::is_same_v<T, c10::IValue>;
template <typename T>
constexpr bool kIsPlainArgument<c10::List<T>> = false;
template <typename Key, typename T>
constexpr bool kIsPlainArgument<c10::Dict<Key, T>> = false;
template <typename... Ts>
constexpr bool kIsPlainArgument<std::unordered_map<Ts...>> = false;
template <typename T>
constexpr bool kIsPlainArgument<std::vector<T>> = kIsPlainArgument<T>;
template <typename T>
constexpr bool kIsPlainArgument<std::optional<T>> = kIsPlainArgument<T>;
template <typename... Ts>
constexpr bool kIsPlainArgument<std::tuple<Ts...>> = (kIsPlainArgument<Ts> && ...);

// Returns true when a copy of `value` has the same tensors, not copies of their handles.
template <typename T>
bool SharesTensors(const T& value) {
  const auto defined = [](const T& of) {
    int count = 0;
    for_each_tensor(of, [&](const at::Tensor& tensor) { count += tensor.defined(); });
    return count;
  };
  const int before = defined(value);
  T copy = value;
  std::vector<at::Tensor> tensors;
  for_each_tensor(copy, [&](at::Tensor& tensor) {
    tensors.push_back(std::move(tensor));
    tensor = at::Tensor();
  });
  const bool shares = defined(value) != before;
  auto next = tensors.begin();
  for_each_tensor(copy, [&](at::Tensor& tensor) { tensor = std::move(*next++); });
  return shares;
}

}  // namespace internal

// A module written in C++ whose forward runs as a graph. The first forward with gradients enabled
// captures the graph with LibTorch's tracer. So does the first forward with another combination of
// - sizes, strides, types, devices and requires_grad of arguments, parameters and buffers;
// - the other arguments' values;
// - the train() or eval() mode of each submodule.
// A forward with gradients disabled runs the module itself.
//
// The forward must be the same function of arguments, parameters and buffers in every call: the
// graph keeps every other value that C++ code computed in the capture. Throws ConfigurationError
// where the capture finds something that a graph cannot hold; see trace_capture.h.
//
// Arguments are tensors, numbers, strings, and vectors, tuples and optionals of them. The result is
// any copyable type in which for_each_tensor() finds the tensors; its other parts keep their values
// of the capture.
//
// The set of modules, parameters and buffers must not change. Thread-compatible.
template <typename Net>
class GraphModule final : public internal::TracedModuleBase {
 public:
  GraphModule(std::shared_ptr<Net> original, const GraphOptions& options)
      : TracedModuleBase(original, options), original_(std::move(original)) {}

  // Runs the forward. Returns what the module's own forward returns, by value. An exception of the
  // module's own C++ code passes through the call that captures. In the other calls only operations
  // run. An operation that fails throws a std::runtime_error or c10::Error with its
  // message.
  template <typename... Inputs>
  auto forward(const Inputs&... inputs) {
    using Result = ResultOf<Inputs...>;
    if (!RunsGraph()) return Result(CallOriginal(inputs...));
    const Program* program = Captured(inputs...);
    if (program == nullptr) return Result(CallOriginal(inputs...));
    std::vector<at::Tensor> outputs = Run(*program, TensorsOf(inputs...));
    // The tensors go through the captured result: a copy of a map may have another order.
    Result& captured = *static_cast<Result*>(program->result.get());
    auto next = outputs.begin();
    for_each_tensor(captured, [&](at::Tensor& tensor) { tensor = std::move(*next++); });
    Result result = captured;
    for_each_tensor(captured, [](at::Tensor& tensor) { tensor = at::Tensor(); });
    return result;
  }

  // Captures the graph for these arguments, which run through the module's own forward once. The
  // values of buffers and random generators do not change.
  template <typename... Inputs>
  void capture(const Inputs&... inputs) {
    Captured(inputs...);
  }

  // Returns the module that was optimized.
  const std::shared_ptr<Net>& original() const { return original_; }

 private:
  template <typename... Inputs>
  using ResultOf = std::decay_t<decltype(std::declval<Net&>().forward(
      std::declval<std::decay_t<Inputs>&>()...))>;

  // The forward may take its arguments by value or by reference, const or not.
  template <typename... Inputs>
  auto CallOriginal(const Inputs&... inputs) {
    std::tuple<std::decay_t<Inputs>...> copies(inputs...);
    return std::apply(
        [this](auto&... copy) -> ResultOf<Inputs...> { return original_->forward(copy...); },
        copies);
  }

  template <typename Input>
  static void Append(const Input& input, std::vector<int64_t>& key) {
    if constexpr (std::is_enum_v<Input>) {
      internal::AppendToKey(static_cast<int64_t>(input), key);
    } else if constexpr (std::is_same_v<Input, bool>) {
      internal::AppendToKey(input, key);
    } else if constexpr (std::is_integral_v<Input>) {
      internal::AppendToKey(static_cast<int64_t>(input), key);
    } else if constexpr (std::is_floating_point_v<Input>) {
      internal::AppendToKey(static_cast<double>(input), key);
    } else {
      static_assert(std::constructible_from<c10::IValue, const Input&>,
                    "an optimized module takes tensors, numbers, strings, and vectors, "
                    "tuples and optionals of them");
      static_assert(internal::kIsPlainArgument<Input>,
                    "an optimized module takes vectors, tuples and optionals, no other containers");
      internal::AppendToKey(c10::IValue(input), key);
    }
  }

  template <typename... Inputs>
  static std::vector<at::Tensor> TensorsOf(const Inputs&... inputs) {
    std::vector<at::Tensor> tensors;
    (for_each_tensor(inputs, [&](const at::Tensor& tensor) { tensors.push_back(tensor); }), ...);
    return tensors;
  }

  template <typename... Inputs>
  const Program* Captured(const Inputs&... inputs) {
    using Result = ResultOf<Inputs...>;
    static_assert(std::is_copy_constructible_v<Result>, "the result must be copyable");
    Call call{.tensors = TensorsOf(inputs...)};
    (Append<std::decay_t<Inputs>>(inputs, call.key), ...);
    return ProgramFor(
        std::move(call), [&](std::vector<at::Tensor> tensors, std::shared_ptr<void>& empty) {
          std::tuple<std::decay_t<Inputs>...> copies(inputs...);
          auto next = tensors.begin();
          for_each_tensor(copies, [&](at::Tensor& tensor) { tensor = std::move(*next++); });
          Result result = std::apply(
              [this](auto&... copy) -> Result { return original_->forward(copy...); }, copies);
          if (internal::SharesTensors(result)) {
            throw ConfigurationError("the forward of " + name() +
                                     " returns pointers to tensors, or another type whose copies "
                                     "share their tensors; return them by value");
          }
          std::vector<at::Tensor> outputs;
          for_each_tensor(result, [&](at::Tensor& tensor) {
            outputs.push_back(std::move(tensor));
            tensor = at::Tensor();
          });
          empty = std::make_shared<Result>(std::move(result));
          return outputs;
        });
  }

  const std::shared_ptr<Net> original_;
};

// Returns `module` as a graph in pieces. With `examples`, arguments of forward, the graph is
// captured at once, so that bucket_layout() is known. Without them, the first forward captures the
// graph. Throws ConfigurationError for options that are not usable, for a module that a graph
// cannot hold, and for SyncBatchNorm layers.
template <std::derived_from<torch::nn::Module> Module, typename... Examples>
std::shared_ptr<GraphModule<Module>> optimize_graph(std::shared_ptr<Module> module,
                                                    const GraphOptions& options = {},
                                                    const Examples&... examples) {
  auto graph = std::make_shared<GraphModule<Module>>(std::move(module), options);
  if constexpr (sizeof...(Examples) > 0) graph->capture(examples...);
  return graph;
}

// The same for a holder that TORCH_MODULE made.
template <internal::ModuleHolder Holder, typename... Examples>
auto optimize_graph(const Holder& holder, const GraphOptions& options = {},
                    const Examples&... examples) {
  return optimize_graph(holder.ptr(), options, examples...);
}

}  // namespace ddp

#endif  // DDP_GRAPH_OPTIMIZE_GRAPH_H_
