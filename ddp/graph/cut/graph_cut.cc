#include "ddp/graph/cut/graph_cut.h"

#include "absl/strings/str_cat.h"

namespace ddp::internal {
namespace {

constexpr int kNobody = -1;

absl::Status Validate(const std::vector<GraphCutNode>& nodes,
                      const std::vector<GraphCutParameter>& parameters) {
  for (int i = 0; i < std::ssize(parameters); ++i) {
    if (parameters[i].bytes < 0) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", i, " has negative bytes"));
    }
  }
  for (int i = 0; i < std::ssize(nodes); ++i) {
    for (const int parameter : nodes[i].parameters) {
      if (parameter < 0 || parameter >= std::ssize(parameters)) {
        return absl::InvalidArgumentError(
            absl::StrCat("node ", i, " reads parameter ", parameter, ", which does not exist"));
      }
    }
    for (const int input : nodes[i].inputs) {
      if (input < 0 || input >= i) {
        return absl::InvalidArgumentError(
            absl::StrCat("node ", i, " reads node ", input, ", which is not before it"));
      }
    }
  }
  return absl::OkStatus();
}

// Returns for each node the last node that reads it; a node that the graph returns is read by a
// node behind the last one.
std::vector<int> LastUsers(const std::vector<GraphCutNode>& nodes) {
  std::vector<int> last(nodes.size(), kNobody);
  for (int i = 0; i < std::ssize(nodes); ++i) {
    for (const int input : nodes[i].inputs) last[input] = i;
  }
  for (int i = 0; i < std::ssize(nodes); ++i) {
    if (nodes[i].is_output) last[i] = static_cast<int>(nodes.size());
  }
  return last;
}

// Returns the bytes that each node counts.
std::vector<int64_t> BytesOfNodes(const std::vector<GraphCutNode>& nodes,
                                  const std::vector<GraphCutParameter>& parameters,
                                  GraphCutMode mode) {
  std::vector<bool> counted(parameters.size(), false);
  std::vector<int64_t> bytes(nodes.size(), 0);
  for (int i = 0; i < std::ssize(nodes); ++i) {
    for (const int parameter : nodes[i].parameters) {
      const GraphCutParameter& read = parameters[parameter];
      const bool counts =
          mode == GraphCutMode::kParity ? !read.frozen : read.reducible() && !counted[parameter];
      if (counts) bytes[i] += read.bytes;
      counted[parameter] = true;
    }
  }
  return bytes;
}

// Gives each parameter to the piece of its first use: the backward of that piece comes last.
void AssignParameters(const std::vector<GraphCutNode>& nodes,
                      const std::vector<GraphCutParameter>& parameters, GraphCut& cut) {
  std::vector<bool> assigned(parameters.size(), false);
  for (GraphCutPiece& piece : cut.pieces) {
    for (int i = piece.first_node; i < piece.end_node; ++i) {
      for (const int parameter : nodes[i].parameters) {
        if (assigned[parameter] || !parameters[parameter].reducible()) continue;
        assigned[parameter] = true;
        piece.parameters.push_back(parameter);
      }
    }
  }
}

}  // namespace

absl::StatusOr<GraphCut> CutAtBuckets(const std::vector<GraphCutNode>& nodes,
                                      const std::vector<GraphCutParameter>& parameters,
                                      GraphCutMode mode, const GraphCutCaps& caps) {
  if (absl::Status status = Validate(nodes, parameters); !status.ok()) return status;
  const int64_t cap = caps.cap_bytes.value_or(kDefaultCapBytes);
  const bool cap_is_first = mode == GraphCutMode::kStrict && caps.cap_bytes.has_value();
  const int64_t first_cap =
      caps.first_cap_bytes.value_or(cap_is_first ? cap : kDefaultFirstCapBytes);
  if (cap < 1 || first_cap < 1) {
    return absl::InvalidArgumentError("the cap of a bucket is below 1 byte");
  }
  if (nodes.empty()) return GraphCut{};

  const std::vector<int64_t> bytes = BytesOfNodes(nodes, parameters, mode);
  const std::vector<int> last_user = LastUsers(nodes);
  const int count = static_cast<int>(nodes.size());
  std::vector<GraphCutPiece> backwards = {{.first_node = count, .end_node = count}};
  bool read_outside = false;  // a result of the current piece is read outside of it
  for (int i = count - 1; i >= 0; --i) {
    GraphCutPiece& piece = backwards.back();
    const bool full = piece.bytes >= cap || (backwards.size() == 1 && piece.bytes >= first_cap);
    if (full && read_outside && nodes[i + 1].may_begin) {
      backwards.push_back({.first_node = i, .end_node = i + 1, .bytes = bytes[i]});
      read_outside = last_user[i] > i;
      continue;
    }
    if (full) ++piece.extensions;
    piece.first_node = i;
    piece.bytes += bytes[i];
    read_outside = read_outside || last_user[i] >= piece.end_node;
  }
  if (backwards.size() > 1 && backwards.back().bytes == 0) {
    backwards.pop_back();
    backwards.back().first_node = 0;
  }
  GraphCut cut{.pieces = {backwards.rbegin(), backwards.rend()}};
  AssignParameters(nodes, parameters, cut);
  return cut;
}

absl::StatusOr<GraphCut> CutBefore(const std::vector<GraphCutNode>& nodes,
                                   const std::vector<GraphCutParameter>& parameters,
                                   GraphCutMode mode, const std::vector<int>& begins) {
  if (absl::Status status = Validate(nodes, parameters); !status.ok()) return status;
  const int count = static_cast<int>(nodes.size());
  int before = 0;
  for (const int begin : begins) {
    if (begin <= before || begin >= count) {
      return absl::InvalidArgumentError(
          absl::StrCat("a cut before node ", begin, " of ", count,
                       " nodes; the cuts rise from 1 to the last node"));
    }
    if (!nodes[begin].may_begin) {
      return absl::InvalidArgumentError(
          absl::StrCat("node ", begin,
                       " cannot begin a piece: it lies in a region, such as a "
                       "`with` block, that must not be cut"));
    }
    before = begin;
  }
  if (nodes.empty()) return GraphCut{};
  const std::vector<int64_t> bytes = BytesOfNodes(nodes, parameters, mode);
  GraphCut cut;
  int first = 0;
  for (size_t i = 0; i <= begins.size(); ++i) {
    GraphCutPiece piece{.first_node = first, .end_node = i < begins.size() ? begins[i] : count};
    for (int node = first; node < piece.end_node; ++node) piece.bytes += bytes[node];
    first = piece.end_node;
    cut.pieces.push_back(piece);
  }
  AssignParameters(nodes, parameters, cut);
  return cut;
}

}  // namespace ddp::internal
