// Tests of jobs of several nodes, each a real ddprun on this machine: nodes that come, that are
// lost, and that get no seat.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/flags/exit_code.h"
#include "testing/redis/delaying_proxy.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/sentinels.h"
#include "testing/redis/tls_certificates.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;

TEST(DdprunNodesTest, ANodeThatJoinsCostsNoRestartAndNoLogFile) {
  const Folder folder;
  const auto redis = ::ddp::testing::RedisFixture::StartTcp("secret");
  const DdprunDriver::Options options = {
      .arguments = Shell({"--nnodes=1:2", "--rdzv-id=grows", "--rdzv-conf=last_call_timeout=0.05",
                          absl::StrCat("--rdzv-endpoint=127.0.0.1:", redis->endpoint().port), "-r1",
                          "--log-dir=" + folder.path()},
                         "echo $WORLD_SIZE in attempt $TORCHELASTIC_RESTART_COUNT; "
                         "[ $WORLD_SIZE = 2 ] && exit 0; echo ready >&2; exec sleep 1000"),
      .environment = {{"DDP_REDIS_PASSWORD", "secret"}}};
  DdprunDriver first(options);
  first.AwaitStderr("ready");
  const std::filesystem::path attempt = RunFolder(folder.path()) / "attempt_0";
  DdprunDriver second(options);
  EXPECT_EQ(first.Wait(), 0) << first.err();
  EXPECT_EQ(second.Wait(), 0) << second.err();
  EXPECT_EQ(Slurp(attempt / "0/stdout.log"), "1 in attempt 0\n");
  EXPECT_EQ(Slurp(attempt.string() + ".g2/0/stdout.log"), "2 in attempt 0\n");
}

// The server demands a certificate of its clients: agents, workers and `ddprun status`.
TEST(DdprunNodesTest, NodesMeetByTls) {
  const Folder folder;
  const ::ddp::testing::TlsCertificates files;
  const auto redis = ::ddp::testing::RedisFixture::StartTls(files, /*asks_clients=*/true);
  const std::string endpoint =
      absl::StrCat("--rdzv-endpoint=rediss://localhost:", redis->endpoint().port);
  const DdprunDriver::Options options = {
      .arguments = Shell({"--nnodes=2", "--rdzv-id=tls", endpoint,
                          absl::StrCat("--rdzv-conf=tls_ca_cert_file=", files.ca(),
                                       ",tls_cert_file=", files.client_cert(),
                                       ",tls_key_file=", files.client_key())},
                         "[ $WORLD_SIZE = 2 ]; echo up $RANK $DDP_STORE >&2; exec sleep 1000"),
      .environment = {{"TMPDIR", folder.path()}}};
  DdprunDriver first(options);
  DdprunDriver second(options);
  first.AwaitStderr("up ");
  second.AwaitStderr("up ");
  EXPECT_THAT(first.err(),
              HasSubstr(absl::StrCat("rediss://localhost:", redis->endpoint().port,
                                     "?tls_ca_cert_file=", files.ca(), "&tls_cert_file=")));
  DdprunDriver status(
      {.arguments = {"status", "--rdzv-id=tls"}, .environment = options.environment});
  EXPECT_EQ(status.Wait(), 0) << status.err();
  EXPECT_THAT(status.out(), HasSubstr("2 of 2; 2 ranks"));
  ASSERT_EQ(::kill(first.pid(), SIGTERM), 0);
  ASSERT_EQ(::kill(second.pid(), SIGTERM), 0);
  first.Wait();
  second.Wait();
}

