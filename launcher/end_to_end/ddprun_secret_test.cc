// Tests of secrets of the real ddprun: which programs learn a user's password, and what strangers
// can do to the Redis server that it starts.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/meeting/network_server.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/tcp_store/tcp_store_server.h"
#include "testing/loop_thread.h"
#include "testing/network/loopback_socket.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kPassword[] = "open sesame";

std::vector<std::string> StaticFlags(int node, int port) {
  return {"--nnodes=2", absl::StrCat("--node-rank=", node), "--master-addr=127.0.0.1",
          absl::StrCat("--master-port=", port)};
}

// A program without the password holds MASTER_PORT first, and names a place where it listens.
TEST(DdprunSecretTest, ThePasswordIsNotSentWhereTheHolderOfMasterPortSays) {
  const testing::LoopbackSocket trap = testing::ListenOnLoopback();
  const auto loop = *EventLoop::Create();
  const auto holder = *store::TcpStoreServer::Listen(loop.get(), "127.0.0.1", 0);
  const std::string place = absl::StrCat(R"({"host":"127.0.0.1","port":)", trap.port);
  for (const std::string& told :
       {absl::StrCat(place, "}"), absl::StrCat(place, R"(,"password":"x"})"),
        absl::StrCat(place, R"(,"challenge":true})")}) {
    holder->Publish("ddp/static-rendezvous", told);
    holder->AnswerTo("ddp/static-proof/", [&](const std::string& nonce) {
      return absl::StrCat(place, R"(,"master":"127.0.0.1:1","nonce":")", nonce, R"(","proof":")",
                          nonce, "\"}");
    });
    const ::ddp::testing::LoopThread running(loop.get());
    std::vector<std::string> flags = StaticFlags(1, holder->port());
    flags.push_back("--rdzv-conf=read_timeout=1");
    DdprunDriver run(
        {.arguments = Shell(flags, "exit 0"), .environment = {{"DDP_REDIS_PASSWORD", kPassword}}});
    EXPECT_EQ(run.Wait(), 1) << run.err();
    EXPECT_FALSE(trap.HasClient()) << "ddprun called the trap: " << told;
    EXPECT_EQ(Lines(run.err()).size(), 1U) << run.err();
    EXPECT_THAT(run.err(), AllOf(HasSubstr(absl::StrCat("--master-port=", holder->port())),
                                 Not(HasSubstr(kPassword))));
  }
}

TEST(DdprunSecretTest, NodesThatKnowThePasswordMeet) {
  const int port = *FreePort("127.0.0.1");
  std::vector<std::unique_ptr<DdprunDriver>> nodes;
  for (int node = 0; node < 2; ++node) {
    nodes.push_back(std::make_unique<DdprunDriver>(
        DdprunDriver::Options{.arguments = Shell(StaticFlags(node, port), "[ $WORLD_SIZE = 2 ]"),
                              .environment = {{"DDP_REDIS_PASSWORD", kPassword}}}));
  }
  for (const auto& node : nodes) EXPECT_EQ(node->Wait(), 0) << node->err();
  EXPECT_THAT(nodes[0]->err(), AllOf(HasSubstr("guarded by the password in DDP_REDIS_PASSWORD"),
                                     Not(HasSubstr(kPassword))));
}

TEST(DdprunSecretTest, AStaticServerWithoutAUsersPasswordSaysSo) {
  const int port = *FreePort("127.0.0.1");
  DdprunDriver one({.arguments = Shell(StaticFlags(0, port), "exit 0")});
  DdprunDriver two({.arguments = Shell(StaticFlags(1, port), "exit 0")});
  EXPECT_EQ(one.Wait(), 0) << one.err();
  EXPECT_EQ(two.Wait(), 0) << two.err();
  EXPECT_THAT(one.err(), HasSubstr("guarded by a random password"));
}

TEST(DdprunSecretTest, APasswordThatIsChangedWhileTheJobRunsIsReadAgain) {
  const Folder folder;
  const auto redis = ::ddp::testing::RedisFixture::StartTcp("old");
  const auto own = redis->Connect();
  const std::string file = folder / "password";
  std::ofstream(file) << "old\n";
  DdprunDriver run(
      {.arguments = Shell({absl::StrCat("--rdzv-endpoint=127.0.0.1:", redis->endpoint().port),
                           "--rdzv-id=rotated", "--nnodes=1:2", "--max-restarts=1",
                           "--rdzv-conf=last_call_timeout=0.05,cas_backoff_max_seconds=0.1"},
                          "[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; echo ready; "
                          "while ! [ -e $MARK ]; do sleep 0.02; done; exit 1"),
       .environment = {{"DDP_REDIS_PASSWORD_FILE", file}, {"MARK", folder / "mark"}}});
  run.AwaitStdout("ready");
  ASSERT_TRUE(own->Command({"CONFIG", "SET", "requirepass", "new"}).ok());
  std::ofstream(file) << "new\n";
  for (const char* type : {"normal", "pubsub"}) {
    ASSERT_TRUE(own->Command({"CLIENT", "KILL", "TYPE", type}).ok());
  }
  std::ofstream(folder / "mark") << "go on";
  EXPECT_EQ(run.Wait(), 0) << run.err();
}

TEST(DdprunSecretTest, ClientsOfTheServerThatItStartsSendItNoScripts) {
  const Folder folder;
  for (const bool guarded : {false, true}) {
    store::RedisEndpoint endpoint;
    endpoint.host = "127.0.0.1";
    endpoint.port = *FreePort("127.0.0.1");
    std::map<std::string, std::string> environment = {{"MARK", folder / "mark"}};
    if (guarded) environment["DDP_REDIS_PASSWORD"] = endpoint.password = kPassword;
    DdprunDriver run(
        {.arguments =
             Shell({absl::StrCat("--rdzv-endpoint=127.0.0.1:", endpoint.port), "--rdzv-id=job"},
                   "echo ready; while ! [ -e $MARK ]; do sleep 0.02; done; rm $MARK"),
         .environment = environment});
    run.AwaitStdout("ready");
    EXPECT_THAT(run.err(), HasSubstr(guarded ? "guarded by the password in DDP_REDIS_PASSWORD"
                                             : "without a password (DDP_REDIS_PASSWORD)"));
    const auto client =
        store::RedisConnection::Connect(endpoint, {.total_timeout = DdprunDriver::kDeadline});
    ASSERT_TRUE(client.ok()) << client.status();
    EXPECT_TRUE((*client)->Command({"HGETALL", "ddp:{job}:i1:job"}).ok());
    for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
             {"EVAL", "return 1", "0"},
             {"EVAL_RO", "return 1", "0"},
             {"SCRIPT", "LOAD", "return 1"},
             {"SCRIPT", "FLUSH"},
             {"FUNCTION", "LOAD", "#!lua name=x\nredis.register_function('f', function() end)"},
             {"ACL", "SETUSER", "default", "+@all"},
             {"CONFIG", "SET", "port", "0"}}) {
      const absl::Status status = (*client)->Command(command).status();
      EXPECT_THAT(std::string(status.message()), HasSubstr("NOPERM")) << command[0] << status;
    }
    EXPECT_EQ(std::fclose(std::fopen((folder / "mark").c_str(), "w")), 0);
    EXPECT_EQ(run.Wait(), 0) << run.err();
  }
}

}  // namespace
}  // namespace ddp::launcher
