#include "launcher/meeting/static_rendezvous.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "launcher/meeting/address_proof.h"
#include "launcher/meeting/network_server.h"
#include "launcher/process/private_folder.h"
#include "store/redis/redis_connection.h"
#include "store/tcp_store/tcp_store_client.h"
#include "store/tcp_store/tcp_store_server.h"
#include "testing/loop_thread.h"
#include "testing/network/loopback_socket.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

using ::ddp::testing::LoopThread;

class StaticRendezvousTest : public ::testing::Test {
 protected:
  StaticRendezvousTest() : folder_(*MakePrivateFolder("ddp-test-")) {
    for (const char* name : {"DDP_REDIS_USER", "DDP_REDIS_PASSWORD", "DDP_REDIS_PASSWORD_FILE"}) {
      unsetenv(name);
    }
  }
  ~StaticRendezvousTest() override { EXPECT_TRUE(RemoveFolder(folder_).ok()); }

  StaticRendezvousOptions Options(int node_rank) const {
    StaticRendezvousOptions options;
    options.node_rank = node_rank;
    options.master_port = port_;
    options.folder = folder_;
    options.timeout = kLong;
    return options;
  }

  // Starts node 0 at a free port. Another program may take the port first.
  StaticMeeting Host(const std::string& master_addr = "127.0.0.1") {
    for (int attempt = 0; attempt < 10; ++attempt) {
      port_ = *FreePort("127.0.0.1");
      StaticRendezvousOptions options = Options(0);
      options.master_addr = master_addr;
      auto meeting = MeetStatically(options, loop_.get());
      if (meeting.ok()) return *std::move(meeting);
      EXPECT_TRUE(absl::IsAlreadyExists(meeting.status())) << meeting.status();
    }
    ADD_FAILURE() << "no free port";
    return {};
  }

  static absl::Status TryConnect(const store::RedisEndpoint& endpoint) {
    return store::RedisConnection::Connect(endpoint, {.total_timeout = kLong}).status();
  }

  const std::string folder_;
  const std::unique_ptr<EventLoop> loop_ = *EventLoop::Create();
  int port_ = 0;
};

TEST_F(StaticRendezvousTest, NodesLearnWhereNodeZeroServes) {
  const StaticMeeting host = Host();
  ASSERT_NE(host.server, nullptr);
  ASSERT_NE(host.worker_store, nullptr);
  EXPECT_EQ(host.worker_store->port(), port_);
  EXPECT_EQ(host.endpoint.host, "127.0.0.1");
  const LoopThread running(loop_.get());
  for (int node = 1; node < 4; ++node) {
    const auto met = MeetStatically(Options(node), loop_.get());
    ASSERT_TRUE(met.ok()) << met.status();
    EXPECT_EQ(met->endpoint, host.endpoint);
    EXPECT_EQ(met->server, nullptr);
    EXPECT_EQ(met->worker_store, nullptr);
    EXPECT_TRUE(TryConnect(met->endpoint).ok());
  }
  store::RedisEndpoint stranger = host.endpoint;
  EXPECT_GE(stranger.password.size(), 32u);
  stranger.password.clear();
  EXPECT_TRUE(absl::IsUnauthenticated(TryConnect(stranger)));
}

TEST_F(StaticRendezvousTest, ANodeThatIsFirstWaitsForNodeZero) {
  // A store of our own holds node 0's port, so that no other program takes it. Its loop runs later.
  const auto place = store::TcpStoreServer::Listen(loop_.get(), "127.0.0.9", 0);
  ASSERT_TRUE(place.ok());
  port_ = (*place)->port();
  StaticRendezvousOptions options = Options(1);
  options.master_addr = "127.0.0.9";
  auto met = std::async(std::launch::async, [&] { return MeetStatically(options, nullptr); });
  // The node connects, and waits for a key that is not published yet.
  const StaticMeeting host = Host();
  (*place)->Publish("ddp/static-rendezvous",
                    absl::StrCat("{\"host\":\"127.0.0.1\",\"port\":", host.endpoint.port,
                                 ",\"password\":\"", host.endpoint.password, "\"}"));
  const LoopThread running(loop_.get());
  const auto meeting = met.get();
  ASSERT_TRUE(meeting.ok()) << meeting.status();
  EXPECT_TRUE(TryConnect(meeting->endpoint).ok());
}

TEST_F(StaticRendezvousTest, ANewGenerationStillTellsLateNodes) {
  const StaticMeeting host = Host();
  host.worker_store->Renew();
  host.worker_store->Hold();
  const LoopThread running(loop_.get());
  const auto met = MeetStatically(Options(2), loop_.get());
  ASSERT_TRUE(met.ok()) << met.status();
  EXPECT_EQ(met->endpoint, host.endpoint);
}

