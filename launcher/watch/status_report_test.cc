#include "launcher/watch/status_report.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp::launcher {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

elastic::RankRow Rank(int rank, int local_rank) {
  return {.rank = rank,
          .local_rank = local_rank,
          .pid = 4000 + rank,
          .step = 1200,
          .steps_per_second = 2.5,
          .phase = "forward",
          .progress_age_s = 0.25,
          .straggler_factor = 1};
}

elastic::JobStatus TwoNodes() {
  elastic::JobStatus status;
  status.run_id = "digits";
  status.instance = 2;
  status.state = "running";
  status.generation = 5;
  status.nonce = "00000000000000aa";
  status.reason = "rank 1 was killed by SIGKILL";
  status.restarts = 1;
  status.max_restarts = 3;
  status.min_nodes = 1;
  status.max_nodes = 2;
  status.world_size = 4;
  status.unix_time_s = 1000;
  status.nodes_total = 2;
  for (int i = 0; i < 2; ++i) {
    elastic::NodeStatus node;
    node.node = absl::StrCat("node-", i);
    node.is_member = true;
    node.lease_left_s = 2.6;
    node.row_known = true;
    node.row.host = absl::StrCat("a-", i + 1);
    node.row.role = "default";
    node.row.group_rank = i;
    node.row.agent_pid = 3990 + i;
    node.row.generation = 5;
    node.row.state = "running";
    node.row.ranks = {Rank(2 * i, 0), Rank(2 * i + 1, 1)};
    status.nodes.push_back(node);
  }
  status.failures.push_back({.unix_time_s = 910,
                             .generation = 4,
                             .rank = 1,
                             .host = "a-1",
                             .cause = "rank 1 was killed by SIGKILL",
                             .charged = true});
  return status;
}

TEST(StatusTableTest, TellsWhereTheJobIs) {
  EXPECT_EQ(StatusTable(TwoNodes(), 64),
            R"(job digits (instance 2): running, generation 5, step 1200 at 2.50 steps/s
  nodes     2 of 1:2; 4 ranks
  restarts  1 of 3 spent
  last end  generation 4: rank 1 was killed by SIGKILL

  NODE  HOST  ROLE     STATE    LEASE LEFT  RANKS  AGENT
  0     a-1   default  running  2.6 s       0-1    3990
  1     a-2   default  running  2.6 s       2-3    3991

  RANK  HOST  LOCAL  PID   STEP  STEPS/S  PHASE    LAST STEP  OWN TIME
  0     a-1   0      4000  1200  2.50     forward  0.2 s ago  1.00x
  1     a-1   1      4001  1200  2.50     forward  0.2 s ago  1.00x
  2     a-2   0      4002  1200  2.50     forward  0.2 s ago  1.00x
  3     a-2   1      4003  1200  2.50     forward  0.2 s ago  1.00x

  LAST FAILURES  GENERATION  RANK  HOST  CAUSE
  90 s ago       4           1     a-1   rank 1 was killed by SIGKILL
)");
}

TEST(StatusTableTest, NamesWhatIsWrongFirst) {
  elastic::JobStatus status = TwoNodes();
  status.max_nodes = 4;
  status.restarts = 3;
  status.nodes[1].lease_left_s = -4;
  status.nodes[0].row.ranks[1].progress_age_s = 95;
  status.nodes[0].row.ranks[1].phase = "backward";
  status.nodes[1].row.ranks[0].straggler_factor = 2.5;
  status.nodes[1].row.ranks[0].phase = "data";
  EXPECT_THAT(StatusWarnings(status),
              ElementsAre("node a-2 has not been heard: its lease ran out 4.0 s ago",
                          "rank 1 on a-1 has made no step for 95 s, in phase backward",
                          "rank 2 on a-2 needs 2.5 times as long for its own part of a step as the "
                          "median, in phase data",
                          "2 nodes short of 4",
                          "the budget of restarts is spent: the next failure ends the job"));
  EXPECT_THAT(StatusTable(status, 64), HasSubstr("\n  WARNING   node a-2 has not been heard"));
}

TEST(StatusTableTest, AHealthyJobHasNoWarning) {
  EXPECT_THAT(StatusWarnings(TwoNodes()), IsEmpty());
}

