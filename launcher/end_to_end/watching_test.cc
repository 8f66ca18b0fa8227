// Tests of watching a job while the real ddprun runs it: ddprun status, metrics, the event log.

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/meeting/network_server.h"
#include "nlohmann/json.hpp"
#include "testing/network/loopback_client.h"
#include "testing/redis/redis_fixture.h"
#include "testing/temporary_folder.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kWorker[] = "launcher/end_to_end/stepping_worker";
constexpr char kDdprun[] = "launcher/ddprun";
// Pause between two looks at a job, which sends no notification when it changes.
constexpr int kLookMs = 20;

// Output and exit code of a program.
struct Output {
  int exit_code = -1;
  std::string text;
};

Output Shell(const std::string& command) {
  int fds[2] = {-1, -1};
  EXPECT_EQ(::pipe2(fds, O_CLOEXEC), 0);
  UniqueFd read_end(fds[0]);
  UniqueFd write_end(fds[1]);
  const pid_t pid = ::fork();
  EXPECT_GE(pid, 0);
  if (pid == 0) {
    ::dup2(write_end.get(), STDOUT_FILENO);
    ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    ::_exit(126);
  }
  write_end.reset();
  Output output;
  char bytes[4096];
  ssize_t got = 0;
  while ((got = ::read(read_end.get(), bytes, sizeof(bytes))) > 0) output.text.append(bytes, got);
  int status = 0;
  EXPECT_EQ(::waitpid(pid, &status, 0), pid);
  output.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return output;
}

// Returns the answer to `GET path` of this host as text; empty when no server answers.
std::string Get(int port, const std::string& path) {
  const UniqueFd fd = testing::DialLoopback(port);
  if (!fd.valid()) return "";
  testing::SendText(fd, absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\n\r\n"));
  return testing::ReceiveText(fd);
}

class WatchingTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const {
    return absl::StrCat(folder_.path(), "/", name);
  }

  // Starts a job of `ranks` workers that have done `steps` steps each and wait for Finish().
  void StartJob(std::vector<std::string> flags, int ranks, int steps) {
    flags.push_back(absl::StrCat("--nproc-per-node=", ranks));
    flags.insert(flags.end(), {std::filesystem::absolute(kWorker).string(), absl::StrCat(steps),
                               Path("finish")});
    DdprunDriver::Options options;
    options.arguments = flags;
    job_ = std::make_unique<DdprunDriver>(options);
    job_->AwaitStdout(absl::StrCat("is at step ", steps), ranks);
  }

  int Finish() {
    std::ofstream(Path("finish")) << "";
    return job_->Wait();
  }

  // Runs ddprun status on the host of the job, as its user.
  Output Status(const std::string& arguments) {
    return Shell(absl::StrCat("TMPDIR=", job_->temporary_folder(), " ", kDdprun, " status ",
                              arguments, " 2>&1"));
  }

  // Returns the status of our job (others may run on this host) once `is_there` is true for it:
  // agents send their state to the store with their heartbeats.
  nlohmann::json AwaitStatus(const std::string& arguments,
                             const std::function<bool(const nlohmann::json&)>& is_there) {
    const MonotonicClock clock;
    const absl::Time deadline = clock.Now() + DdprunDriver::kDeadline;
    Output output;
    while (clock.Now() < deadline) {
      ::poll(nullptr, 0, kLookMs);
      output = Status(arguments + " --json");
      const nlohmann::json json = nlohmann::json::parse(output.text, nullptr, false);
      if (output.exit_code != 0 || !json.is_object()) continue;
      for (const nlohmann::json& job : json["jobs"]) {
        const bool is_ours =
            !arguments.empty() ||
            (!job["nodes"].empty() && job["nodes"][0]["agent_pid"] == job_->AgentPid());
        if (is_ours && is_there(job)) return job;
      }
    }
    ADD_FAILURE() << "status " << arguments << " last said: " << output.text;
    return {};
  }

  const testing::TemporaryFolder folder_;
  std::unique_ptr<DdprunDriver> job_;
};