TEST_F(StaticRendezvousTest, APasswordOfTheUsersGoesToAProvenServerOnly) {
  setenv("DDP_REDIS_PASSWORD", "open sesame", 1);
  const StaticMeeting host = Host();
  EXPECT_EQ(host.endpoint.password, "open sesame");
  EXPECT_TRUE(host.has_users_password);
  // A beginning generation holds strangers' requests; challenges are answered all the same.
  host.worker_store->Hold();
  const LoopThread running(loop_.get());
  const auto client = store::TcpStoreClient::Connect("127.0.0.1", port_, kLong);
  ASSERT_TRUE(client.ok());
  for (const std::string& key :
       {std::string("ddp/static-rendezvous"), absl::StrCat("ddp/static-proof/", *MakeNonce())}) {
    const auto told = (*client)->Get(key, kLong);
    ASSERT_TRUE(told.ok());
    EXPECT_FALSE(told->empty());
    EXPECT_EQ(told->find("open sesame"), std::string::npos) << *told;
  }
  for (int node = 1; node < 3; ++node) {
    const auto met = MeetStatically(Options(node), loop_.get());
    ASSERT_TRUE(met.ok()) << met.status();
    EXPECT_EQ(met->endpoint, host.endpoint);
    EXPECT_TRUE(TryConnect(met->endpoint).ok());
  }
  setenv("DDP_REDIS_PASSWORD", "another", 1);
  const auto other = MeetStatically(Options(1), loop_.get());
  EXPECT_TRUE(absl::IsUnauthenticated(other.status())) << other.status();
  unsetenv("DDP_REDIS_PASSWORD");
  const auto without = MeetStatically(Options(1), loop_.get());
  EXPECT_TRUE(absl::IsInvalidArgument(without.status())) << without.status();
  EXPECT_NE(without.status().message().find("DDP_REDIS_PASSWORD"), std::string::npos);
}

TEST_F(StaticRendezvousTest, WhereNodeZeroHasNoPasswordNoOneIsSent) {
  const StaticMeeting host = Host();
  EXPECT_FALSE(host.has_users_password);
  const LoopThread running(loop_.get());
  setenv("DDP_REDIS_PASSWORD", "open sesame", 1);
  const auto met = MeetStatically(Options(1), loop_.get());
  EXPECT_TRUE(absl::IsInvalidArgument(met.status())) << met.status();
  EXPECT_NE(met.status().message().find("set it on all nodes"), std::string::npos);
}

// A server that would accept the password, and a program that holds MASTER_PORT and names it.
TEST_F(StaticRendezvousTest, WhoHoldsThePortWithoutThePasswordIsNotBelieved) {
  setenv("DDP_REDIS_PASSWORD", "open sesame", 1);
  const testing::LoopbackSocket trap = testing::ListenOnLoopback();
  const ProvenAddress lie = {.master = "127.0.0.1:0", .host = "127.0.0.1", .port = trap.port};
  const std::string old_form = absl::StrCat(R"({"host":"127.0.0.1","port":)", lie.port);

  const std::string earlier_nonce = *MakeNonce();
  const std::string earlier = AnswerChallenge("open sesame", lie, earlier_nonce,
                                              *MakeNonce());  // an answer seen on the wire
  using Answer = store::TcpStoreServer::Answer;
  const std::vector<std::pair<std::string, Answer>> imposters = {
      {absl::StrCat(old_form, "}"), nullptr},
      {absl::StrCat(old_form, R"(,"password":"x"})"), nullptr},
      {R"({"challenge":true})", nullptr},  // no answer follows
      {R"({"challenge":true})", [](const std::string&) { return "x"; }},
      {R"({"challenge":true})", [&](const std::string&) { return earlier; }},
      {R"({"challenge":true})",
       [&](const std::string& nonce) {
         return AnswerChallenge("a guess", lie, nonce, *MakeNonce());
       }},
  };
  for (const auto& [told, answer] : imposters) {
    const auto imposter = store::TcpStoreServer::Listen(loop_.get(), "127.0.0.1", 0);
    ASSERT_TRUE(imposter.ok());
    port_ = (*imposter)->port();
    (*imposter)->Publish("ddp/static-rendezvous", told);
    if (answer) (*imposter)->AnswerTo("ddp/static-proof/", answer);
    const LoopThread running(loop_.get());
    StaticRendezvousOptions options = Options(1);
    options.proof_timeout = answer ? kLong : absl::Milliseconds(30);
    const auto met = MeetStatically(options, nullptr);
    EXPECT_FALSE(met.ok()) << told;
    EXPECT_EQ(met.status().message().find('\n'), std::string::npos) << met.status();
    EXPECT_NE(met.status().message().find(absl::StrCat("--master-port=", port_)), std::string::npos)
        << met.status();
    EXPECT_FALSE(trap.HasClient()) << "the named server was called";
  }
}

