#include "ddp/reducer/buckets/bucket_limits.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kMebibyte = 1 << 20;

std::vector<int64_t> LimitsOf(const BucketCaps& caps) { return BucketLimits(caps).value(); }

std::string Refusal(const BucketCaps& caps) {
  return std::string(BucketLimits(caps).status().message());
}

TEST(BucketLimitsTest, AreSmallFirstAnd25MebibytesThenWithoutAnyCap) {
  EXPECT_THAT(LimitsOf({}), ElementsAre(kMebibyte, 25 * kMebibyte));
}

TEST(BucketLimitsTest, OneCapHoldsForTheFirstBucketToo) {
  EXPECT_THAT(LimitsOf({.bucket_cap_mb = 4}), ElementsAre(4 * kMebibyte, 4 * kMebibyte));
  EXPECT_THAT(LimitsOf({.bucket_cap_mb = 4, .first_bucket_cap_mb = 0.5}),
              ElementsAre(kMebibyte / 2, 4 * kMebibyte));
  EXPECT_THAT(LimitsOf({.first_bucket_cap_mb = 2}), ElementsAre(2 * kMebibyte, 25 * kMebibyte));
}

TEST(BucketLimitsTest, AListStandsForItself) {
  EXPECT_THAT(LimitsOf({.bucket_cap_mb_list = {1, 2, 3}}),
              ElementsAre(kMebibyte, 2 * kMebibyte, 3 * kMebibyte));
  EXPECT_THAT(LimitsOf({.bucket_cap_mb_list = {2}}), ElementsAre(2 * kMebibyte));
}

TEST(BucketLimitsTest, AreNeverZeroBytes) {
  EXPECT_THAT(LimitsOf({.bucket_cap_mb = 1e-9}), ElementsAre(1, 1));
}

TEST(BucketLimitsTest, RefuseWhatIsNoSizeAndNameTheOption) {
  EXPECT_EQ(Refusal({.bucket_cap_mb = 0}), "first_bucket_cap_mb=0 must be above 0, in MiB");
  EXPECT_EQ(Refusal({.bucket_cap_mb = -1, .first_bucket_cap_mb = 1}),
            "bucket_cap_mb=-1 must be above 0, in MiB");
  EXPECT_THAT(Refusal({.bucket_cap_mb_list = {1, 0}}), HasSubstr("bucket_cap_mb_list=0 "));
  EXPECT_THAT(Refusal({.bucket_cap_mb = 1, .first_bucket_cap_mb = std::nan("")}),
              HasSubstr("first_bucket_cap_mb=nan "));
  EXPECT_THAT(Refusal({.bucket_cap_mb_list = {std::numeric_limits<double>::infinity()}}),
              HasSubstr("bucket_cap_mb_list=inf "));
  EXPECT_THAT(Refusal({.bucket_cap_mb_list = {1.1e9}}), HasSubstr("must be above 0, in MiB"));
}

}  // namespace
}  // namespace ddp::internal