TEST(StatusTableTest, FailedSavesAreCountedAndWarnedOfWhileTheyFail) {
  elastic::JobStatus status = TwoNodes();
  for (elastic::NodeStatus& node : status.nodes) {
    node.row.failed_saves = 7;
    node.row.failed_saves_in_a_row = 3;
    node.row.save_error = "/disk/step-1: No space left on device";
  }
  status.nodes[0].row.failed_saves_in_a_row = 0;  // no row was sent since
  EXPECT_THAT(StatusWarnings(status),
              ElementsAre("no checkpoint is being saved: 3 saves failed in a row"));
  const std::string line =
      "\n  saves     7 failed; the newest: /disk/step-1: No space left on device\n";
  EXPECT_THAT(StatusTable(status, 64), HasSubstr(line));
  status.nodes[1].row.failed_saves_in_a_row = 0;
  EXPECT_THAT(StatusWarnings(status), IsEmpty());
  EXPECT_THAT(StatusTable(status, 64), HasSubstr(line));
  // A node that waits to join has failed in another generation.
  status.nodes[0].is_member = status.nodes[1].is_member = false;
  EXPECT_THAT(StatusTable(status, 64), Not(HasSubstr("saves")));
}

TEST(StatusTableTest, AJobThatHasEndedSaysWhy) {
  elastic::JobStatus status = TwoNodes();
  status.state = "budget_spent";
  status.end_reason = "rank 1 was killed by SIGKILL, and no restart is left";
  status.nodes[1].lease_left_s = -4000;
  EXPECT_THAT(
      StatusTable(status, 64),
      HasSubstr("job digits (instance 2): budget_spent: rank 1 was killed by SIGKILL, and no"));
  EXPECT_THAT(StatusTable(status, 64), HasSubstr("\n  last      generation 5, 4 ranks\n"));
  EXPECT_THAT(StatusWarnings(status), IsEmpty());
}

TEST(StatusTableTest, SaysWhichGenerationEndsWhy) {
  elastic::JobStatus status = TwoNodes();
  status.reason = "node c joins";
  status.state = "draining";
  EXPECT_THAT(StatusTable(status, 64), HasSubstr("\n  draining  generation 5: node c joins\n"));
  status.state = "forming";
  EXPECT_THAT(StatusTable(status, 64), HasSubstr("\n  last end  generation 5: node c joins\n"));
  status.state = "succeeded";
  EXPECT_THAT(StatusTable(status, 64), HasSubstr("\n  last end  generation 4: node c joins\n"));
}

TEST(StatusTableTest, AJobThatIsFormingSaysWhatItWaitsFor) {
  elastic::JobStatus status;
  status.run_id = "digits";
  status.state = "forming";
  status.min_nodes = 2;
  status.max_nodes = 2;
  status.nodes_total = 1;
  status.nodes.emplace_back();
  status.nodes[0].node = "n";
  status.nodes[0].lease_left_s = 1;
  EXPECT_EQ(StatusTable(status, 64), R"(job digits: forming
  nodes     0 of 2, 1 waits; 0 ranks
  restarts  0 of 0 spent
  WARNING   node n has not described itself yet
  WARNING   no generation runs: nodes are being waited for, at least 2 are needed

  NODE   HOST  ROLE  STATE  LEASE LEFT  RANKS  AGENT
  waits  n     -     -      1.0 s       -      -
)");
}

TEST(StatusTableTest, OfALargeJobItShowsTheRanksThatMatter) {
  elastic::JobStatus status = TwoNodes();
  status.nodes.resize(1);
  status.nodes_total = 10'000;
  status.max_nodes = 1;
  for (int rank = 2; rank < 1000; ++rank) {
    status.nodes[0].row.ranks.push_back(Rank(rank, rank));
  }
  for (int rank = 900; rank < 920; ++rank) {
    status.nodes[0].row.ranks[rank].progress_age_s = 60;
  }
  const std::string table = StatusTable(status, 30);
  EXPECT_THAT(table, HasSubstr("\n  and 970 more ranks (--all shows them)\n"));
  EXPECT_THAT(table, HasSubstr("\n  and 9999 more nodes (--all shows them)\n"));
  EXPECT_THAT(table, HasSubstr("\n  WARNING   and 15 more ranks without progress\n"));
  EXPECT_THAT(table, HasSubstr("\n  919   a-1 "));
  EXPECT_THAT(table, HasSubstr("\n  9     a-1 "));
  EXPECT_THAT(table, Not(HasSubstr("\n  10    a-1 ")));
}

