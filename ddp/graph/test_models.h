// Models that the tests of this folder share.
#ifndef DDP_GRAPH_TEST_MODELS_H_
#define DDP_GRAPH_TEST_MODELS_H_

#include <ATen/autocast_mode.h>
#include <torch/nn.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ddp/common/error.h"
#include "ddp/graph/optimize_graph.h"
#include "testing/error_of.h"

namespace ddp::testing {

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    first = register_module("first", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    second = register_module("second", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 8, 3)));
    last = register_module("last", torch::nn::Linear(8 * 4 * 4, 5));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(norm->forward(first->forward(x)));
    x = torch::max_pool2d(torch::relu(second->forward(x)), 1);
    return last->forward(x.flatten(1));
  }
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear last{nullptr};
};
TORCH_MODULE(ConvNet);

// One attention block over tokens: three projections of one value, residuals, layer norms.
struct TransformerImpl : torch::nn::Module {
  TransformerImpl() {
    words = register_module("words", torch::nn::Embedding(20, 16));
    query = register_module("query", torch::nn::Linear(16, 16));
    key = register_module("key", torch::nn::Linear(16, 16));
    value = register_module("value", torch::nn::Linear(16, 16));
    mix = register_module("mix", torch::nn::Linear(16, 16));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})));
    wide = register_module("wide", torch::nn::Linear(16, 32));
    narrow = register_module("narrow", torch::nn::Linear(32, 16));
    last = register_module("last", torch::nn::Linear(16, 20));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    torch::Tensor x = words->forward(tokens);
    torch::Tensor attention =
        torch::matmul(query->forward(x), key->forward(x).transpose(-2, -1)) / 4.0;
    x = norm->forward(
        x + mix->forward(torch::matmul(torch::softmax(attention, -1), value->forward(x))));
    x = x + narrow->forward(torch::gelu(wide->forward(x)));
    return last->forward(x);
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, mix{nullptr}, wide{nullptr},
      narrow{nullptr}, last{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Transformer);

// An MLP with a weight under two names and a layer that runs three times.
struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    first = register_module("first", torch::nn::Linear(6, 6));
    middle = register_module("middle", torch::nn::Linear(6, 6));
    tied = register_parameter("tied", first->weight);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(first->forward(x));
    for (int i = 0; i < 3; ++i) x = torch::tanh(middle->forward(x));
    return torch::linear(x, tied);
  }
  torch::nn::Linear first{nullptr}, middle{nullptr};
  torch::Tensor tied;
};
TORCH_MODULE(Tied);

// A module of one function, with a parameter `weight` (4), a buffer `sum` (4) and, in `kept`, a
// tensor that is not registered.
struct FunctionImpl : torch::nn::Module {
  using Function = std::function<torch::Tensor(FunctionImpl&, torch::Tensor)>;
  explicit FunctionImpl(Function function) : function(std::move(function)) {
    weight = register_parameter("weight", torch::rand({4}));
    sum = register_buffer("sum", torch::zeros({4}));
  }
  torch::Tensor forward(torch::Tensor x) { return function(*this, x); }
  Function function;
  torch::Tensor weight, sum, kept;
};
TORCH_MODULE(Function);

struct Pair {
  torch::Tensor sum, product;
  std::optional<torch::Tensor> extra;
};
// Several inputs and outputs, of several types.
struct ManyImpl : torch::nn::Module {
  ManyImpl() { weight = register_parameter("weight", torch::ones({4})); }
  Pair forward(const torch::Tensor& a, const std::vector<torch::Tensor>& list, int64_t factor,
               bool extra, std::optional<torch::Tensor> bias) {
    Pair pair{.sum = a * weight + list[0], .product = a * list.back() * factor};
    if (bias.has_value()) pair.sum = pair.sum + *bias;
    if (extra) pair.extra = pair.sum * 2;
    return pair;
  }
  torch::Tensor weight;
};
TORCH_MODULE(Many);

// Returns a container with names.
struct NamedImpl : torch::nn::Module {
  NamedImpl() { weight = register_parameter("weight", torch::ones({4})); }
  std::unordered_map<std::string, torch::Tensor> forward(const torch::Tensor& x) {
    std::unordered_map<std::string, torch::Tensor> results;
    for (int i = 0; i < 20; ++i) results["times " + std::to_string(i)] = x * weight * i;
    return results;
  }
  torch::Tensor weight;
};
TORCH_MODULE(Named);

