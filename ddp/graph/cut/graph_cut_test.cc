#include "ddp/graph/cut/graph_cut.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMiB = 1024 * 1024;

struct Model {
  std::vector<GraphCutNode> nodes;
  std::vector<GraphCutParameter> parameters;
};

// A chain in which each node reads the node before it. A node with bytes has a parameter.
Model Chain(const std::vector<int64_t>& bytes) {
  Model model;
  for (int i = 0; i < std::ssize(bytes); ++i) {
    GraphCutNode node;
    if (i > 0) node.inputs = {i - 1};
    if (bytes[i] > 0) {
      node.parameters = {static_cast<int>(model.parameters.size())};
      model.parameters.push_back({.bytes = bytes[i]});
    }
    model.nodes.push_back(node);
  }
  model.nodes.back().is_output = true;
  return model;
}

GraphCut Cut(const Model& model, const GraphCutCaps& caps, GraphCutMode mode) {
  const auto cut = CutAtBuckets(model.nodes, model.parameters, mode, caps);
  EXPECT_TRUE(cut.ok()) << cut.status();
  return cut.value_or(GraphCut{});
}

std::vector<int> PieceOfNode(const GraphCut& cut) {
  std::vector<int> piece_of;
  for (int i = 0; i < std::ssize(cut.pieces); ++i) {
    piece_of.insert(piece_of.end(), cut.pieces[i].end_node - cut.pieces[i].first_node, i);
  }
  return piece_of;
}

std::vector<int64_t> Sizes(const GraphCut& cut) {
  std::vector<int64_t> sizes;
  for (const GraphCutPiece& piece : cut.pieces) sizes.push_back(piece.bytes);
  return sizes;
}

int Extensions(const GraphCut& cut) {
  int extensions = 0;
  for (const GraphCutPiece& piece : cut.pieces) extensions += piece.extensions;
  return extensions;
}

// The vectors of DDPOptimizer, which hold in both modes.
class GraphCutVectorTest : public ::testing::TestWithParam<GraphCutMode> {};

INSTANTIATE_TEST_SUITE_P(Modes, GraphCutVectorTest,
                         ::testing::Values(GraphCutMode::kStrict, GraphCutMode::kParity));

TEST_P(GraphCutVectorTest, ManyEqualLayers) {
  std::vector<int64_t> bytes;
  for (int i = 0; i < 7; ++i) bytes.insert(bytes.end(), {1050624, 0});
  bytes.push_back(1050624);
  const GraphCut cut = Cut(Chain(bytes), {kMiB, 4 * kMiB}, GetParam());
  EXPECT_THAT(PieceOfNode(cut), ElementsAre(0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2));
  EXPECT_THAT(Sizes(cut), ElementsAre(3151872, 4202496, 1050624));
  EXPECT_EQ(Extensions(cut), 0);
}

TEST_P(GraphCutVectorTest, OneLargeLayer) {
  Model model = Chain({0, 0, 0, 532480, 0, 16785408, 0, 2098176, 0, 10280, 0});
  model.nodes[1].inputs = {};
  model.nodes[2].inputs = {0, 1};
  const GraphCut cut = Cut(model, {kMiB, 8 * kMiB}, GetParam());
  EXPECT_THAT(PieceOfNode(cut), ElementsAre(0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2));
  EXPECT_THAT(Sizes(cut), ElementsAre(532480, 16785408, 2108456));
}

TEST_P(GraphCutVectorTest, AFullPieceThatNobodyReadsIsExtended) {
  Model model = Chain({1050624, 0, 1050624, 1050624, 2097152});
  model.nodes[4].inputs = {};
  model.nodes[4].is_output = false;
  model.nodes[3].is_output = true;
  const GraphCut cut = Cut(model, {kMiB, kMiB}, GetParam());
  EXPECT_THAT(PieceOfNode(cut), ElementsAre(0, 0, 1, 2, 2));
  EXPECT_THAT(Sizes(cut), ElementsAre(1050624, 1050624, 3147776));
  EXPECT_EQ(Extensions(cut), 1);
  EXPECT_EQ(cut.pieces[2].extensions, 1);
}

TEST_P(GraphCutVectorTest, AFrontPieceWithoutBytesJoinsTheNext) {
  Model model = Chain({0, 0, 0, 1050624, 0, 1050624});
  model.nodes[1].inputs = {};
  model.nodes[2].inputs = {0, 1};
  const GraphCut cut = Cut(model, {kMiB, kMiB}, GetParam());
  EXPECT_THAT(PieceOfNode(cut), ElementsAre(0, 0, 0, 0, 0, 1));
  EXPECT_THAT(Sizes(cut), ElementsAre(1050624, 1050624));
}

