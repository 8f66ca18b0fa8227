#ifndef DDP_GRAPH_CUT_GRAPH_CUT_H_
#define DDP_GRAPH_CUT_GRAPH_CUT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp {

// How the bytes of a graph are counted.
enum class GraphCutMode {
  // A parameter counts once, where its gradient becomes complete: at its first use in the forward.
  // Ignored and frozen parameters do not count. A cap that the caller sets holds for the first
  // bucket too.
  kStrict,
  // The rules of PyTorch 2.11's DDPOptimizer, for equal cuts: a parameter counts at every use, also
  // at two uses in one node. Ignored parameters count, frozen ones do not. The first bucket has
  // 1 MiB whatever cap the caller sets.
  kParity,
};

namespace internal {

constexpr int64_t kDefaultFirstCapBytes = 1024 * 1024;
constexpr int64_t kDefaultCapBytes = 25 * 1024 * 1024;

// One parameter of a graph. A tensor with several names is one parameter.
struct GraphCutParameter {
  int64_t bytes = 0;
  bool ignored = false;  // the reducer does not reduce its gradient
  bool frozen = false;   // it has no gradient

  bool reducible() const { return !ignored && !frozen; }
};

// One operation of a graph.
struct GraphCutNode {
  std::vector<int> parameters;  // the parameters that the node reads, as indices
  std::vector<int> inputs;      // the nodes whose results the node reads, all before the node
  bool is_output = false;       // the graph returns a result of the node
  bool may_begin = true;        // false: the node and the node before it must share a piece
};

struct GraphCutCaps {
  std::optional<int64_t> first_cap_bytes;
  std::optional<int64_t> cap_bytes;
};

// One piece: the nodes [first_node, end_node) in forward order.
struct GraphCutPiece {
  int first_node = 0;
  int end_node = 0;
  int64_t bytes = 0;            // as counted; in kParity, a parameter may count several times
  int extensions = 0;           // nodes that a full piece took because it could not end yet
  std::vector<int> parameters;  // complete with this piece's backward; in order of first use
};

// A cut of a graph into consecutive pieces. The parameters of all pieces together are the
// reducible parameters that the graph reads, each once.
struct GraphCut {
  std::vector<GraphCutPiece> pieces;  // in forward order; a graph without nodes has none
};

// Cuts the graph where a bucket of gradients is full. The algorithm is that of DDPOptimizer in
// PyTorch 2.11 (torch/_dynamo/backends/distributed.py): it walks the nodes backwards, in the order
// in which gradients become complete, and adds each node's bytes as a whole to the current piece.
// Before a node is added, a full piece ends. A piece is full when it has cap_bytes, or when it is
// the only piece so far and has first_cap_bytes. A full piece ends only if its first node may begin
// a piece, and if the graph returns a result of its nodes or a node outside of it reads one. If
// not, the piece is extended. At the end, a front piece of 0 bytes joins the next piece.
//
// The caps default to 1 MiB and 25 MiB; see GraphCutMode for a cap without a first cap. O(nodes +
// uses). kInvalidArgument: a cap below 1, negative bytes, a parameter that does not exist, or an
// input that is not before its node. Pure; thread-compatible.
absl::StatusOr<GraphCut> CutAtBuckets(const std::vector<GraphCutNode>& nodes,
                                      const std::vector<GraphCutParameter>& parameters,
                                      GraphCutMode mode, const GraphCutCaps& caps);

// Cuts the graph before the nodes `begins`, in rising order; empty: one piece. kInvalidArgument: as
// above, a node that does not exist, node 0, an order that does not rise, or a node that may not
// begin a piece.
absl::StatusOr<GraphCut> CutBefore(const std::vector<GraphCutNode>& nodes,
                                   const std::vector<GraphCutParameter>& parameters,
                                   GraphCutMode mode, const std::vector<int>& begins);

}  // namespace internal
}  // namespace ddp

#endif  // DDP_GRAPH_CUT_GRAPH_CUT_H_
