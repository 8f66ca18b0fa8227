// This test writes the keys by hand, as the scripts write them.
// launcher/end_to_end/watching_test.cc reads the keys of a real job.
#include "elastic/rendezvous/job_reader.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis_server/redis_acl.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class JobReaderTest : public ::testing::Test {
 protected:
  JobReaderTest() : redis_(testing::RedisFixture::Start()), connection_(redis_->Connect()) {
    const absl::StatusOr<store::RedisReply> time = connection_->Command({"TIME"});
    now_ms_ = time->AsArray()->at(0).AsInteger().value() * 1000;
  }

  void Do(const std::vector<std::string>& command) {
    const absl::StatusOr<store::RedisReply> reply = connection_->Command(command);
    EXPECT_TRUE(reply.ok()) << reply.status();
  }

  std::string Key(int instance, const std::string& name) {
    return absl::StrCat("ddp:{digits}:i", instance, ":", name);
  }

  // Writes a job with one member whose lease ends `lease_ms` from now.
  void MakeJob(int instance, const std::string& state, int lease_ms = 60'000) {
    Do({"SET", "ddp:{digits}:instance", absl::StrCat(instance)});
    Do({"HSET",         Key(instance, "job"),
        "token",        "t",
        "state",        state,
        "generation",   "4",
        "nonce",        "aa",
        "restarts",     "2",
        "reason",       "node b was lost",
        "max_restarts", "9",
        "min_nodes",    "1",
        "max_nodes",    "3",
        "world_size",   "5",
        "drain",        "",
        "over",         "",
        "end_kind",     "",
        "end_reason",   ""});
    Do({"HSET", Key(instance, "members"), "n1", "0 2 2 0 5 0 5 29500\ntrainer\na-1\n10.0.0.1"});
    Do({"ZADD", Key(instance, "leases"), absl::StrCat(now_ms_ + lease_ms), "n1"});
  }

  absl::StatusOr<JobRecord> Read(int64_t instance = 0, size_t nodes_max = 100) {
    return ReadJob(*connection_, "digits", instance, nodes_max);
  }
  JobRecord MustRead(int64_t instance = 0, size_t nodes_max = 100) {
    absl::StatusOr<JobRecord> job = Read(instance, nodes_max);
    EXPECT_TRUE(job.ok()) << job.status();
    return job.value_or(JobRecord());
  }

  const std::unique_ptr<testing::RedisFixture> redis_;
  const std::unique_ptr<store::RedisConnection> connection_;
  int64_t now_ms_ = 0;
};

