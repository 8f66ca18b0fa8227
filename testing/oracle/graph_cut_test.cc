// Compares our cuts of graphs in GraphCutMode::kParity with those of PyTorch's DDPOptimizer, which
// graph_cuts.py has recorded: see README.md. With DDP_ORACLE_DIRECTORY, with those that have just
// been recorded there.
#include "ddp/graph/cut/graph_cut.h"

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp::testing {
namespace {

using Json = nlohmann::json;

Json Cases() {
  const char* fresh = std::getenv("DDP_ORACLE_DIRECTORY");
  const std::string folder = fresh == nullptr ? "testing/oracle/golden" : fresh;
  std::ifstream file(folder + "/graph_cuts.json");
  return Json::parse(file, nullptr, /*allow_exceptions=*/false);
}

std::vector<internal::GraphCutParameter> ParametersOf(const Json& graph) {
  std::vector<internal::GraphCutParameter> parameters;
  for (const Json& parameter : graph.at("parameters")) {
    parameters.push_back({.bytes = parameter.at("bytes").get<int64_t>(),
                          .ignored = parameter.at("ignored").get<bool>(),
                          .frozen = parameter.at("frozen").get<bool>()});
  }
  return parameters;
}

std::vector<internal::GraphCutNode> NodesOf(const Json& graph) {
  std::vector<internal::GraphCutNode> nodes;
  for (const Json& node : graph.at("nodes")) {
    nodes.push_back({.parameters = node.at("parameters").get<std::vector<int>>(),
                     .inputs = node.at("inputs").get<std::vector<int>>(),
                     .is_output = node.at("is_output").get<bool>()});
  }
  return nodes;
}

// Returns our cut of a recorded graph, in the form of the record.
Json OurPieces(const Json& graph) {
  const auto cut =
      internal::CutAtBuckets(NodesOf(graph), ParametersOf(graph), GraphCutMode::kParity,
                             {.first_cap_bytes = graph.at("first_cap_bytes").get<int64_t>(),
                              .cap_bytes = graph.at("cap_bytes").get<int64_t>()});
  if (!cut.ok()) return cut.status().ToString();
  Json pieces = {
      {"piece_of_node", Json::array()}, {"bytes", Json::array()}, {"extensions", Json::array()}};
  for (size_t i = 0; i < cut->pieces.size(); ++i) {
    const internal::GraphCutPiece& piece = cut->pieces[i];
    for (int node = piece.first_node; node < piece.end_node; ++node) {
      pieces["piece_of_node"].push_back(i);
    }
    pieces["bytes"].push_back(piece.bytes);
    pieces["extensions"].push_back(piece.extensions);
  }
  return pieces;
}

TEST(OracleGraphCutTest, EqualsDdpOptimizer) {
  const Json cases = Cases();
  ASSERT_TRUE(cases.is_object()) << "no record: generate.py";
  for (const auto& [name, graph] : cases.items()) {
    const Json theirs = {{"piece_of_node", graph.at("piece_of_node")},
                         {"bytes", graph.at("bytes")},
                         {"extensions", graph.at("extensions")}};
    EXPECT_EQ(OurPieces(graph), theirs) << name;
  }
}

// Counts the recorded cases that a wrong rule would cut otherwise.
TEST(OracleGraphCutTest, TheRecordHasEveryRule) {
  int models = 0, random = 0, ignored = 0, frozen = 0, twice = 0, extended = 0;
  const Json cases = Cases();
  for (const auto& [name, graph] : cases.items()) {
    ++(name.starts_with("random_") ? random : models);
    for (const auto& parameter : ParametersOf(graph)) {
      ignored += parameter.ignored ? 1 : 0;
      frozen += parameter.frozen ? 1 : 0;
    }
    for (const auto& node : NodesOf(graph)) {
      const auto& read = node.parameters;
      twice += read.size() == 2 && read[0] == read[1] ? 1 : 0;
    }
    for (const int count : graph.at("extensions")) extended += count > 0 ? 1 : 0;
  }
  EXPECT_GE(models, 20);
  EXPECT_GE(random, 20);
  for (const int count : {ignored, frozen, twice, extended}) EXPECT_GE(count, 5);
}

}  // namespace
}  // namespace ddp::testing
