#include "launcher/watch/metrics_text.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

elastic::JobStatus TwoRanks() {
  elastic::JobStatus status;
  status.run_id = "digits";
  status.instance = 2;
  status.generation = 5;
  status.restarts = 3;
  status.max_restarts = 10;
  status.min_nodes = 2;
  status.max_nodes = 3;
  status.world_size = 6;
  status.nodes_total = 3;
  status.store_outages = 1;
  status.heartbeat_interval_s = 0.5;
  elastic::NodeStatus node;
  node.row.host = "a-1";
  node.row.role = "trainer";
  node.row.group_rank = 1;
  node.row.state = "running";
  node.row.failed_saves = 7;
  node.row.failed_saves_in_a_row = 3;
  node.row.save_error = "/disk: No space left on device";
  node.row.ranks.resize(2);
  node.row.ranks[0] = {.rank = 2,
                       .local_rank = 0,
                       .pid = 71,
                       .step = 1200,
                       .steps_per_second = 2.5,
                       .phase = "backward",
                       .progress_age_s = 0.25,
                       .straggler_factor = 1.5};
  node.row.ranks[1].rank = 3;
  node.row.ranks[1].local_rank = 1;
  status.nodes.push_back(node);
  return status;
}

TEST(MetricsTextTest, SaysAllThatIsKnown) {
  const std::string text = MetricsText(TwoRanks());
  EXPECT_THAT(text, HasSubstr("ddp_job_info{run_id=\"digits\",instance=\"2\",host=\"a-1\","
                              "role=\"trainer\",group_rank=\"1\",state=\"running\"} 1\n"));
  for (const char* line :
       {"# TYPE ddp_generation gauge\nddp_generation 5\n",
        "# HELP ddp_generation Generation of",
        "# TYPE ddp_restarts_total counter\nddp_restarts_total{charged=\"true\"} 3\n"
        "ddp_restarts_total{charged=\"false\"} 1\n",
        "ddp_restarts_allowed 10\n",
        "ddp_world_size 6\n",
        "ddp_nodes 3\n",
        "ddp_nodes_min 2\n",
        "ddp_nodes_max 3\n",
        "ddp_store_in_reach 1\n",
        "ddp_store_outages_total 1\n",
        "ddp_heartbeat_seconds 0.5\n",
        "ddp_hangs_total 0\n",
        "# TYPE ddp_failed_saves_total counter\nddp_failed_saves_total 7\n",
        "# TYPE ddp_failed_saves_in_a_row gauge\nddp_failed_saves_in_a_row 3\n",
        "ddp_worker_up{rank=\"2\",local_rank=\"0\"} 1\n",
        "ddp_worker_up{rank=\"3\",local_rank=\"1\"} 0\n",
        "ddp_step{rank=\"2\",local_rank=\"0\"} 1200\n",
        "ddp_steps_per_second{rank=\"2\",local_rank=\"0\"} 2.5\n",
        "ddp_seconds_since_progress{rank=\"2\",local_rank=\"0\"} 0.25\n",
        "ddp_straggler_factor{rank=\"2\",local_rank=\"0\"} 1.5\n",
        "ddp_worker_phase{rank=\"2\",local_rank=\"0\",phase=\"backward\"} 1\n"}) {
    EXPECT_THAT(text, HasSubstr(std::string(line)));
  }
  // Rank 3 has ended before its first step.
  EXPECT_THAT(text, Not(HasSubstr("ddp_step{rank=\"3\"")));
  EXPECT_THAT(text, Not(HasSubstr("ddp_seconds_since_progress{rank=\"3\"")));
}

TEST(MetricsTextTest, LeavesOutWhatIsNotKnown) {
  elastic::JobStatus status;
  status.nodes.emplace_back();
  status.store_in_reach = false;
  const std::string text = MetricsText(status);
  EXPECT_THAT(text, HasSubstr("ddp_generation 0\n"));
  EXPECT_THAT(text, HasSubstr("ddp_restarts_total{charged=\"false\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("ddp_store_in_reach 0\n"));
  EXPECT_THAT(text, HasSubstr("ddp_failed_saves_total 0\n"));
  EXPECT_THAT(text, Not(HasSubstr("ddp_heartbeat_seconds")));
  EXPECT_THAT(text, Not(HasSubstr("ddp_worker_up")));
  EXPECT_THAT(MetricsText({}), HasSubstr("ddp_generation 0\n"));
}

TEST(MetricsTextTest, ALabelCannotEndItsLineOrSpoilTheScrape) {
  elastic::JobStatus status = TwoRanks();
  status.run_id = "a\"b\\c\nddp_step 7\xff\x01";
  const std::string text = MetricsText(status);
  EXPECT_THAT(text, HasSubstr("run_id=\"a\\\"b\\\\c?ddp_step 7??\""));
}

}  // namespace
}  // namespace ddp::launcher
