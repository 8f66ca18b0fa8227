#ifndef DDP_GRAPH_CUT_PROGRAM_H_
#define DDP_GRAPH_CUT_PROGRAM_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "ddp/graph/cut/graph_cut.h"
#include "ddp/graph/cut/piece_table.h"
#include "ddp/graph/graph_options.h"
#include "ddp/graph/piece_backend.h"
#include "ddp/graph/script_capture.h"

namespace ddp::internal {

// One parameter of a model, under the first of its names that is not in params_to_ignore.
struct ModelParameter {
  std::string name;
  at::Tensor tensor;
  bool excluded = false;  // all of its names are in params_to_ignore

  // Returns true when the parameter is in no bucket now. requires_grad may change at any time.
  bool ignored() const { return excluded || !tensor.requires_grad(); }
};

// A captured graph, cut into pieces that run one after the other. Thread-compatible.
class CutProgram {
 public:
  // Cuts `captured` and compiles its pieces. Throws ConfigurationError when options.cuts does not
  // fit the graph. With `tolerant` it logs a warning instead, and the graph becomes one piece.
  // `parameters` must not repeat a tensor.
  CutProgram(CapturedGraph captured, const std::vector<ModelParameter>& parameters,
             const GraphOptions& options, bool tolerant);
  ~CutProgram();
  CutProgram(const CutProgram&) = delete;
  CutProgram& operator=(const CutProgram&) = delete;

  // Runs all pieces and returns the outputs of the graph. Throws what a piece throws: with the
  // backends of this folder, LibTorch's std::runtime_error or c10::Error (which of them depends on
  // the operation and on the release) with the message of the operation. Throws
  // ConfigurationError when a piece returns another number of values than its graph.
  std::vector<c10::IValue> Run(std::vector<c10::IValue> arguments) const;

  // Returns true while the script's attributes have the values that the graph holds as constants.
  bool Holds() const;

  // The pieces in forward order, with the names of their parameters.
  const std::vector<PieceRow>& rows() const { return rows_; }

 private:
  // A piece, or a part of a piece: one function of the backend runs it.
  struct Part {
    std::string name;
    PieceFunction run;
    std::vector<std::pair<int, bool>> inputs;  // slot; true: no later part reads it
    std::vector<int> outputs;                  // slots
  };
  struct Builder;

  void AddPiece(Builder& builder, const CapturedGraph& captured, const GraphCutPiece& cut,
                int index, int count, const std::vector<bool>& fences, PieceBackend& backend);

  std::string name_;
  size_t arguments_ = 0;
  std::vector<StateInput> state_;
  std::vector<BakedAttribute> baked_;
  std::vector<PieceRow> rows_;
  std::vector<Part> parts_;
  size_t slots_ = 0;  // values that live between parts; arguments and state come first
  std::vector<std::pair<int, c10::IValue>> constants_;  // slot and value
  std::vector<int> outputs_;                            // slots
};

}  // namespace ddp::internal

#endif  // DDP_GRAPH_CUT_PROGRAM_H_