TEST_P(GraphCutVectorTest, ASmallGraphIsOnePiece) {
  const GraphCut cut = Cut(Chain({1000, 0, 1000}), {}, GetParam());
  EXPECT_THAT(PieceOfNode(cut), ElementsAre(0, 0, 0));
  EXPECT_THAT(Sizes(cut), ElementsAre(2000));
}

TEST(GraphCutTest, ACapOfTheCallerHoldsForTheFirstPieceInStrictModeOnly) {
  const Model model = Chain({2 * kMiB, 2 * kMiB, 2 * kMiB, 2 * kMiB});
  const GraphCutCaps caps{.cap_bytes = 4 * kMiB};
  EXPECT_THAT(Sizes(Cut(model, caps, GraphCutMode::kStrict)), ElementsAre(4 * kMiB, 4 * kMiB));
  EXPECT_THAT(Sizes(Cut(model, caps, GraphCutMode::kParity)),
              ElementsAre(2 * kMiB, 4 * kMiB, 2 * kMiB));
  // Without a cap, the default of 25 MiB and a first piece of 1 MiB hold in both modes.
  for (const GraphCutMode mode : {GraphCutMode::kStrict, GraphCutMode::kParity}) {
    EXPECT_THAT(Sizes(Cut(model, {}, mode)), ElementsAre(6 * kMiB, 2 * kMiB));
  }
}

TEST(GraphCutTest, ATiedParameterCountsOnceInStrictModeAndAtEveryUseInParityMode) {
  Model model = Chain({2 * kMiB, 0, 2 * kMiB, 0});
  model.nodes[3].parameters = {0};  // tied with node 0
  const GraphCutCaps caps{.first_cap_bytes = kMiB, .cap_bytes = kMiB};
  const GraphCut strict = Cut(model, caps, GraphCutMode::kStrict);
  EXPECT_THAT(PieceOfNode(strict), ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(strict.pieces[0].parameters, ElementsAre(0));
  EXPECT_THAT(strict.pieces[1].parameters, ElementsAre(1));
  const GraphCut parity = Cut(model, caps, GraphCutMode::kParity);
  EXPECT_THAT(PieceOfNode(parity), ElementsAre(0, 0, 1, 2));
  EXPECT_THAT(Sizes(parity), ElementsAre(2 * kMiB, 2 * kMiB, 2 * kMiB));
  // The gradient is complete after the backward of the first use, whatever counted.
  EXPECT_THAT(parity.pieces[0].parameters, ElementsAre(0));
  EXPECT_THAT(parity.pieces[2].parameters, IsEmpty());
}

TEST(GraphCutTest, IgnoredParametersCountInParityModeOnlyAndBelongToNoPiece) {
  Model model = Chain({2 * kMiB, 2 * kMiB, 2 * kMiB});
  model.parameters[2].ignored = true;
  const GraphCutCaps caps{.first_cap_bytes = kMiB, .cap_bytes = kMiB};
  const GraphCut strict = Cut(model, caps, GraphCutMode::kStrict);
  EXPECT_THAT(PieceOfNode(strict), ElementsAre(0, 1, 1));
  const GraphCut parity = Cut(model, caps, GraphCutMode::kParity);
  EXPECT_THAT(PieceOfNode(parity), ElementsAre(0, 1, 2));
  EXPECT_THAT(parity.pieces[2].parameters, IsEmpty());
}

TEST_P(GraphCutVectorTest, FrozenParametersDoNotCountAndBelongToNoPiece) {
  Model model = Chain({2 * kMiB, 2 * kMiB, 2 * kMiB});
  model.parameters[2].frozen = true;
  const GraphCut cut = Cut(model, {.first_cap_bytes = kMiB, .cap_bytes = kMiB}, GetParam());
  EXPECT_THAT(PieceOfNode(cut), ElementsAre(0, 1, 1));
  EXPECT_THAT(cut.pieces[1].parameters, ElementsAre(1));
}

TEST(GraphCutTest, ANodeThatReadsAParameterTwiceCountsItTwiceInParityModeOnly) {
  Model model = Chain({kMiB});
  model.nodes[0].parameters = {0, 0};
  EXPECT_THAT(Sizes(Cut(model, {}, GraphCutMode::kStrict)), ElementsAre(kMiB));
  EXPECT_THAT(Sizes(Cut(model, {}, GraphCutMode::kParity)), ElementsAre(2 * kMiB));
}

TEST(GraphCutTest, APieceDoesNotBeginInsideARegion) {
  Model model = Chain({2 * kMiB, 2 * kMiB, 2 * kMiB, 2 * kMiB});
  model.nodes[2].may_begin = false;
  model.nodes[3].may_begin = false;
  const GraphCut cut = Cut(model, {kMiB, kMiB}, GraphCutMode::kStrict);
  EXPECT_THAT(PieceOfNode(cut), ElementsAre(0, 1, 1, 1));
  EXPECT_EQ(cut.pieces[1].extensions, 2);
  const auto refused = CutBefore(model.nodes, model.parameters, GraphCutMode::kStrict, {2});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("node 2 cannot begin a piece"));
}

