#ifndef DDP_GRAPH_CUT_PIECE_TABLE_H_
#define DDP_GRAPH_CUT_PIECE_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

namespace ddp::internal {

// One piece of a graph, for a person or a log to read.
struct PieceRow {
  int nodes = 0;
  int64_t bytes = 0;  // of parameters, as the cut counted them
  int extensions = 0;
  std::vector<std::string> parameters;
};

// Returns a table with one line for each piece, in forward order. `graph` names the graph. Shows at
// most 4 parameters of a piece, and the number of the others.
//
//   Net: 2 pieces; the last piece's gradients are reduced first
//   piece  nodes     bytes  extensions  parameters
//       0      3   1048576           0  first.weight, first.bias
//       1      1      4096           0  last.weight
std::string PieceTable(const std::string& graph, const std::vector<PieceRow>& pieces);

// Returns the same as one line of JSON, with all parameters:
//   {"graph":"Net","pieces":[{"bytes":4,"extensions":0,"nodes":3,"parameters":["w"]}]}
std::string PiecesAsJson(const std::string& graph, const std::vector<PieceRow>& pieces);

}  // namespace ddp::internal

#endif  // DDP_GRAPH_CUT_PIECE_TABLE_H_