TEST_F(JobReaderTest, ReadsAllThatIsThere) {
  MakeJob(3, "running");
  Do({"HSET", Key(3, "members"), "n2", "1 2 3 2 5 2 5 29500\ntrainer\na-2\n10.0.0.2"});
  Do({"ZADD", Key(3, "leases"), absl::StrCat(now_ms_ - 5000), "n2"});
  Do({"HSET", Key(3, "joined"), "n3", "17 4 0 -1\nspare\na-3\n10.0.0.3"});
  Do({"HSET", Key(3, "joined"), "n1", "18 2 0 -1\ntrainer\na-1\n10.0.0.1"});
  Do({"HSET", Key(3, "rows"), "n2", "{row}"});
  Do({"LPUSH", Key(3, "failures"), "1700000000500\n2\n1\n1\na-1\nrank 1 was killed\nby SIGKILL"});
  Do({"LPUSH", Key(3, "failures"), "1700000001000\n3\n-1\n0\n\nnode b was lost"});
  const JobRecord job = MustRead();
  EXPECT_EQ(job.instance, 3);
  EXPECT_THAT(job.other_running, IsEmpty());
  EXPECT_EQ(job.state, "running");
  EXPECT_EQ(job.generation, 4u);
  EXPECT_EQ(job.nonce, "aa");
  EXPECT_EQ(job.reason, "node b was lost");
  EXPECT_EQ(job.restarts, 2);
  EXPECT_EQ(job.max_restarts, 9);
  EXPECT_EQ(job.min_nodes, 1);
  EXPECT_EQ(job.max_nodes, 3);
  EXPECT_EQ(job.world_size, 5);
  EXPECT_GE(job.unix_time_s * 1000, now_ms_);
  EXPECT_EQ(job.nodes_total, 3);
  ASSERT_EQ(job.nodes.size(), 3u);
  EXPECT_EQ(job.nodes[0].node, "n1");
  EXPECT_TRUE(job.nodes[0].is_member);
  EXPECT_EQ(job.nodes[0].group_rank, 0);
  EXPECT_EQ(job.nodes[0].nproc, 2);
  EXPECT_EQ(job.nodes[0].role, "trainer");
  EXPECT_EQ(job.nodes[0].host, "a-1");
  EXPECT_EQ(job.nodes[0].row, "");
  EXPECT_GT(job.nodes[0].lease_left_s, 0);
  EXPECT_EQ(job.nodes[1].group_rank, 1);
  EXPECT_EQ(job.nodes[1].row, "{row}");
  EXPECT_LT(job.nodes[1].lease_left_s, 0);
  EXPECT_EQ(job.nodes[2].node, "n3");
  EXPECT_FALSE(job.nodes[2].is_member);
  EXPECT_FALSE(job.nodes[2].has_lease);
  EXPECT_EQ(job.nodes[2].nproc, 4);
  EXPECT_EQ(job.nodes[2].role, "spare");
  EXPECT_EQ(job.nodes[2].host, "a-3");
  ASSERT_EQ(job.failures.size(), 2u);
  EXPECT_EQ(job.failures[0].rank, -1);
  EXPECT_FALSE(job.failures[0].charged);
  EXPECT_EQ(job.failures[0].cause, "node b was lost");
  EXPECT_EQ(job.failures[1].unix_time_s, 1700000000.5);
  EXPECT_EQ(job.failures[1].generation, 2u);
  EXPECT_EQ(job.failures[1].rank, 1);
  EXPECT_TRUE(job.failures[1].charged);
  EXPECT_EQ(job.failures[1].host, "a-1");
  EXPECT_EQ(job.failures[1].cause, "rank 1 was killed\nby SIGKILL");
}

TEST_F(JobReaderTest, SaysWhyAGenerationEndsAndHowAJobHas) {
  MakeJob(1, "running");
  Do({"HSET", Key(1, "job"), "drain", "node c joins"});
  EXPECT_EQ(MustRead().state, "draining");
  EXPECT_EQ(MustRead().reason, "node c joins");
  Do({"HSET", Key(1, "job"), "drain", "", "state", "forming", "over", "rank 1 failed"});
  EXPECT_EQ(MustRead().state, "forming");
  EXPECT_EQ(MustRead().reason, "rank 1 failed");
  Do({"HSET", Key(1, "job"), "state", "ended", "end_kind", "budget_spent", "end_reason", "so"});
  EXPECT_EQ(MustRead().state, "budget_spent");
  EXPECT_EQ(MustRead().end_reason, "so");
}

TEST_F(JobReaderTest, TakesTheNewestInstanceThatRuns) {
  MakeJob(1, "running");
  MakeJob(2, "running");
  MakeJob(3, "running", -60'000);  // all of its nodes are dead
  MakeJob(4, "ended");
  const JobRecord job = MustRead();
  EXPECT_EQ(job.instance, 2);
  EXPECT_THAT(job.other_running, ElementsAre(1));
  EXPECT_EQ(MustRead(3).instance, 3);
  EXPECT_EQ(MustRead(3).state, "running");
  Do({"DEL", Key(1, "leases"), Key(2, "leases")});
  EXPECT_EQ(MustRead().instance, 4);  // no instance runs: the newest
  Do({"DEL", Key(4, "job")});
  EXPECT_EQ(MustRead().instance, 3);
}

TEST_F(JobReaderTest, SaysWhatIsNotThere) {
  absl::Status status = Read().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(status.message()), "there is no job with id digits");
  MakeJob(1, "running");
  status = Read(7).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(std::string(status.message()), "there is no job with id digits and instance 7");
}