TEST(GraphCutTest, CutsOfTheCaller) {
  const Model model = Chain({1, 2, 3, 4});
  const auto cut = CutBefore(model.nodes, model.parameters, GraphCutMode::kStrict, {1, 3});
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_THAT(PieceOfNode(*cut), ElementsAre(0, 1, 1, 2));
  EXPECT_THAT(Sizes(*cut), ElementsAre(1, 5, 4));
  const auto whole = CutBefore(model.nodes, model.parameters, GraphCutMode::kStrict, {});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_THAT(PieceOfNode(*whole), ElementsAre(0, 0, 0, 0));
}

TEST(GraphCutTest, RefusesWhatCannotBe) {
  const auto message = [](const Model& model, const GraphCutCaps& caps = {}) {
    return std::string(CutAtBuckets(model.nodes, model.parameters, GraphCutMode::kStrict, caps)
                           .status()
                           .message());
  };
  EXPECT_THAT(message(Chain({1}), {.cap_bytes = 0}), HasSubstr("below 1 byte"));
  Model model = Chain({1, 1});
  model.nodes[0].inputs = {1};
  EXPECT_THAT(message(model), HasSubstr("node 0 reads node 1, which is not before it"));
  model = Chain({1, 1});
  model.nodes[1].parameters = {2};
  EXPECT_THAT(message(model), HasSubstr("parameter 2, which does not exist"));
  model = Chain({1, 1});
  model.parameters[0].bytes = -1;
  EXPECT_THAT(message(model), HasSubstr("negative bytes"));
  model = Chain({1, 1});
  for (const std::vector<int>& begins : {std::vector<int>{0}, {2}, {-1}, {1, 1}}) {
    EXPECT_FALSE(CutBefore(model.nodes, model.parameters, GraphCutMode::kStrict, begins).ok());
  }
  const auto empty = CutAtBuckets({}, {}, GraphCutMode::kStrict, {});
  ASSERT_TRUE(empty.ok());
  EXPECT_THAT(empty->pieces, IsEmpty());
}

Model RandomModel(std::mt19937& random) {
  Model model;
  const int parameters = 1 + random() % 12;
  for (int i = 0; i < parameters; ++i) {
    model.parameters.push_back({.bytes = static_cast<int64_t>(random() % 40),
                                .ignored = random() % 8 == 0,
                                .frozen = random() % 8 == 0});
  }
  const int nodes = 1 + random() % 30;
  for (int i = 0; i < nodes; ++i) {
    GraphCutNode node{.is_output = random() % 10 == 0, .may_begin = random() % 6 != 0};
    for (int use = random() % 3; use > 0; --use) {
      node.parameters.push_back(static_cast<int>(random() % parameters));
    }
    for (int use = random() % 3; use > 0 && i > 0; --use) {
      node.inputs.push_back(static_cast<int>(random() % i));
    }
    model.nodes.push_back(node);
  }
  return model;
}

// Whatever the graph, the pieces tile the nodes, each reducible parameter that the graph reads is
// in exactly one piece, and strict pieces count exactly their parameters.
TEST(GraphCutTest, RandomGraphsAreTiled) {
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    const Model model = RandomModel(random);
    const GraphCutMode mode = round % 2 == 0 ? GraphCutMode::kStrict : GraphCutMode::kParity;
    const GraphCut cut = Cut(model, {.first_cap_bytes = 10, .cap_bytes = 30}, mode);
    int next = 0;
    std::multiset<int> seen;
    for (const GraphCutPiece& piece : cut.pieces) {
      EXPECT_EQ(piece.first_node, next);
      EXPECT_LT(piece.first_node, piece.end_node);
      EXPECT_TRUE(next == 0 || model.nodes[next].may_begin);
      next = piece.end_node;
      seen.insert(piece.parameters.begin(), piece.parameters.end());
      int64_t bytes = 0;
      for (const int parameter : piece.parameters) bytes += model.parameters[parameter].bytes;
      EXPECT_TRUE(mode == GraphCutMode::kParity || piece.bytes == bytes);
    }
    EXPECT_EQ(next, std::ssize(model.nodes));
    std::multiset<int> expected;
    for (int parameter = 0; parameter < std::ssize(model.parameters); ++parameter) {
      bool used = false;
      for (const GraphCutNode& node : model.nodes) {
        used = used || ::testing::Value(node.parameters, ::testing::Contains(parameter));
      }
      if (used && model.parameters[parameter].reducible()) expected.insert(parameter);
    }
    EXPECT_EQ(seen, expected);
  }
}

}  // namespace
}  // namespace ddp::internal