// The text comes from the store and reaches a terminal.
TEST(StatusTableTest, TextFromTheStoreDoesNotSteerTheTerminal) {
  elastic::JobStatus status = TwoNodes();
  const std::string evil = "\x1b[2J\x9b\n\r\b\xc2\x9b";
  status.run_id = status.state = status.end_reason = status.reason = evil;
  status.nodes[0].node = status.nodes[0].row.host = status.nodes[0].row.role = evil;
  status.nodes[0].row.state = status.nodes[0].row.ranks[0].phase = evil;
  status.nodes[0].row.failed_saves = 1;
  status.nodes[0].row.save_error = evil;
  status.failures[0].host = status.failures[0].cause = evil;
  for (const char* state : {"running", "closed"}) {
    status.state = state;
    for (const char byte : StatusTable(status, 64)) {
      EXPECT_TRUE(byte == '\n' || (byte >= ' ' && byte <= '~')) << int{byte};
    }
  }
}

TEST(StatusJsonTest, HasAllThatIsKnown) {
  elastic::JobStatus status = TwoNodes();
  status.nodes[1].row.ranks[1] = {.rank = 3, .local_rank = 1};
  status.nodes[1].row.failed_saves = 7;
  status.nodes[1].row.failed_saves_in_a_row = 3;
  status.nodes[1].row.save_error = "/disk: No space left on device";
  const nlohmann::json json = nlohmann::json::parse(StatusJson({status, {}}));
  ASSERT_EQ(json["jobs"].size(), 2u);
  const nlohmann::json& job = json["jobs"][0];
  EXPECT_EQ(job["run_id"], "digits");
  EXPECT_EQ(job["state"], "running");
  EXPECT_EQ(job["end_reason"], nullptr);
  EXPECT_EQ(job["generation"], 5);
  EXPECT_EQ(job["restarts"], 1);
  EXPECT_EQ(job["max_restarts"], 3);
  EXPECT_EQ(job["nodes_min"], 1);
  EXPECT_EQ(job["nodes_max"], 2);
  EXPECT_EQ(job["world_size"], 4);
  EXPECT_EQ(job["step"], nullptr);  // rank 3 has committed none
  EXPECT_EQ(job["steps_per_second"], 2.5);
  EXPECT_TRUE(job["warnings"].is_array());
  ASSERT_EQ(job["nodes"].size(), 2u);
  EXPECT_EQ(job["nodes"][0]["host"], "a-1");
  EXPECT_EQ(job["nodes"][0]["lease_left_s"], 2.6);
  EXPECT_EQ(job["nodes"][0]["ranks"][1]["pid"], 4001);
  EXPECT_EQ(job["nodes"][0]["ranks"][1]["step"], 1200);
  EXPECT_EQ(job["nodes"][0]["ranks"][1]["seconds_since_progress"], 0.25);
  EXPECT_EQ(job["nodes"][0]["failed_saves"], 0);
  EXPECT_EQ(job["nodes"][0]["save_error"], nullptr);
  EXPECT_EQ(job["nodes"][1]["failed_saves"], 7);
  EXPECT_EQ(job["nodes"][1]["failed_saves_in_a_row"], 3);
  EXPECT_EQ(job["nodes"][1]["save_error"], "/disk: No space left on device");
  EXPECT_EQ(job["nodes"][1]["ranks"][1]["pid"], nullptr);
  EXPECT_EQ(job["nodes"][1]["ranks"][1]["phase"], nullptr);
  ASSERT_EQ(job["failures"].size(), 1u);
  EXPECT_EQ(job["failures"][0]["cause"], "rank 1 was killed by SIGKILL");
  EXPECT_EQ(job["failures"][0]["charged"], true);
  EXPECT_EQ(json["jobs"][1]["nodes"], nlohmann::json::array());
}

TEST(StatusJsonTest, BytesThatAreNoTextDoNotSpoilIt) {
  elastic::JobStatus status = TwoNodes();
  status.reason = "\xff\x01";
  EXPECT_FALSE(nlohmann::json::parse(StatusJson({status}), nullptr, false).is_discarded());
  EXPECT_EQ(StatusJson({}), "{\n  \"jobs\": []\n}\n");
}

TEST(StandsStillTest, NeedsHalfAMinuteAndTenSteps) {
  elastic::RankRow rank = Rank(0, 0);
  rank.progress_age_s = 29;
  EXPECT_FALSE(StandsStill(rank, 100));
  rank.progress_age_s = 31;
  EXPECT_TRUE(StandsStill(rank, 100));
  EXPECT_FALSE(StandsStill(rank, 0.1));  // steps of 10 s: it is in its fourth
  EXPECT_TRUE(StandsStill(rank, -1));
  rank.pid = 0;
  EXPECT_FALSE(StandsStill(rank, 100));
}

}  // namespace
}  // namespace ddp::launcher