TEST_F(JobReaderTest, ReadsNoMoreNodesThanItIsTold) {
  MakeJob(1, "running");
  for (int i = 2; i <= 600; ++i) {
    const std::string name = absl::StrCat("n", i);
    Do({"HSET", Key(1, "members"), name, absl::StrCat(i, " 600 1 ", i, " 600 0 0 1\nr\nh\na")});
    Do({"HSET", Key(1, "rows"), name, absl::StrCat("row of ", name)});
  }
  EXPECT_EQ(MustRead(0, 10).nodes.size(), 10u);
  EXPECT_EQ(MustRead(0, 10).nodes_total, 600);
  const JobRecord job = MustRead(0, 10'000);
  ASSERT_EQ(job.nodes.size(), 600u);
  for (int i = 2; i <= 600; ++i) {
    EXPECT_EQ(job.nodes[i - 1].group_rank, i);
    EXPECT_EQ(job.nodes[i - 1].row, absl::StrCat("row of n", i));
  }
}

// A job's own user can read that job, and no other.
TEST_F(JobReaderTest, NeedsNoMoreThanAJobsUserMay) {
  MakeJob(1, "running");
  Do({"SET", "ddp:{other}:instance", "1"});
  const std::string rules = store::JobAclRules("digits");
  std::vector<std::string> command = {"ACL", "SETUSER", "worker", "on", ">secret"};
  for (size_t begin = 0; begin < rules.size();) {
    const size_t end = std::min(rules.find(' ', begin), rules.size());
    if (end > begin) command.push_back(rules.substr(begin, end - begin));
    begin = end + 1;
  }
  Do(command);
  store::RedisEndpoint endpoint = redis_->SocketEndpoint();
  endpoint.user = "worker";
  endpoint.password = "secret";
  const auto connection = store::RedisConnection::Connect(endpoint);
  ASSERT_TRUE(connection.ok()) << connection.status();
  const absl::StatusOr<JobRecord> job = ReadJob(**connection, "digits", 0, 100);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->nodes.size(), 1u);
  EXPECT_EQ(ReadJob(**connection, "other", 0, 100).status().code(),
            absl::StatusCode::kPermissionDenied);
}

// The reader must not trust the store: any writer may have put anything there.
TEST_F(JobReaderTest, RefusesWhatMakesNoSense) {
  MakeJob(1, "running");
  const std::vector<std::vector<std::string>> lies = {
      {"SET", "ddp:{digits}:instance", "-3"},
      {"SET", "ddp:{digits}:instance", "many"},
      {"HSET", Key(1, "members"), "n1", ""},
      {"HSET", Key(1, "members"), "n1", "x 2 2\nr\nh\na"},
      {"HSET", Key(1, "members"), "n1", "0 2 99999999999\nr\nh\na"},
      {"HSET", Key(1, "joined"), "n9", "7\nr\nh\na"},
      {"ZADD", Key(1, "leases"), "inf", "n1"},
      {"LPUSH", Key(1, "failures"), "nothing"},
      {"LPUSH", Key(1, "failures"), "inf\n1\n1\n1\nh\nc"},
      {"SET", Key(1, "job"), "no hash"},
      {"SET", Key(1, "members"), "no hash"},
  };
  for (const std::vector<std::string>& lie : lies) {
    Do({"FLUSHALL"});
    MakeJob(1, "running");
    Do(lie);
    const absl::StatusOr<JobRecord> job = Read();
    EXPECT_FALSE(job.ok()) << lie[1] << " " << lie.back();
  }
  // Numbers out of range read as 0; texts are cut.
  Do({"FLUSHALL"});
  MakeJob(1, "running");
  Do({"HSET", Key(1, "job"), "restarts", "99999999999999999999", "max_restarts", "-1", "reason",
      std::string(100'000, 'x')});
  const JobRecord job = MustRead();
  EXPECT_EQ(job.restarts, 0);
  EXPECT_EQ(job.max_restarts, 0);
  EXPECT_THAT(job.reason, HasSubstr("xxx"));
  EXPECT_LT(job.reason.size(), 10'000u);
}

}  // namespace
}  // namespace ddp::elastic
