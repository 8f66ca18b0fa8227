#include "ddp/graph/piece_backend.h"

#include <utility>

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/graph_executor_impl.h>
#include <torch/csrc/jit/runtime/interpreter.h>

namespace ddp {
namespace {

namespace jit = torch::jit;

// While it lives, TorchScript keeps its derivative of every operation that has one. By default it
// drops those of small groups of operations, so the formula, and the last bits of a gradient, would
// depend on where the graph is cut. The switch belongs to the thread.
class OwnDerivatives {
 public:
  OwnDerivatives() : before_(jit::getAutodiffSubgraphInlining()) {
    jit::debugSetAutodiffSubgraphInlining(false);
  }
  ~OwnDerivatives() { jit::debugSetAutodiffSubgraphInlining(before_); }
  OwnDerivatives(const OwnDerivatives&) = delete;
  OwnDerivatives& operator=(const OwnDerivatives&) = delete;

 private:
  const bool before_;
};

bool IsAutocastOn() {
  return at::autocast::is_autocast_enabled(at::kCPU) ||
         at::autocast::is_autocast_enabled(at::getAccelerator().value_or(at::kCUDA));
}

class GraphExecutorBackend final : public PieceBackend {
 public:
  bool derives_groups() const override { return true; }
  PieceFunction Compile(const GraphPiece& piece) override {
    // TorchScript's derivatives know no casts. A backward runs with autocast off, so they would
    // multiply tensors of different types: under autocast the operations run one by one.
    const auto code = std::make_shared<jit::Code>(piece.graph->copy(), piece.name);
    const auto executor =
        std::make_shared<jit::GraphExecutor>(piece.graph, piece.name, jit::PROFILING);
    return [code, executor](std::vector<c10::IValue> inputs) {
      if (IsAutocastOn()) {
        jit::InterpreterState(*code).run(inputs);
        return inputs;
      }
      const OwnDerivatives own_derivatives;
      executor->run(inputs);
      return inputs;
    };
  }
};

class InterpreterBackend final : public PieceBackend {
 public:
  PieceFunction Compile(const GraphPiece& piece) override {
    const auto code = std::make_shared<jit::Code>(piece.graph, piece.name);
    return [code](std::vector<c10::IValue> inputs) {
      jit::InterpreterState(*code).run(inputs);
      return inputs;
    };
  }
};

class CustomBackend final : public PieceBackend {
 public:
  explicit CustomBackend(std::function<PieceFunction(const GraphPiece&)> compile)
      : compile_(std::move(compile)) {}
  PieceFunction Compile(const GraphPiece& piece) override { return compile_(piece); }

 private:
  const std::function<PieceFunction(const GraphPiece&)> compile_;
};

}  // namespace

std::shared_ptr<PieceBackend> graph_executor_backend() {
  return std::make_shared<GraphExecutorBackend>();
}

std::shared_ptr<PieceBackend> interpreter_backend() {
  return std::make_shared<InterpreterBackend>();
}

std::shared_ptr<PieceBackend> custom_backend(
    std::function<PieceFunction(const GraphPiece& piece)> compile) {
  return std::make_shared<CustomBackend>(std::move(compile));
}

}  // namespace ddp
