// Scripts that the tests of this folder share, written in C++.
#ifndef DDP_GRAPH_TEST_MODELS_H_
#define DDP_GRAPH_TEST_MODELS_H_

#include <ATen/autocast_mode.h>
#include <torch/script.h>
#include <torch/types.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ddp/graph/optimize_graph.h"

namespace ddp::testing {

using JitModule = torch::jit::Module;
using Parameters = std::vector<std::pair<std::string, torch::Tensor>>;

// Returns a script without code: an attribute `training` and these parameters.
inline JitModule NewScript(const std::string& name, const Parameters& parameters = {},
                           const std::shared_ptr<torch::jit::CompilationUnit>& unit =
                               std::make_shared<torch::jit::CompilationUnit>()) {
  JitModule script(name, unit, /*shouldMangle=*/true);
  script.register_attribute("training", c10::BoolType::get(), true);
  for (auto& [key, value] : parameters) {
    script.register_parameter(key, value.requires_grad_(), /*is_buffer=*/false);
  }
  return script;
}

// Adds a layer with these parameters. Returns a handle to it.
inline JitModule AddLayer(JitModule& script, const std::string& name,
                          const Parameters& parameters) {
  JitModule layer = NewScript("Layer", parameters, script.type()->compilation_unit());
  script.register_module(name, layer);
  return layer;
}

inline JitModule AddLinear(JitModule& script, const std::string& name, int64_t in, int64_t out) {
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  return AddLayer(script, name,
                  {{"weight", torch::empty({out, in}).uniform_(-bound, bound)},
                   {"bias", torch::empty({out}).uniform_(-bound, bound)}});
}

// Returns a script of one function, with a parameter `weight` (4) and a buffer `sum` (4).
inline JitModule Function(const std::string& code) {
  JitModule script = NewScript("Function", {{"weight", torch::rand({4})}});
  script.register_buffer("sum", torch::zeros({4}));
  script.define(code);
  return script;
}

// Over images (3, 1, 8, 8): convolutions, a batch norm with its buffers, a linear layer.
inline JitModule ConvNet() {
  JitModule net = NewScript("ConvNet");
  const auto convolution = [&](const std::string& name, int64_t in, int64_t out) {
    AddLayer(net, name,
             {{"weight", torch::randn({out, in, 3, 3}) / std::sqrt(9.0 * in)},
              {"bias", torch::randn({out}) / 10}});
  };
  convolution("first", 1, 4);
  JitModule norm =
      AddLayer(net, "norm", {{"weight", torch::ones({4})}, {"bias", torch::zeros({4})}});
  norm.register_buffer("running_mean", torch::zeros({4}));
  norm.register_buffer("running_var", torch::ones({4}));
  norm.register_buffer("num_batches_tracked", torch::zeros({}, torch::kLong));
  convolution("second", 4, 8);
  AddLinear(net, "last", 8 * 4 * 4, 5);
  net.define(R"(
def forward(self, x):
    x = torch.conv2d(x, self.first.weight, self.first.bias)
    if self.norm.training:
        self.norm.num_batches_tracked.add_(1)
    x = torch.batch_norm(x, self.norm.weight, self.norm.bias, self.norm.running_mean,
                         self.norm.running_var, self.norm.training, 0.1, 1e-5, True)
    x = torch.conv2d(torch.relu(x), self.second.weight, self.second.bias)
    x = torch.max_pool2d(torch.relu(x), [1, 1])
    return torch.linear(torch.flatten(x, 1), self.last.weight, self.last.bias)
)");
  return net;
}

// One attention block over tokens: three projections of one value, residuals, layer norms.
inline JitModule Transformer() {
  JitModule net = NewScript("Transformer");
  AddLayer(net, "words", {{"weight", torch::randn({20, 16})}});
  for (const char* name : {"query", "key", "value", "mix"}) AddLinear(net, name, 16, 16);
  AddLayer(net, "norm", {{"weight", torch::ones({16})}, {"bias", torch::zeros({16})}});
  AddLinear(net, "wide", 16, 32);
  AddLinear(net, "narrow", 32, 16);
  AddLinear(net, "last", 16, 20);
  net.define(R"(
def forward(self, tokens):
    x = torch.embedding(self.words.weight, tokens)
    query = torch.linear(x, self.query.weight, self.query.bias)
    key = torch.linear(x, self.key.weight, self.key.bias)
    attention = torch.softmax(torch.matmul(query, key.transpose(-2, -1)) / 4.0, -1)
    value = torch.linear(x, self.value.weight, self.value.bias)
    x = x + torch.linear(torch.matmul(attention, value), self.mix.weight, self.mix.bias)
    x = torch.layer_norm(x, [16], self.norm.weight, self.norm.bias, 1e-5, True)
    wide = torch.gelu(torch.linear(x, self.wide.weight, self.wide.bias))
    x = x + torch.linear(wide, self.narrow.weight, self.narrow.bias)
    return torch.linear(x, self.last.weight, self.last.bias)
)");
  return net;
}

// An MLP over rows of 6, with a weight under two names and a layer that runs three times.
inline JitModule Tied() {
  const torch::Tensor tied = torch::randn({6, 6}) / 3;
  JitModule net = NewScript("Tied", {{"tied", tied}});
  AddLayer(net, "first", {{"weight", tied}, {"bias", torch::randn({6}) / 3}});
  AddLinear(net, "middle", 6, 6);
  net.define(R"(
def forward(self, x):
    x = torch.relu(torch.linear(x, self.first.weight, self.first.bias))
    x = torch.tanh(torch.linear(x, self.middle.weight, self.middle.bias))
    x = torch.tanh(torch.linear(x, self.middle.weight, self.middle.bias))
    x = torch.tanh(torch.linear(x, self.middle.weight, self.middle.bias))
    return torch.linear(x, self.tied)
)");
  return net;
}

// 14 linear layers of 256 KiB without a bias. A last layer has the weight of the first.
inline JitModule Chain() {
  JitModule net = NewScript("Chain");
  std::string code = "def forward(self, x):\n";
  for (int i = 0; i < 14; ++i) {
    const std::string name = "w" + std::to_string(i);
    net.register_parameter(name, (torch::randn({256, 256}) / 16).requires_grad_(), false);
    code += "    x = torch.linear(x, self." + name + ")\n";
  }
  net.register_parameter("tied", net.attr("w0").toTensor(), false);
  net.define(code + "    return torch.linear(x, self.tied)\n");
  return net;
}

// Returns a backend that is LibTorch's interpreter, or the default one.
inline std::shared_ptr<PieceBackend> Backend(bool interpreted) {
  return interpreted ? interpreter_backend() : graph_executor_backend();
}

// While it lives, scripts run one operation after the other, as the eager model does.
class EagerScripts {
 public:
  EagerScripts() { torch::jit::setGraphExecutorOptimize(false); }
  ~EagerScripts() { torch::jit::setGraphExecutorOptimize(true); }
  EagerScripts(const EagerScripts&) = delete;
  EagerScripts& operator=(const EagerScripts&) = delete;
};

// Returns forward(), run with autocast to bfloat16 on the CPU.
template <typename Forward>
torch::Tensor WithAutocast(const Forward& forward) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const torch::Tensor result = forward();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
  return result;
}

