#include "ddp/comm/check/collective_record.h"

#include "ddp/common/rpc_place.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(RankPositionTest, SurvivesTheStore) {
  RankPosition sent{.launched = 2};
  sent.rpc = {.world = 1LL << 62, .meetings = 3, .waits_in = RpcPlace::Meeting::kShutdown};
  sent.newest = {{.sequence = 0,
                  .fingerprint = 0xfedcba9876543210,
                  .operation = "broadcast",
                  .what = "a\ttext\nof two lines",
                  .dtype = "Int",
                  .bytes = 8,
                  .shape = "[2, 1]",
                  .layout = "Sparse",
                  .device = "cpu",
                  .root = 4},
                 {.sequence = 1,
                  .fingerprint = 7,
                  .operation = "all-reduce (sum)",
                  .what = "the all-reduce of gradient bucket 2",
                  .dtype = "Float",
                  .bytes = 4 << 20}};
  const auto read = RankPosition::Parse(sent.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->Serialize(), sent.Serialize());
  EXPECT_EQ(read->launched, 2);
  EXPECT_EQ(read->rpc, sent.rpc);
  EXPECT_EQ(read->newest, sent.newest);
  EXPECT_EQ(read->newest[1].Describe(),
            "the all-reduce of gradient bucket 2 (all-reduce (sum), 4.0 MiB of Float)");
}

TEST(RankPositionTest, RefusesAnotherText) {
  for (const char* bad : {"", "1", "1 7", "1 7 1 3", "1 7 1 -1", "1 0 0 0\nx",
                          "1 0 0 0\n0\tzz\ta\tb\tc\t4\t[]\td\te\t-1"}) {
    EXPECT_FALSE(RankPosition::Parse(bad).has_value()) << bad;
  }
}

}  // namespace
}  // namespace ddp::internal
