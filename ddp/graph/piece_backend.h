// How the pieces of a graph run. optimize_graph() takes a backend as an option.
#ifndef DDP_GRAPH_PIECE_BACKEND_H_
#define DDP_GRAPH_PIECE_BACKEND_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace torch::jit {
struct Graph;
}  // namespace torch::jit

namespace ddp {

// One piece of a model's graph, or a part of a piece.
struct GraphPiece {
  std::string name;  // "Net.piece1", or "Net.piece1.part2"
  int index = 0;     // in forward order
  int count = 0;     // the number of pieces
  // The piece's own graph. Its inputs and outputs are those of the PieceFunction.
  std::shared_ptr<torch::jit::Graph> graph;
  // For each input of `graph`: the name of the parameter or buffer, or "" for any other value.
  std::vector<std::string> input_names;
};

// Runs one piece: takes the values of the graph's inputs and returns the values of its outputs. The
// function runs in every forward, under the grad mode and autocast state of the caller's thread.
// Outputs must carry their autograd history: the model's backward goes through them. An exception
// of the function passes through the model's forward unchanged.
using PieceFunction = std::function<std::vector<c10::IValue>(std::vector<c10::IValue> inputs)>;

// Prepares pieces to run. Thread-compatible.
class PieceBackend {
 public:
  virtual ~PieceBackend() = default;

  // Returns a function that runs `piece`. Called once for each piece, or part of a piece, of each
  // captured graph. The backend may change piece.graph, and may keep it.
  virtual PieceFunction Compile(const GraphPiece& piece) = 0;

  // Returns true when one derivative may cover several operations. Such a derivative adds up the
  // gradients of a value that several of its operations read, in an order of its own. A piece then
  // arrives in parts: operations that read one value are in different parts where three or more
  // gradients of the value are added. So the autograd engine adds them, in one order for every cut.
  virtual bool derives_groups() const { return false; }
};

// The default: LibTorch's profiling GraphExecutor. Its first run of a piece collects types. Later
// runs use derivatives and fusions of TorchScript's own, so results and gradients equal those of
// the eager model to rounding only, and dropout draws other random numbers. A forward under
// autocast runs as with interpreter_backend().
std::shared_ptr<PieceBackend> graph_executor_backend();

// Runs the operations of a piece one by one with LibTorch's interpreter. Results and gradients have
// the bits of the eager model.
std::shared_ptr<PieceBackend> interpreter_backend();

// A backend of the program's own: `compile(piece)` returns the function that runs the piece, for
// example one that calls a package which AOTInductor has built elsewhere. The backend gets whole
// pieces. A backend whose derivatives cover several operations must be a class that overrides
// derives_groups(); otherwise the bits of a gradient may depend on the cut.
std::shared_ptr<PieceBackend> custom_backend(
    std::function<PieceFunction(const GraphPiece& piece)> compile);

}  // namespace ddp

#endif  // DDP_GRAPH_PIECE_BACKEND_H_
