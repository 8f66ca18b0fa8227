#include "ddp/graph/cut/piece_table.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace ddp::internal {
namespace {

constexpr size_t kMaxNames = 4;

std::string NamesOf(const PieceRow& piece) {
  if (piece.parameters.empty()) return "none";
  const size_t shown = std::min(piece.parameters.size(), kMaxNames);
  std::string names =
      absl::StrJoin(piece.parameters.begin(), piece.parameters.begin() + shown, ", ");
  if (shown < piece.parameters.size()) {
    absl::StrAppend(&names, " and ", piece.parameters.size() - shown, " more");
  }
  return names;
}

}  // namespace

std::string PieceTable(const std::string& graph, const std::vector<PieceRow>& pieces) {
  std::string table =
      absl::StrCat(graph, ": ", pieces.size(), pieces.size() == 1 ? " piece" : " pieces",
                   pieces.size() > 1 ? "; the last piece's gradients are reduced first\n" : "\n");
  absl::StrAppendFormat(&table, "%5s  %5s  %12s  %10s  %s\n", "piece", "nodes", "bytes",
                        "extensions", "parameters");
  for (size_t i = 0; i < pieces.size(); ++i) {
    absl::StrAppendFormat(&table, "%5d  %5d  %12d  %10d  %s\n", i, pieces[i].nodes, pieces[i].bytes,
                          pieces[i].extensions, NamesOf(pieces[i]));
  }
  return table;
}

std::string PiecesAsJson(const std::string& graph, const std::vector<PieceRow>& pieces) {
  nlohmann::json rows = nlohmann::json::array();
  for (const PieceRow& piece : pieces) {
    rows.push_back({{"nodes", piece.nodes},
                    {"bytes", piece.bytes},
                    {"extensions", piece.extensions},
                    {"parameters", piece.parameters}});
  }
  // A name with bytes that are no UTF-8 must not end the program.
  return nlohmann::json{{"graph", graph}, {"pieces", rows}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace ddp::internal