// Returns a predicate: the job is at `step`.
auto IsAtStep(int step) {
  return [step](const nlohmann::json& job) { return job["step"] == step; };
}

TEST_F(WatchingTest, StatusFindsTheJobsOfThisHost) {
  StartJob({"--standalone", "--max-restarts=3"}, 2, 30);
  const nlohmann::json job = AwaitStatus("", IsAtStep(30));
  ASSERT_TRUE(job.is_object());
  EXPECT_EQ(job["state"], "running");
  EXPECT_EQ(job["generation"], 1);
  EXPECT_EQ(job["restarts"], 0);
  EXPECT_EQ(job["max_restarts"], 3);
  EXPECT_EQ(job["world_size"], 2);
  EXPECT_EQ(job["nodes_max"], 1);
  ASSERT_EQ(job["nodes"].size(), 1u);
  const nlohmann::json& node = job["nodes"][0];
  EXPECT_EQ(node["is_member"], true);
  EXPECT_EQ(node["group_rank"], 0);
  EXPECT_EQ(node["agent_pid"], job_->AgentPid());
  EXPECT_GT(node["lease_left_s"], 0);
  ASSERT_EQ(node["ranks"].size(), 2u);
  EXPECT_EQ(node["ranks"][1]["rank"], 1);
  EXPECT_EQ(node["ranks"][1]["step"], 30);
  EXPECT_EQ(node["ranks"][1]["phase"], "forward");
  EXPECT_GT(node["ranks"][1]["steps_per_second"], 0);
  EXPECT_EQ(::kill(node["ranks"][1]["pid"].get<pid_t>(), 0), 0);

  const std::string mine = absl::StrCat("--rdzv-id=", job["run_id"].get<std::string>());
  const Output table = Status(mine);
  EXPECT_EQ(table.exit_code, 0);
  EXPECT_THAT(table.text, AllOf(StartsWith("job "), HasSubstr("running, generation 1, step 30"),
                                HasSubstr("0 of 3 spent"), HasSubstr("forward")));
  EXPECT_EQ(Finish(), 0);
  const Output after = Status(mine);
  EXPECT_EQ(after.exit_code, 1);
  EXPECT_THAT(after.text, AllOf(StartsWith("ddprun status: no job of this user with id "),
                                HasSubstr("runs on this host")));
}

// Nobody but ddprun knows the password of the job's Redis server.
TEST_F(WatchingTest, StatusFindsAStaticJobWithARandomPassword) {
  const int port = *FreePort("127.0.0.1");
  StartJob({"--nnodes=1", "--node-rank=0", absl::StrCat("--master-port=", port)}, 1, 3);
  const nlohmann::json job = AwaitStatus("", IsAtStep(3));
  ASSERT_TRUE(job.is_object());
  EXPECT_EQ(job["state"], "running");
  EXPECT_EQ(Finish(), 0);
}

TEST_F(WatchingTest, StatusTellsOfFailures) {
  StartJob({"--standalone", "--max-restarts=1"}, 2, 3);
  const nlohmann::json before = AwaitStatus("", IsAtStep(3));
  ASSERT_TRUE(before.is_object());
  const pid_t victim = before["nodes"][0]["ranks"][1]["pid"];
  ASSERT_EQ(::kill(victim, SIGKILL), 0);
  const nlohmann::json job = AwaitStatus(
      "", [](const nlohmann::json& now) { return now["generation"] == 2 && now["step"] == 3; });
  ASSERT_TRUE(job.is_object());
  EXPECT_EQ(job["restarts"], 1);
  EXPECT_THAT(job["reason"].get<std::string>(), HasSubstr("SIGKILL"));
  ASSERT_EQ(job["failures"].size(), 1u);
  EXPECT_EQ(job["failures"][0]["generation"], 1);
  EXPECT_EQ(job["failures"][0]["rank"], 1);
  EXPECT_EQ(job["failures"][0]["charged"], true);
  EXPECT_EQ(job["failures"][0]["host"], job["nodes"][0]["host"]);
  EXPECT_THAT(job["failures"][0]["cause"].get<std::string>(), HasSubstr("SIGKILL"));
  EXPECT_THAT(job["warnings"].dump(), HasSubstr("the budget of restarts is spent"));
  EXPECT_THAT(Status("").text, HasSubstr("LAST FAILURES"));
  EXPECT_EQ(Finish(), 0);
}

