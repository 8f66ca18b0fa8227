#include "ddp/comm/news/news_message.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(NewsMessageTest, FailureKeepsItsText) {
  const NewsMessage sent{.kind = NewsMessage::Kind::kFailure,
                         .incarnation = 12,
                         .rank = 3,
                         .reason = "rank 3: two words\nand a second line "};
  const auto read = NewsMessage::Parse(sent.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->kind, NewsMessage::Kind::kFailure);
  EXPECT_EQ(read->incarnation, 12);
  EXPECT_EQ(read->rank, 3);
  EXPECT_EQ(read->reason, sent.reason);
}

TEST(NewsMessageTest, AnEmptyReasonIsOne) {
  const auto read = NewsMessage::Parse(NewsMessage{.rank = 1}.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->reason, "");
}

TEST(NewsMessageTest, PingNamesItsRanks) {
  const NewsMessage sent{
      .kind = NewsMessage::Kind::kPing, .incarnation = 1, .number = 7, .ranks = {0, 5, 1000}};
  const auto read = NewsMessage::Parse(sent.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->kind, NewsMessage::Kind::kPing);
  EXPECT_EQ(read->number, 7);
  EXPECT_THAT(read->ranks, ::testing::ElementsAre(0, 5, 1000));
}

TEST(NewsMessageTest, OtherTextsAreRefused) {
  for (const char* text : {"", "failure", "failure x 1 why", "failure 0 one why", "ping 0 1",
                           "ping 0 1 2,x", "hello 0 1 2"}) {
    EXPECT_FALSE(NewsMessage::Parse(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace ddp::internal
