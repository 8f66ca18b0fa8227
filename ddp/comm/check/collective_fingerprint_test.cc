#include "ddp/comm/check/collective_fingerprint.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

CollectiveFingerprint Sum(std::vector<int64_t> shape) {
  return {.operation = "all-reduce (sum)",
          .what = "the all-reduce of gradient bucket 3",
          .dtype = "Float",
          .shape = std::move(shape),
          .layout = "Strided",
          .device = "cpu"};
}

TEST(CollectiveFingerprintTest, SurvivesTheStore) {
  CollectiveFingerprint sent = Sum({2, 3});
  sent.root = 4;
  sent.what = "a text\nof two lines";
  const auto read = CollectiveFingerprint::Parse(sent.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->Serialize(), sent.Serialize());
  EXPECT_EQ(read->what, sent.what);
  EXPECT_THAT(read->shape, ::testing::ElementsAre(2, 3));
  const auto scalar = CollectiveFingerprint::Parse(Sum({}).Serialize());
  ASSERT_TRUE(scalar.has_value());
  EXPECT_TRUE(scalar->shape.empty());
  EXPECT_FALSE(CollectiveFingerprint::Parse("met").has_value());
}

TEST(CollectiveFingerprintTest, EqualOnesAreFine) {
  EXPECT_EQ(CompareFingerprints(0, {}), "");
  EXPECT_EQ(CompareFingerprints(0, {Sum({2}), Sum({2}), Sum({2})}), "");
}

TEST(CollectiveFingerprintTest, NamesTheFewAndWhatDiffers) {
  CollectiveFingerprint other = Sum({7});
  other.dtype = "Double";
  EXPECT_EQ(CompareFingerprints(5, {other, Sum({2, 3}), Sum({2, 3}), other, Sum({2, 3})}),
            "Detected mismatch between collectives on ranks: as collective 5, ranks 1, 2, 4 run "
            "all-reduce (sum) of a Float tensor of shape [2, 3] on cpu (the all-reduce of gradient "
            "bucket 3); but ranks 0, 3 run all-reduce (sum) of a Double tensor of shape [7] on cpu "
            "(the all-reduce of gradient bucket 3): they differ in dtype, shape. All ranks must "
            "call the same collectives in the same order");
}

TEST(CollectiveFingerprintTest, EveryAspectCounts) {
  const auto differing = [](void (*change)(CollectiveFingerprint&)) {
    CollectiveFingerprint other = Sum({2});
    change(other);
    return CompareFingerprints(0, {Sum({2}), other});
  };
  EXPECT_THAT(differing([](auto& f) { f.operation = "broadcast"; }), HasSubstr("in operation."));
  EXPECT_THAT(differing([](auto& f) { f.layout = "Sparse"; }),
              AllOf(HasSubstr("in layout."), HasSubstr("a Sparse Float tensor")));
  EXPECT_THAT(differing([](auto& f) { f.device = "cuda"; }), HasSubstr("in device type."));
  EXPECT_THAT(differing([](auto& f) { f.root = 1; }),
              AllOf(HasSubstr("in root."), HasSubstr("from rank 1")));
  EXPECT_THAT(differing([](auto& f) { f.what = "a barrier"; }), HasSubstr("in purpose."));
}

TEST(CollectiveFingerprintTest, ATieGoesToTheLowestRank) {
  EXPECT_THAT(CompareFingerprints(0, {Sum({1}), Sum({2})}),
              AllOf(HasSubstr("rank 0 runs"), HasSubstr("but rank 1 runs")));
}

}  // namespace
}  // namespace ddp::internal
