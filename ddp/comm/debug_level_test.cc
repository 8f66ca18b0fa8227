#include "ddp/comm/debug_level.h"

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(DebugLevelTest, KnowsThreeLevels) {
  EXPECT_EQ(*ParseDebugLevel(""), DebugLevel::kOff);
  EXPECT_EQ(*ParseDebugLevel("off"), DebugLevel::kOff);
  EXPECT_EQ(*ParseDebugLevel("Info"), DebugLevel::kInfo);
  EXPECT_EQ(*ParseDebugLevel("DETAIL"), DebugLevel::kDetail);
  EXPECT_EQ(ParseDebugLevel("verbose").status().message(),
            "TORCH_DISTRIBUTED_DEBUG=\"verbose\" is unknown; it is OFF, INFO or DETAIL");
}

}  // namespace
}  // namespace ddp::internal
