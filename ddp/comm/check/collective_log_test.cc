#include "ddp/comm/check/collective_log.h"

#include <set>
#include <string>

#include "ddp/comm/check/collective_record.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

CollectiveCall Bucket(int index, int64_t elements = 1 << 20) {
  return {.operation = "all-reduce (sum)",
          .dtype = "Float",
          .elements = elements,
          .bytes = elements * 4,
          .what = {"the all-reduce of gradient bucket", index}};
}

CollectiveCall Buffers() {
  return {.operation = "broadcast",
          .dtype = "Float",
          .elements = 10,
          .bytes = 40,
          .root = 0,
          .what = "the broadcast of buffers"};
}

TEST(CollectiveLogTest, EqualCallsHaveEqualTags) {
  CollectiveLog a;
  CollectiveLog b;
  std::set<uint32_t> tags;
  for (int i = 0; i < 5000; ++i) {
    const uint32_t tag = a.Add(Bucket(i % 7));
    EXPECT_EQ(tag, b.Add(Bucket(i % 7)));
    tags.insert(tag);
  }
  EXPECT_EQ(tags.size(), 5000U);
}

TEST(CollectiveLogTest, EveryDifferenceChangesTheTag) {
  const auto tag_of = [](const CollectiveCall& call) { return CollectiveLog().Add(call); };
  const uint32_t usual = tag_of(Bucket(3));
  CollectiveCall other = Bucket(3);
  other.operation = "all-reduce (maximum)";
  EXPECT_NE(tag_of(other), usual);
  other = Bucket(3);
  other.dtype = "Int";
  EXPECT_NE(tag_of(other), usual);
  other = Bucket(3);
  other.sparse = true;
  EXPECT_NE(tag_of(other), usual);
  other = Buffers();
  other.root = 1;
  EXPECT_NE(tag_of(other), tag_of(Buffers()));
  EXPECT_NE(tag_of(Bucket(4)), usual);
  EXPECT_NE(tag_of(Bucket(3, 5)), usual);
  CollectiveLog later;
  later.Add(Bucket(0));
  EXPECT_NE(later.Add(Bucket(3)), usual);
}

// The position shows the oldest collective that is not complete, however many follow it.
TEST(CollectiveLogTest, NothingInFlightIsForgotten) {
  CollectiveLog log;
  for (int i = 0; i < 100; ++i) log.Add(Bucket(i));
  log.SetCompleteBefore(100);
  for (int i = 100; i < 1000; ++i) log.Add(Bucket(i));
  const RankPosition position = log.Position();
  EXPECT_EQ(position.launched, 1000);
  EXPECT_LE(position.newest.front().sequence, 100);
  EXPECT_GE(position.newest.back().sequence, 100);
  for (const CollectiveRecord& item : position.newest) {
    EXPECT_EQ(item.what, "the all-reduce of gradient bucket " + std::to_string(item.sequence));
  }
}

}  // namespace
}  // namespace ddp::internal
