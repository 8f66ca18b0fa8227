#include "ddp/model/replica_drift.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::HasSubstr;

const std::vector<std::string> kNames = {"encoder.weight", "encoder.bias", "head.weight"};

TEST(ReplicaDriftTest, EqualParametersAreNoDrift) {
  EXPECT_EQ(DescribeDrift(kNames, std::vector<int64_t>{1, 2, 3, 1, 2, 3}), "");
  EXPECT_EQ(DescribeDrift(kNames, std::vector<int64_t>{1, 2, 3}), "");
}

TEST(ReplicaDriftTest, NamesTheFirstParameterAndTheRanksThatAreNotLikeMost) {
  EXPECT_EQ(DescribeDrift(kNames, std::vector<int64_t>{1, 2, 3,  //
                                                       1, 2, 3,  //
                                                       1, 9, 8,  //
                                                       1, 2, 3}),
            "encoder.bias has other values on rank 2 than on ranks 0, 1, 3; "
            "2 of 3 parameters differ");
  EXPECT_THAT(DescribeDrift(kNames, std::vector<int64_t>{7, 2, 3,  //
                                                         1, 2, 3,  //
                                                         1, 2, 3}),
              HasSubstr("encoder.weight has other values on rank 0 than on ranks 1, 2; 1 of 3"));
}

TEST(ReplicaDriftTest, TheLowestRankIsRightWhereNoneAreMost) {
  EXPECT_THAT(DescribeDrift({"w"}, std::vector<int64_t>{5, 4}),
              HasSubstr("on rank 1 than on rank 0"));
  EXPECT_THAT(DescribeDrift({"w"}, std::vector<int64_t>{5, 4, 3}),
              HasSubstr("on ranks 1, 2 than on rank 0"));
}

TEST(ReplicaDriftTest, ManyRanksAreCounted) {
  std::vector<int64_t> hashes(1000, 1);
  hashes[3] = 2;
  EXPECT_THAT(DescribeDrift({"w"}, hashes),
              HasSubstr("on rank 3 than on ranks 0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, "
                        "15, 16 and 983 more;"));
}

}  // namespace
}  // namespace ddp::internal
