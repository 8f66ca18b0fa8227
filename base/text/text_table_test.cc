#include "base/text/text_table.h"

#include "gtest/gtest.h"

namespace ddp {
namespace {

TEST(TextTableTest, ColumnsAreAsWideAsTheirWidestText) {
  TextTable table({"STEP", "RUN"});
  table.Add({"7", "digits"});
  table.Add({"120000", "a"});
  EXPECT_EQ(table.Text(),
            "  STEP    RUN\n"
            "  7       digits\n"
            "  120000  a\n");
}

TEST(TextTableTest, ARowMayBeShorterThanTheHeader) {
  TextTable table({"A", "B"});
  table.Add({"alone"});
  EXPECT_EQ(table.Text(), "  A      B\n  alone\n");
}

}  // namespace
}  // namespace ddp