TEST(DdprunNodesTest, WhatIsWrongWithTlsIsSaidInOneLine) {
  const ::ddp::testing::TlsCertificates files;
  const auto error_of = [&](const std::string& scheme, const std::string& conf) {
    const auto redis = ::ddp::testing::RedisFixture::StartTls(files);
    DdprunDriver node({.arguments = Shell({"--nnodes=1", "--rdzv-id=tls",
                                           absl::StrCat("--rdzv-endpoint=", scheme,
                                                        "127.0.0.1:", redis->endpoint().port),
                                           absl::StrCat("--rdzv-conf=", conf)},
                                          "exit 0")});
    EXPECT_NE(node.Wait(), 0);
    return node.err();
  };
  EXPECT_THAT(error_of("rediss://", "tls_cert_file=/c"),
              HasSubstr("--rdzv-conf: tls_cert_file is given without tls_key_file\n"));
  EXPECT_THAT(error_of("", "tls_ca_cert_file=/c"), HasSubstr("write the endpoint as rediss://"));
  EXPECT_THAT(error_of("rediss://", "tls_ca_cert_file=/nonexistent"),
              HasSubstr("tls_ca_cert_file=/nonexistent: No such file"));
  EXPECT_THAT(error_of("rediss://", "rank=0"), HasSubstr("its certificate is not accepted: "));
}

// The job restarts on the new master: what it knew of the job lasts.
TEST(DdprunNodesTest, AJobOutlivesItsMasterBehindSentinels) {
  const Folder folder;
  ::ddp::testing::Sentinels sentinels;
  const DdprunDriver::Options options = {
      .arguments = Shell({"--nnodes=2", "--rdzv-id=sentinel", "--max-restarts=1",
                          "--rdzv-endpoint=" + sentinels.endpoint().DebugString()},
                         "echo up $TORCHELASTIC_RESTART_COUNT >&2\n"
                         "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0\n"
                         "until [ -e " +
                             folder.path() + "/fail ]; do sleep 0.05; done; exit 3")};
  DdprunDriver first(options);
  DdprunDriver second(options);
  first.AwaitStderr("up 0");
  second.AwaitStderr("up 0");
  sentinels.KillMaster();
  std::ofstream(folder.path() + "/fail");
  EXPECT_EQ(first.Wait(), 0) << first.err();
  EXPECT_EQ(second.Wait(), 0) << second.err();
  EXPECT_THAT(first.err(), HasSubstr("up 1"));
}

// A round trip takes 300 ms, longer than the first attempt to connect.
TEST(DdprunNodesTest, NodesMeetAtAServerThatIsFarAway) {
  const auto redis = ::ddp::testing::RedisFixture::StartTcp();
  const ::ddp::testing::DelayingProxy far(redis->SocketEndpoint().unix_path,
                                          absl::Milliseconds(150));
  const DdprunDriver::Options options = {
      .arguments = Shell({"--nnodes=2", "--rdzv-id=far",
                          absl::StrCat("--rdzv-endpoint=localhost:", far.endpoint().port)},
                         "[ $WORLD_SIZE = 2 ]")};
  DdprunDriver first(options);
  DdprunDriver second(options);
  EXPECT_EQ(first.Wait(), 0) << first.err();
  EXPECT_EQ(second.Wait(), 0) << second.err();
}

// The agent, left alone for a moment, sees both ends in one look: no failure is charged.
TEST(DdprunNodesTest, ADdprunThatIsKilledWithItsWorkersIsALostNode) {
  for (int i = 0; i < 4; ++i) {
    const auto redis = ::ddp::testing::RedisFixture::StartTcp();
    const DdprunDriver::Options options = {
        .arguments =
            Shell({"--nnodes=1:2", "--rdzv-id=killed", "--max-restarts=0", "--lease-ms=900",
                   absl::StrCat("--rdzv-endpoint=127.0.0.1:", redis->endpoint().port)},
                  "echo up $WORLD_SIZE >&2; [ $WORLD_SIZE = 1 ] && exit 0; exec sleep 1000")};
    DdprunDriver survivor(options);
    DdprunDriver killed(options);
    survivor.AwaitStderr("up 2");
    killed.AwaitStderr("up 2");
    const pid_t agent = killed.AgentPid();
    const HeldProcess keeper(killed.pid());
    ASSERT_EQ(::kill(agent, SIGSTOP), 0);
    const std::vector<pid_t> tree = killed.Tree();
    ASSERT_EQ(::kill(killed.pid(), SIGKILL), 0);
    for (const pid_t pid : tree) {
      if (pid != agent && pid != killed.pid()) ::kill(pid, SIGKILL);
    }
    ASSERT_TRUE(keeper.AwaitEnd(MonotonicClock().Now() + DdprunDriver::kDeadline));
    ASSERT_EQ(::kill(agent, SIGCONT), 0);
    EXPECT_EQ(survivor.Wait(), 0) << survivor.err();
    EXPECT_THAT(survivor.err(), HasSubstr("was lost"));
    killed.Wait();
  }
}