// Returns a type whose copies share their tensors.
template <typename Result>
struct SharingImpl : torch::nn::Module {
  SharingImpl() { weight = register_parameter("weight", torch::ones({4})); }
  Result forward(const torch::Tensor& x) {
    if constexpr (std::is_same_v<Result, c10::IValue>) {
      return c10::ivalue::Tuple::create(x * weight, x);
    } else if constexpr (std::is_same_v<Result, c10::List<at::Tensor>>) {
      return c10::List<at::Tensor>({x * weight, x});
    } else {
      return std::make_shared<torch::Tensor>(x * weight);
    }
  }
  torch::Tensor weight;
};

// Returns a backend that is LibTorch's interpreter, or the default one.
inline std::shared_ptr<PieceBackend> Backend(bool interpreted) {
  return interpreted ? interpreter_backend() : graph_executor_backend();
}

// Returns the message of the ConfigurationError with which optimize_graph() refuses `forward`, or
// "no error". A tensor (4) is in `kept`.
inline std::string CaptureError(const FunctionImpl::Function& forward) {
  Function module(forward);
  module->kept = torch::ones({4});
  return ErrorOf<ConfigurationError>([&] { optimize_graph(module, {}, torch::rand({4})); });
}

// Returns forward(), run with autocast to bfloat16 on the CPU.
template <typename Forward>
torch::Tensor WithAutocast(const Forward& forward) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const torch::Tensor result = forward();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  return result;
}

// Returns all gradients in one tensor; an undefined gradient counts as zero.
inline torch::Tensor GradientsOf(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> flat;
  for (const torch::Tensor& parameter : parameters) {
    flat.push_back((parameter.grad().defined() ? parameter.grad() : torch::zeros_like(parameter))
                       .detach()
                       .clone()
                       .flatten());
  }
  return torch::cat(flat);
}

// Runs `runs` times forward and backward; returns the gradients of the last one.
template <typename Module>
torch::Tensor TrainedGradients(Module& module, const torch::Tensor& input, int runs) {
  for (int run = 0; run < runs; ++run) {
    module.zero_grad();
    module.forward(input).pow(2).mean().backward();
  }
  return GradientsOf(module.parameters());
}

// Returns the number of nodes of the first captured graph.
inline int NodesOf(const internal::GraphModuleBase& graph) {
  int nodes = 0;
  const nlohmann::json json = nlohmann::json::parse(graph.describe_as_json());
  for (const nlohmann::json& piece : json["pieces"]) nodes += piece["nodes"].get<int>();
  return nodes;
}

// Returns a random rising list of nodes that begin a piece.
inline std::vector<int> RandomCuts(int nodes, std::mt19937& random) {
  std::vector<int> cuts;
  const int chance = 2 + random() % 6;
  for (int node = 1; node < nodes; ++node) {
    if (random() % chance == 0) cuts.push_back(node);
  }
  return cuts;
}

// The names of the parameters of each piece, and the bytes that the cut counted.
using Pieces = std::vector<std::pair<std::vector<std::string>, int64_t>>;

inline Pieces PiecesOf(const internal::GraphModuleBase& graph) {
  Pieces pieces;
  const nlohmann::json json = nlohmann::json::parse(graph.describe_as_json());
  for (const nlohmann::json& piece : json["pieces"]) {
    pieces.emplace_back(piece["parameters"].get<std::vector<std::string>>(),
                        piece["bytes"].get<int64_t>());
  }
  return pieces;
}

// 14 linear layers of 256 KiB without a bias. A last layer has the weight of the first.
struct ChainImpl : torch::nn::Module {
  ChainImpl() {
    for (int i = 0; i < 14; ++i) {
      weights.push_back(register_parameter("w" + std::to_string(i), torch::randn({256, 256}) / 16));
    }
    tied = register_parameter("tied", weights[0]);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const torch::Tensor& weight : weights) x = torch::linear(x, weight);
    return torch::linear(x, tied);
  }
  std::vector<torch::Tensor> weights;
  torch::Tensor tied;
};
TORCH_MODULE(Chain);

}  // namespace ddp::testing

#endif  // DDP_GRAPH_TEST_MODELS_H_