TEST_F(StaticRendezvousTest, AServerThatIsNotMasterAddrsIsNotBelieved) {
  setenv("DDP_REDIS_PASSWORD", "open sesame", 1);
  const auto other = store::TcpStoreServer::Listen(loop_.get(), "127.0.0.9", 0);
  ASSERT_TRUE(other.ok());
  port_ = (*other)->port();
  (*other)->Publish("ddp/static-rendezvous", R"({"challenge":true})");
  std::string master = absl::StrCat("127.0.0.8:", port_);
  std::string host = "127.0.0.8";
  (*other)->AnswerTo("ddp/static-proof/", [&](const std::string& nonce) {
    return AnswerChallenge("open sesame", {.master = master, .host = host, .port = 1}, nonce,
                           *MakeNonce());
  });
  StaticRendezvousOptions options = Options(1);
  options.master_addr = "127.0.0.9";
  {
    const LoopThread running(loop_.get());
    const auto met = MeetStatically(options, nullptr);
    EXPECT_TRUE(absl::IsUnauthenticated(met.status())) << met.status();
    EXPECT_NE(met.status().message().find("127.0.0.8"), std::string::npos) << met.status();
  }
  // Another spelling of our address is accepted, and so are the very same flags of node 0.
  for (const auto& [its_master, its_host] :
       {std::pair<std::string, std::string>("head:1", "127.0.0.9"),
        {absl::StrCat("127.0.0.9:", port_), "127.0.0.8"}}) {
    master = its_master;
    host = its_host;
    const LoopThread running(loop_.get());
    const auto met = MeetStatically(options, nullptr);
    ASSERT_TRUE(met.ok()) << met.status();
    EXPECT_EQ(met->endpoint.host, host);
    EXPECT_EQ(met->endpoint.password, "open sesame");
  }
}

TEST_F(StaticRendezvousTest, ATakenPortIsOneClearLine) {
  const StaticMeeting host = Host();
  const auto second = MeetStatically(Options(0), loop_.get());
  EXPECT_TRUE(absl::IsAlreadyExists(second.status())) << second.status();
  EXPECT_NE(second.status().message().find(absl::StrCat("--master-port=", port_)),
            std::string::npos);
  EXPECT_EQ(second.status().message().find('\n'), std::string::npos);
}

TEST_F(StaticRendezvousTest, AWildcardIsNoAddressOfNodeZero) {
  port_ = *FreePort("127.0.0.1");
  StaticRendezvousOptions options = Options(0);
  options.master_addr = "0.0.0.0";
  const auto met = MeetStatically(options, loop_.get());
  EXPECT_TRUE(absl::IsInvalidArgument(met.status())) << met.status();
}

TEST_F(StaticRendezvousTest, NodeZeroWaitsForItsNameAsLongAsOthersForIt) {
  port_ = *FreePort("127.0.0.1");
  StaticRendezvousOptions options = Options(0);
  options.master_addr = "no-such-host.invalid";
  options.timeout = absl::Milliseconds(30);
  const auto met = MeetStatically(options, loop_.get());
  EXPECT_TRUE(absl::IsDeadlineExceeded(met.status())) << met.status();
  EXPECT_NE(met.status().message().find("--master-addr=no-such-host.invalid"), std::string::npos);
}

TEST_F(StaticRendezvousTest, WithoutNodeZeroTheWaitEnds) {
  port_ = *FreePort("127.0.0.1");
  StaticRendezvousOptions options = Options(1);
  options.timeout = absl::Milliseconds(30);
  const auto met = MeetStatically(options, loop_.get());
  EXPECT_FALSE(met.ok());
  for (const std::string& part :
       {absl::StrCat("--master-port=", port_), std::string("is node 0 running?")}) {
    EXPECT_NE(met.status().message().find(part), std::string::npos) << met.status();
  }
}

TEST_F(StaticRendezvousTest, WhatIsNoAddressIsRefused) {
  for (const char* told :
       {"", "x", "[]", "{}", R"({"host":1,"port":2,"password":"p"})",
        R"({"host":"h","port":"2","password":"p"})", R"({"host":"h","port":0,"password":"p"})",
        R"({"host":"","port":1,"password":"p"})", R"({"host":"h","port":65536,"password":"p"})",
        R"({"host":"h","port":99999999999999999999,"password":"p"})"}) {
    const auto server = store::TcpStoreServer::Listen(loop_.get(), "127.0.0.1", 0);
    ASSERT_TRUE(server.ok());
    port_ = (*server)->port();
    (*server)->Publish("ddp/static-rendezvous", told);
    const LoopThread running(loop_.get());
    const auto met = MeetStatically(Options(1), nullptr);
    EXPECT_TRUE(absl::IsDataLoss(met.status())) << told << ": " << met.status();
  }
}

}  // namespace
}  // namespace ddp::launcher
