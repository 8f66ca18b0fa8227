#include "store/redis/percent_encoding.h"

#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace ddp::store {
namespace {

TEST(PercentEncodingTest, RunIdCannotEndTheHashTag) {
  EXPECT_EQ(EncodeRunIdForKey("plain-run_1"), "plain-run_1");
  EXPECT_EQ(EncodeRunIdForKey("a}:b{c%7D"), "a%7D:b%7Bc%257D");
}

TEST(PercentEncodingTest, DifferentRunIdsStayDifferent) {
  EXPECT_NE(EncodeRunIdForKey("a}"), EncodeRunIdForKey("a%7D"));
}

TEST(PercentEncodingTest, EveryByteComesBack) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  const std::string encoded = PercentEncodeForUrl(all);
  for (const char character : encoded) EXPECT_TRUE(character > ' ' && character < 127);
  EXPECT_EQ(encoded.find('&'), std::string::npos);
  EXPECT_EQ(encoded.find('?'), std::string::npos);
  EXPECT_EQ(*PercentDecode(encoded), all);
  EXPECT_EQ(*PercentDecode(PercentEncode(all, "{}")), all);
}

TEST(PercentEncodingTest, DigitsAtTheVeryEnd) { EXPECT_EQ(*PercentDecode("a%7b"), "a{"); }

TEST(PercentEncodingTest, RefusesHalfAnEscape) {
  for (const char* text : {"%", "a%4", "%zz", "%4g1", "%%41"}) {
    EXPECT_EQ(PercentDecode(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

}  // namespace
}  // namespace ddp::store
