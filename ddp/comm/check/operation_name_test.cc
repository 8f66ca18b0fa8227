#include "ddp/comm/check/operation_name.h"

#include <string>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(OperationNameTest, ReadsAsText) {
  EXPECT_EQ(OperationName("a barrier").ToString(), "a barrier");
  EXPECT_EQ(OperationName("the all-reduce of bucket", 0).ToString(), "the all-reduce of bucket 0");
  EXPECT_EQ(OperationName(std::string("made up")).ToString(), "made up");
}

}  // namespace
}  // namespace ddp::internal
