#include "launcher/static_rendezvous.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "launcher/network_server.h"
#include "launcher/private_folder.h"
#include "store/redis_connection.h"
#include "store/tcp_store_client.h"
#include "store/tcp_store_server.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

// An event loop on a thread of its own; what is made for it is made before, and gone after.
class LoopThread {
 public:
  explicit LoopThread(EventLoop* loop) : loop_(loop), stop_(eventfd(0, EFD_CLOEXEC)) {
    EXPECT_TRUE(loop_->Watch(stop_.get(), EPOLLIN, [this](uint32_t) { loop_->Stop(); }).ok());
    thread_ = std::thread([this] { EXPECT_TRUE(loop_->Run().ok()); });
  }
  ~LoopThread() {
    const uint64_t one = 1;
    EXPECT_EQ(write(stop_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
    thread_.join();
    loop_->Unwatch(stop_.get());
  }

 private:
  EventLoop* const loop_;
  const UniqueFd stop_;
  std::thread thread_;
};

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

  // Node 0 at a port that is free. Somebody may be faster than we.
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
  // A port at which nobody listens, and nobody else will: it is ours, in another protocol's way.
  const auto place = store::TcpStoreServer::Listen(loop_.get(), "127.0.0.9", 0);
  ASSERT_TRUE(place.ok());
  port_ = (*place)->port();
  StaticRendezvousOptions options = Options(1);
  options.master_addr = "127.0.0.9";
  auto met = std::async(std::launch::async, [&] { return MeetStatically(options, nullptr); });
  // It connects, and asks for what is not there yet.
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

TEST_F(StaticRendezvousTest, APasswordOfTheUsersIsSentNowhere) {
  setenv("DDP_REDIS_PASSWORD", "open sesame", 1);
  const StaticMeeting host = Host();
  EXPECT_EQ(host.endpoint.password, "open sesame");
  const LoopThread running(loop_.get());
  const auto client = store::TcpStoreClient::Connect("127.0.0.1", port_, kLong);
  ASSERT_TRUE(client.ok());
  const auto told = (*client)->Get("ddp/static-rendezvous", kLong);
  ASSERT_TRUE(told.ok());
  EXPECT_EQ(told->find("password"), std::string::npos) << *told;
  const auto met = MeetStatically(Options(1), loop_.get());
  ASSERT_TRUE(met.ok()) << met.status();
  EXPECT_TRUE(TryConnect(met->endpoint).ok());
  unsetenv("DDP_REDIS_PASSWORD");
  const auto without = MeetStatically(Options(1), loop_.get());
  EXPECT_TRUE(absl::IsInvalidArgument(without.status())) << without.status();
  EXPECT_NE(without.status().message().find("DDP_REDIS_PASSWORD"), std::string::npos);
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
