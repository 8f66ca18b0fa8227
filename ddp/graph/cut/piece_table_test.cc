#include "ddp/graph/cut/piece_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ddp::internal {
namespace {

const std::vector<PieceRow> kPieces = {
    {.nodes = 3, .bytes = 1048576, .parameters = {"first.weight", "first.bias"}},
    {.nodes = 12, .bytes = 4096, .extensions = 2, .parameters = {"a", "b", "c", "d", "e", "f"}},
    {.nodes = 1}};

TEST(PieceTableTest, OneLineForEachPiece) {
  EXPECT_EQ(PieceTable("Net", kPieces),
            "Net: 3 pieces; the last piece's gradients are reduced first\n"
            "piece  nodes         bytes  extensions  parameters\n"
            "    0      3       1048576           0  first.weight, first.bias\n"
            "    1     12          4096           2  a, b, c, d and 2 more\n"
            "    2      1             0           0  none\n");
  EXPECT_THAT(PieceTable("Net", {kPieces[0]}), ::testing::StartsWith("Net: 1 piece\npiece "));
}

TEST(PieceTableTest, JsonHasEveryParameter) {
  const nlohmann::json json = nlohmann::json::parse(PiecesAsJson("Net", kPieces));
  EXPECT_EQ(json["graph"], "Net");
  ASSERT_EQ(json["pieces"].size(), 3u);
  EXPECT_EQ(json["pieces"][1]["parameters"].size(), 6u);
  EXPECT_EQ(json["pieces"][1]["bytes"], 4096);
  EXPECT_EQ(json["pieces"][1]["extensions"], 2);
  EXPECT_EQ(json["pieces"][1]["nodes"], 12);
  EXPECT_EQ(PiecesAsJson("Net", kPieces).find('\n'), std::string::npos);
  EXPECT_NO_THROW(PiecesAsJson("Net", {{.parameters = {"\xff"}}}));
}

}  // namespace
}  // namespace ddp::internal