TEST(DdprunNodesTest, TheBudgetOfLostNodesEndsTheJob) {
  const auto redis = ::ddp::testing::RedisFixture::StartTcp();
  const DdprunDriver::Options options = {
      .arguments = Shell({"--nnodes=1:2", "--rdzv-id=lost", "--max-node-losses=0", "--lease-ms=900",
                          "--exit-code=reason",
                          absl::StrCat("--rdzv-endpoint=127.0.0.1:", redis->endpoint().port)},
                         "echo up $WORLD_SIZE >&2; exec sleep 1000")};
  DdprunDriver survivor(options);
  DdprunDriver killed(options);
  survivor.AwaitStderr("up 2");
  killed.AwaitStderr("up 2");
  ASSERT_EQ(::kill(killed.pid(), SIGKILL), 0);
  EXPECT_EQ(survivor.Wait(), kReasonBudgetSpent) << survivor.err();
  EXPECT_THAT(survivor.err(), HasSubstr("was lost, and losses have ended 0 generations before "
                                        "(--max-node-losses=0)"));
  killed.Wait();
}

TEST(DdprunNodesTest, ANodeThatTheProgramCannotTakeWaitsAsASpare) {
  const Folder folder;
  const auto redis = ::ddp::testing::RedisFixture::StartTcp();
  const std::string go = folder / "go";
  const DdprunDriver::Options options = {
      .arguments = {"--nnodes=2:4", "--rdzv-id=full", "--rdzv-conf=last_call_timeout=0.05",
                    absl::StrCat("--rdzv-endpoint=127.0.0.1:", redis->endpoint().port),
                    "launcher/end_to_end/stepping_worker", "20", go, "2"}};
  DdprunDriver first(options);
  DdprunDriver second(options);
  first.AwaitStdout("is at step 20");
  second.AwaitStdout("is at step 20");
  DdprunDriver third(options);
  third.AwaitStderr(
      "as a spare: the program takes at most 2 workers, 2 work, and this node offers 1");
  std::ofstream(go) << "go";
  EXPECT_EQ(first.Wait(), 0) << first.err();
  EXPECT_EQ(second.Wait(), 0) << second.err();
  EXPECT_EQ(third.Wait(), 0) << third.err();
}

TEST(DdprunNodesTest, AnotherProgramUnderTheSameRunIdIsRefusedByName) {
  const auto redis = ::ddp::testing::RedisFixture::StartTcp();
  const auto options = [&redis](const std::string& conf, const std::string& script) {
    return DdprunDriver::Options{
        .arguments = Shell({"--nnodes=2", "--rdzv-id=mine", "--rdzv-conf=" + conf,
                            absl::StrCat("--rdzv-endpoint=127.0.0.1:", redis->endpoint().port)},
                           script)};
  };
  DdprunDriver first(options("any_program=0", "echo one"));
  first.AwaitStderr("only 1 of 2 nodes have joined");
  DdprunDriver other(options("any_program=0", "echo two"));
  EXPECT_EQ(other.Wait(), 1) << other.err();
  EXPECT_THAT(other.err(),
              HasSubstr("run id mine is taken by another program: its nodes run `sh -c echo one`, "
                        "this one `sh -c echo two`"));
  DdprunDriver allowed(options("any_program=1", "echo two"));
  EXPECT_EQ(first.Wait(), 0) << first.err();
  EXPECT_EQ(allowed.Wait(), 0) << allowed.err();
}

}  // namespace
}  // namespace ddp::launcher