TEST_F(WatchingTest, StatusReadsAnyJobAtAnEndpoint) {
  const auto redis = testing::RedisFixture::StartTcp("secret");
  const std::string endpoint = absl::StrCat("127.0.0.1:", redis->endpoint().port);
  ::setenv("DDP_REDIS_PASSWORD", "secret", 1);
  DdprunDriver::Options options;
  options.arguments = {"--rdzv-backend=redis",
                       "--rdzv-endpoint=" + endpoint,
                       "--rdzv-id=a{b}%",
                       std::filesystem::absolute(kWorker).string(),
                       "5",
                       Path("finish")};
  options.environment = {{"DDP_REDIS_PASSWORD", "secret"}};
  job_ = std::make_unique<DdprunDriver>(options);
  const std::string there = absl::StrCat("--rdzv-endpoint=", endpoint, " --rdzv-id='a{b}%'");
  for (const std::string& where : {there, std::string()}) {
    const nlohmann::json job = AwaitStatus(where, IsAtStep(5));
    ASSERT_TRUE(job.is_object());
    EXPECT_EQ(job["run_id"], "a{b}%");
  }
  EXPECT_EQ(Finish(), 0);

  // The status of an ended job can still be read from its store, but not from its host alone.
  const Output ended = Status(there);
  EXPECT_EQ(ended.exit_code, 0);
  EXPECT_THAT(ended.text, HasSubstr("job a{b}% (instance 1): succeeded"));
  EXPECT_EQ(Status("--rdzv-id='a{b}%'").exit_code, 1);

  Output wrong = Status(absl::StrCat("--rdzv-endpoint=", endpoint, " --rdzv-id=other"));
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_EQ(wrong.text, "ddprun status: there is no job with id other\n");
  wrong = Status(there + " --instance=7");
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_EQ(wrong.text, "ddprun status: there is no job with id a{b}% and instance 7\n");
  ::unsetenv("DDP_REDIS_PASSWORD");
  wrong = Status(there);
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_EQ(Count(wrong.text, "\n"), 1) << wrong.text;
}

// The server is ddprun's own, at an address of IPv6; its marker holds that address.
TEST_F(WatchingTest, StatusAndMetricsOverIpv6) {
  if (!testing::HasLoopback6()) GTEST_SKIP() << "this machine has no IPv6";
  const std::string endpoint = absl::StrCat("[::1]:", *FreePort("::1"));
  StartJob({absl::StrCat("--rdzv-endpoint=", endpoint), "--rdzv-id=six", "--metrics-port=0"}, 1, 3);
  const auto is_at_step_3 = [](const nlohmann::json& job) { return job["step"] == 3; };
  AwaitStatus(absl::StrCat("--rdzv-id=six --rdzv-endpoint=", endpoint), is_at_step_3);
  AwaitStatus("", is_at_step_3);  // found through the marker
  const Output table = Status(absl::StrCat("--rdzv-id=six --rdzv-endpoint=", endpoint));
  EXPECT_THAT(table.text, HasSubstr("job six"));
  const std::string announced = "metrics are served on port ";
  const size_t at = job_->err().find(announced) + announced.size();
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(job_->err().substr(at, job_->err().find('\n', at) - at), &port));
  const UniqueFd metrics = testing::DialLoopback6(port);
  ASSERT_TRUE(metrics.valid());
  testing::SendText(metrics, "GET /metrics HTTP/1.1\r\n\r\n");
  EXPECT_THAT(testing::ReceiveText(metrics), HasSubstr("six"));
  EXPECT_EQ(Finish(), 0);
}

