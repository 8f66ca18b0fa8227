#ifndef DDP_GRAPH_GRAPH_OPTIONS_H_
#define DDP_GRAPH_GRAPH_OPTIONS_H_

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "ddp/graph/cut/graph_cut.h"
#include "ddp/graph/piece_backend.h"

namespace ddp {

// Options of optimize_graph(). All ranks must give equal options: the wrapper compares the buckets
// that follow from them.
struct GraphOptions {
  // Size in MiB at which a piece is full. Unset: 25.
  std::optional<double> bucket_cap_mb = {};

  // The same for the last piece, whose gradients are complete first. Unset: 1, or bucket_cap_mb
  // where that is set; in kParity always 1.
  std::optional<double> first_bucket_cap_mb = {};

  // How the bytes of parameters are counted; see graph_cut.h.
  GraphCutMode mode = GraphCutMode::kStrict;

  // The numbers of the nodes that begin a piece, except node 0; used instead of the caps. An empty
  // list gives one piece. describe() counts the nodes of each piece. A list that does not fit the
  // first captured graph is a ConfigurationError. A later graph, such as one for eval(), that
  // the list does not fit runs in one piece, with a warning.
  std::optional<std::vector<int>> cuts = {};

  // Parameters that the wrapper does not put into buckets: params_and_buffers_to_ignore and the
  // names in delay_all_reduce_named_params. A name that no parameter and no buffer of the module
  // has is a ConfigurationError.
  std::set<std::string> params_to_ignore = {};

  // Runs the pieces. Unset: graph_executor_backend().
  std::shared_ptr<PieceBackend> backend = {};

  // The number of graphs that are kept, one for each combination of numbers, flags and strings in
  // the script's attributes; 1 at least. Further combinations run without a graph, with a warning.
  int max_graphs = 32;
};

}  // namespace ddp

#endif  // DDP_GRAPH_GRAPH_OPTIONS_H_