inline torch::Tensor Forward(ScriptGraphModule& graph, const torch::Tensor& input) {
  return graph.forward(input).toTensor();
}

inline torch::Tensor Forward(JitModule& script, const torch::Tensor& input) {
  return script.forward({input}).toTensor();
}

inline std::vector<torch::Tensor> ParametersOf(const JitModule& script) {
  std::vector<torch::Tensor> parameters;
  for (const torch::Tensor& parameter : script.parameters()) parameters.push_back(parameter);
  return parameters;
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
torch::Tensor TrainedGradients(Module& module, const std::vector<torch::Tensor>& parameters,
                               const torch::Tensor& input, int runs) {
  for (int run = 0; run < runs; ++run) {
    for (torch::Tensor parameter : parameters) parameter.mutable_grad().reset();
    Forward(module, input).pow(2).mean().backward();
  }
  return GradientsOf(parameters);
}

// Returns the number of nodes of the first graph.
inline int NodesOf(const ScriptGraphModule& graph) {
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

inline Pieces PiecesOf(const ScriptGraphModule& graph) {
  Pieces pieces;
  const nlohmann::json json = nlohmann::json::parse(graph.describe_as_json());
  for (const nlohmann::json& piece : json["pieces"]) {
    pieces.emplace_back(piece["parameters"].get<std::vector<std::string>>(),
                        piece["bytes"].get<int64_t>());
  }
  return pieces;
}

}  // namespace ddp::testing

#endif  // DDP_GRAPH_TEST_MODELS_H_