TEST_F(WatchingTest, StatusShowsWhoWaitsAndWhoHasComeTogether) {
  const auto redis = testing::RedisFixture::StartTcp();
  const std::string endpoint = absl::StrCat("127.0.0.1:", redis->endpoint().port);
  DdprunDriver::Options options;
  options.arguments = {"--rdzv-endpoint=" + endpoint,
                       "--rdzv-id=pair",
                       "--nnodes=2",
                       "--nproc-per-node=2",
                       std::filesystem::absolute(kWorker).string(),
                       "4",
                       Path("finish")};
  job_ = std::make_unique<DdprunDriver>(options);
  const std::string there = absl::StrCat("--rdzv-id=pair --rdzv-endpoint=", endpoint);
  nlohmann::json job =
      AwaitStatus(there, [](const nlohmann::json& now) { return now["nodes"].size() == 1; });
  ASSERT_TRUE(job.is_object());
  EXPECT_EQ(job["state"], "forming");
  EXPECT_EQ(job["generation"], 0);
  EXPECT_EQ(job["nodes"][0]["is_member"], false);
  EXPECT_EQ(job["nodes"][0]["state"], "waiting");
  EXPECT_GT(job["nodes"][0]["lease_left_s"], 0);
  EXPECT_THAT(Status(there).text, HasSubstr("at least 2 are needed"));

  DdprunDriver other(options);
  job = AwaitStatus(there, IsAtStep(4));
  ASSERT_TRUE(job.is_object());
  EXPECT_EQ(job["state"], "running");
  EXPECT_EQ(job["world_size"], 4);
  ASSERT_EQ(job["nodes"].size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(job["nodes"][i]["group_rank"], i);
    ASSERT_EQ(job["nodes"][i]["ranks"].size(), 2u);
    EXPECT_EQ(job["nodes"][i]["ranks"][1]["rank"], 2 * i + 1);
  }
  EXPECT_EQ(job["warnings"], nlohmann::json::array());
  // Two agents of one job on this host are one job.
  const nlohmann::json here = nlohmann::json::parse(Status("--rdzv-id=pair --json").text);
  EXPECT_EQ(here["jobs"].size(), 1u);
  EXPECT_EQ(Finish(), 0);
  EXPECT_EQ(other.Wait(), 0);
}

TEST_F(WatchingTest, StatusIsTheProgramWhereThereIsOne) {
  DdprunDriver::Options options;
  std::filesystem::create_directory(Path("bin"));
  std::ofstream(Path("bin/status")) << "#!/bin/sh\necho I am the program: $1\n";
  std::filesystem::permissions(Path("bin/status"), std::filesystem::perms::owner_all);
  options.environment = {{"PATH", absl::StrCat(Path("bin"), ":", ::getenv("PATH"))}};
  options.arguments = {"status", "--json"};
  DdprunDriver program(options);
  EXPECT_EQ(program.Wait(), 0);
  EXPECT_EQ(program.out(), "I am the program: --json\n");
}

TEST_F(WatchingTest, StatusSaysWhatIsWrongWithItsArguments) {
  Output output = Shell(absl::StrCat(kDdprun, " status --help"));
  EXPECT_EQ(output.exit_code, 0);
  EXPECT_THAT(output.text, StartsWith("Usage: ddprun status"));
  output = Shell(absl::StrCat(kDdprun, " status --nope 2>&1"));
  EXPECT_EQ(output.exit_code, 2);
  EXPECT_EQ(output.text, "ddprun status: unknown flag --nope; see ddprun status --help\n");
  output = Shell(absl::StrCat(kDdprun, " status --rdzv-endpoint=host:99999 2>&1"));
  EXPECT_EQ(output.exit_code, 2);
  EXPECT_THAT(output.text, StartsWith("ddprun status: --rdzv-endpoint: "));
}

