#include "elastic/agent/job_status.h"

#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

NodeRow TwoRanks() {
  NodeRow row;
  row.host = "a-1";
  row.role = "trainer";
  row.group_rank = 3;
  row.agent_pid = 4100;
  row.generation = 7;
  row.state = "running";
  row.ranks.resize(2);
  row.ranks[0] = {.rank = 6,
                  .local_rank = 0,
                  .pid = 4101,
                  .step = 1200,
                  .steps_per_second = 2.5,
                  .phase = "forward",
                  .progress_age_s = 0.25,
                  .straggler_factor = 1.5};
  row.ranks[1].rank = 7;
  row.ranks[1].local_rank = 1;
  row.ranks[1].pid = 4102;
  return row;
}

std::string Replaced(std::string text, const std::string& what, const std::string& by) {
  const size_t at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what << " is not in " << text;
  return at == std::string::npos ? text : text.replace(at, what.size(), by);
}

TEST(NodeRowTest, ComesBackAsItWas) {
  const absl::StatusOr<NodeRow> row = ParseNodeRow(FormatNodeRow(TwoRanks()));
  ASSERT_TRUE(row.ok()) << row.status();
  EXPECT_EQ(*row, TwoRanks());
  EXPECT_EQ(ParseNodeRow(FormatNodeRow(NodeRow())).value(), NodeRow());
}

NodeRow WithFailedSaves() {
  NodeRow row = TwoRanks();
  row.failed_saves = 7;
  row.failed_saves_in_a_row = 3;
  row.save_error = "/disk: No space left on device";
  return row;
}

TEST(NodeRowTest, FailedSavesComeBackAsTheyWere) {
  const std::string text = FormatNodeRow(WithFailedSaves());
  const absl::StatusOr<NodeRow> row = ParseNodeRow(text);
  ASSERT_TRUE(row.ok()) << row.status();
  EXPECT_EQ(*row, WithFailedSaves());
  for (const std::string& bad :
       {Replaced(text, "saves\":7", "saves\":-7"), Replaced(text, "a_row\":3", "a_row\":3.5"),
        Replaced(text, "\"/disk: No space left on device\"", "7"),
        Replaced(text, "/disk", std::string(5000, 'x'))}) {
    EXPECT_EQ(ParseNodeRow(bad).status().code(), absl::StatusCode::kInternal) << bad;
  }
}

TEST(NodeRowTest, IsOneShortLine) {
  const std::string text = FormatNodeRow(TwoRanks());
  EXPECT_EQ(text.find('\n'), std::string::npos);
  EXPECT_LT(text.size(), 200u) << text;
}

TEST(NodeRowTest, StaysWithinItsBoundsWhateverItIsGiven) {
  NodeRow row = TwoRanks();
  row.host = std::string(100'000, '\xff');
  row.state = std::string(100'000, '\n');
  row.failed_saves = 1;
  row.save_error = std::string(100'000, '\xff');
  row.ranks.resize(5000, row.ranks[0]);
  for (RankRow& rank : row.ranks) {
    rank.phase = std::string(1000, '\x01');
    rank.step = std::numeric_limits<int64_t>::max() / 1024;
    rank.steps_per_second = std::numeric_limits<double>::infinity();
    rank.progress_age_s = std::numeric_limits<double>::quiet_NaN();
    rank.straggler_factor = std::numeric_limits<double>::max();
  }
  const std::string text = FormatNodeRow(row);
  EXPECT_LE(text.size(), kNodeRowBytesMax);
  const absl::StatusOr<NodeRow> parsed = ParseNodeRow(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->ranks.size(), kRanksOfNodeMax);
  EXPECT_EQ(parsed->ranks[9].steps_per_second, -1);
  EXPECT_EQ(parsed->ranks[9].progress_age_s, -1);
}

// Rows are not trusted: any writer of the store may have put anything there.
TEST(NodeRowTest, RefusesWhatIsNoRow) {
  const std::string good = FormatNodeRow(TwoRanks());
  const std::string bad[] = {
      "",
      "[]",
      "7",
      "{",
      "\xff",
      std::string(kNodeRowBytesMax + 1, ' '),
      std::string(20'000, '['),
      Replaced(good, "\"a-1\"", "7"),
      Replaced(good, "\"a-1\"", "\"" + std::string(5000, 'x') + "\""),
      Replaced(good, "\"generation\":7", "\"generation\":-7"),
      Replaced(good, "\"generation\":7", "\"generation\":18446744073709551615"),
      Replaced(good, "\"generation\":7", "\"generation\":7.5"),
      Replaced(good, "\"pid\":4100", "\"pid\":99999999999"),
      Replaced(good, "\"group_rank\":3", "\"group_rank\":-3"),
      Replaced(good, "\"ranks\":[", "\"ranks\":[7,"),
      Replaced(good, "\"ranks\":[", "\"ranks\":[[],"),
      Replaced(good, "[6,0,", "[-6,0,"),
      Replaced(good, "[6,0,", "[6,\"0\","),
      Replaced(good, "2.5", "1e300"),
      Replaced(good, "\"forward\"", "null"),
  };
  for (const std::string& text : bad) {
    const absl::Status status = ParseNodeRow(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << text.substr(0, 200);
    EXPECT_THAT(std::string(status.message()), HasSubstr("the status of a node"));
  }
  std::string many = "[6,0,1,-1,-1,\"\",-1,-1]";
  while (many.size() < 40'000) many += "," + many;
  EXPECT_FALSE(ParseNodeRow(Replaced(good, "\"ranks\":[", "\"ranks\":[" + many + ",")).ok());
}

// Nodes of two releases must understand each other's rows.
TEST(NodeRowTest, PassesOverWhatItDoesNotKnow) {
  std::string text = FormatNodeRow(TwoRanks());
  text = Replaced(text, "{", "{\"later\":[1,{}],");
  text = Replaced(text, "1.5]", "1.5,\"later\"]");
  const absl::StatusOr<NodeRow> row = ParseNodeRow(text);
  ASSERT_TRUE(row.ok()) << row.status();
  EXPECT_EQ(*row, TwoRanks());
}

TEST(JobStatusTest, TheJobIsWhereItsSlowestRankIs) {
  JobStatus status;
  EXPECT_EQ(CommonStep(status), -1);
  EXPECT_EQ(CommonStepsPerSecond(status), -1);

  status.nodes.resize(3);
  for (NodeStatus& node : status.nodes) node.row = TwoRanks();
  status.nodes[0].is_member = status.nodes[1].is_member = true;
  status.nodes[0].row.ranks[1].step = 1199;
  status.nodes[1].row.ranks[1].step = 1200;
  status.nodes[1].row.ranks[0].steps_per_second = 2.25;
  // A waiting node: its old step does not count.
  status.nodes[2].row.ranks[0].step = 3;
  status.nodes[2].row.ranks[0].steps_per_second = 0.1;
  EXPECT_EQ(CommonStep(status), 1199);
  EXPECT_EQ(CommonStepsPerSecond(status), 2.25);

  status.world_size = 4;
  EXPECT_EQ(CommonStep(status), 1199);
  status.world_size = 5;  // one rank is not known yet
  EXPECT_EQ(CommonStep(status), -1);
  status.world_size = 4;
  status.nodes[1].row.ranks[1].step = -1;
  EXPECT_EQ(CommonStep(status), -1);
}

TEST(JobStatusTest, RowsOfALargeJobAreSentLessOften) {
  EXPECT_EQ(NodeRowPeriodSeconds(1), 1);
  EXPECT_EQ(NodeRowPeriodSeconds(10'000), 20);
}

}  // namespace
}  // namespace ddp::elastic
