#include "ddp/comm/reports/log_entry.h"

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(LogEntryTest, FailureKeepsItsText) {
  const LogEntry sent{.kind = LogEntry::Kind::kFailure,
                      .incarnation = 12,
                      .rank = 3,
                      .reason = "rank 3: two words\nand a second line "};
  const auto read = LogEntry::Parse(sent.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->kind, LogEntry::Kind::kFailure);
  EXPECT_EQ(read->incarnation, 12);
  EXPECT_EQ(read->rank, 3);
  EXPECT_EQ(read->reason, sent.reason);
}

TEST(LogEntryTest, AnEmptyReasonIsOne) {
  const auto read = LogEntry::Parse(LogEntry{.rank = 1}.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->reason, "");
}

TEST(LogEntryTest, AQuestionKeepsItsNumber) {
  const LogEntry sent{.kind = LogEntry::Kind::kWhere, .incarnation = 1, .rank = 1000, .number = 7};
  const auto read = LogEntry::Parse(sent.Serialize());
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(read->kind, LogEntry::Kind::kWhere);
  EXPECT_EQ(read->number, 7);
  EXPECT_EQ(read->rank, 1000);
}

TEST(LogEntryTest, OtherTextsAreRefused) {
  for (const char* text : {"", "failure", "failure x 1 why", "failure 0 one why", "where 0 1",
                           "where 0 1 x", "hello 0 1 2"}) {
    EXPECT_FALSE(LogEntry::Parse(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace ddp::internal