TEST_F(WatchingTest, MetricsFollowTheJob) {
  StartJob({"--standalone", "--metrics-port=0", "--max-restarts=4", "--role=trainer"}, 2, 7);
  const std::string announced = "metrics are served on port ";
  job_->AwaitStderr(announced);
  const size_t at = job_->err().find(announced) + announced.size();
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(job_->err().substr(at, job_->err().find('\n', at) - at), &port));
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + DdprunDriver::kDeadline;
  std::string text;
  while (clock.Now() < deadline) {
    text = Get(port, "/metrics");
    if (Count(text, "\"} 7\n") == 2) break;  // the agent has looked at both workers' pages
    ::poll(nullptr, 0, kLookMs);
  }
  EXPECT_THAT(text, StartsWith("HTTP/1.1 200 OK\r\n"));
  for (const char* line : {"\nddp_generation 1\n", "\nddp_world_size 2\n", "\nddp_nodes 1\n",
                           "\nddp_store_in_reach 1\n", "\nddp_restarts_allowed 4\n",
                           "\nddp_restarts_total{charged=\"true\"} 0\n",
                           "\nddp_worker_up{rank=\"0\",local_rank=\"0\"} 1\n",
                           "\nddp_worker_up{rank=\"1\",local_rank=\"1\"} 1\n",
                           "\nddp_step{rank=\"1\",local_rank=\"1\"} 7\n",
                           "\nddp_worker_phase{rank=\"0\",local_rank=\"0\",phase=\"forward\"} 1\n",
                           "role=\"trainer\",group_rank=\"0\",state=\"running\"} 1\n"}) {
    EXPECT_THAT(text, HasSubstr(std::string(line)));
  }
  EXPECT_EQ(Finish(), 0);
  EXPECT_EQ(Get(port, "/metrics"), "");
}

TEST_F(WatchingTest, AMetricsPortThatIsTakenIsSaidBeforeAWorkerStarts) {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  address.sin_family = AF_INET;
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener.get(), 1), 0);
  ASSERT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size), 0);
  DdprunDriver::Options options;
  options.arguments = {"--standalone", absl::StrCat("--metrics-port=", ntohs(address.sin_port)),
                       "echo", "started"};
  DdprunDriver job(options);
  EXPECT_EQ(job.Wait(), 1);
  EXPECT_EQ(job.out(), "");
  EXPECT_THAT(job.err(), HasSubstr(absl::StrCat("--metrics-port: cannot listen on port ",
                                                ntohs(address.sin_port), ": Address already")));
}

TEST_F(WatchingTest, TheEventLogTellsTheStoryOnTheConsoleToo) {
  DdprunDriver::Options options;
  options.arguments = {"--standalone",
                       "--event-log-handler=console",
                       "--event-log-file=" + Path("events.jsonl"),
                       "--role=trainer",
                       "--nproc-per-node=2",
                       std::filesystem::absolute(kWorker).string(),
                       "2",
                       Path("finish")};
  std::ofstream(Path("finish")) << "";
  DdprunDriver job(options);
  EXPECT_EQ(job.Wait(), 0);
  std::ifstream file(Path("events.jsonl"));
  std::vector<std::string> events;
  for (std::string line; std::getline(file, line);) {
    EXPECT_THAT(job.err(), HasSubstr(line + "\n"));
    const nlohmann::json json = nlohmann::json::parse(line);
    events.push_back(json["event"]);
    EXPECT_EQ(json["role"], "trainer");
    EXPECT_EQ(json["generation"], events.size() == 1 ? 0 : 1) << line;
    EXPECT_EQ(json.contains("group_rank"), events.size() > 1) << line;
  }
  ASSERT_GE(events.size(), 5u);
  EXPECT_EQ(events[0], "joining");
  EXPECT_EQ(events[1], "joined");
  // A worker may have ended before the last one has started.
  EXPECT_EQ(std::count(events.begin(), events.end(), "generation_started"), 1);
  EXPECT_EQ(std::count(events.begin(), events.end(), "first_step"), 2);
  EXPECT_EQ(std::count(events.begin(), events.end(), "worker_exited"), 2);
  EXPECT_EQ(events.back(), "job_finished");
}

TEST(StatusTest, AServerThatRefusesIsAnAnswer) {
  const int port = *FreePort("127.0.0.1");
  DdprunDriver status({.arguments = {"status", absl::StrCat("--rdzv-endpoint=127.0.0.1:", port)}});
  EXPECT_EQ(status.Wait(), 1);
  EXPECT_THAT(status.err(), HasSubstr("Connection refused (tried 1 time in "));
}

}  // namespace
}  // namespace ddp::launcher
