#include "store/redis/shared_redis_connection.h"

#include <signal.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/redis/redis_fail_over.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/scripted_redis_server.h"
#include "testing/temporary_folder.h"

namespace ddp::store {
namespace {

using ::ddp::testing::RedisFailOver;
using ::ddp::testing::RedisFixture;
using ::ddp::testing::ScriptedRedisServer;

constexpr absl::Duration kLong = absl::Seconds(30);
const MonotonicClock kClock;

RedisCallOptions Within(absl::Duration total, bool idempotent = false) {
  RedisCallOptions call;
  call.idempotent = idempotent;
  call.total_timeout = total;
  return call;
}

bool HasCome(const RedisReply& reply) { return !reply.IsNil(); }

class SharedRedisConnectionTest : public ::testing::Test {
 protected:
  std::unique_ptr<SharedRedisConnection> Open(const RedisConnectionOptions& options = {}) {
    auto connection = SharedRedisConnection::Connect(redis_->endpoint(), options);
    EXPECT_TRUE(connection.ok()) << connection.status();
    return *std::move(connection);
  }

  // Blocks until the key has a value. Returns the value, or the error of the wait.
  absl::StatusOr<RedisReply> AwaitKey(const std::string& key, absl::Duration timeout = kLong) {
    bool asked = true;
    auto reply =
        shared_->AskOnPush("about " + key, {"GET", key}, HasCome, kClock.Now() + timeout, asked);
    EXPECT_FALSE(asked) << "what was asked has been answered";
    return reply;
  }

  absl::Status SetKey(RedisCaller& caller, const std::string& key) {
    return caller.Transaction({{"SET", key, "v"}, {"PUBLISH", "about " + key, ""}}).status();
  }

  // Blocks until `count` channels have subscribers, so that as many waits are blocked.
  void AwaitChannels(size_t count) {
    const absl::Time deadline = kClock.Now() + kLong;
    while (kClock.Now() < deadline) {
      if (observer_->Command({"PUBSUB", "CHANNELS"})->AsArray()->size() == count) return;
      std::this_thread::yield();
    }
    ADD_FAILURE() << "there are never " << count << " channels";
  }

  // Returns the number of the server's clients, without the one that asks.
  int64_t Clients() {
    const auto info = observer_->Command({"INFO", "clients"});
    const std::string text = *info->AsString();
    const std::string mark = "connected_clients:";
    return std::stoll(text.substr(text.find(mark) + mark.size())) - 1;
  }

  const std::unique_ptr<RedisFixture> redis_ = RedisFixture::Start();
  const std::unique_ptr<SharedRedisConnection> shared_ = Open();
  const std::unique_ptr<RedisConnection> observer_ = redis_->Connect();
};

TEST_F(SharedRedisConnectionTest, RunsCommands) {
  EXPECT_EQ(*shared_->Command({"SET", "a", "1"})->AsString(), "OK");
  EXPECT_EQ(*shared_->Command({"INCR", "a"})->AsInteger(), 2);
  EXPECT_TRUE(shared_->Command({"GET", "missing"})->IsNil());
  EXPECT_TRUE((*shared_->Command({"MGET", "missing", "a"})->AsArray())[0].IsNil());
  EXPECT_EQ(shared_->Command({"LPUSH", "a", "1"}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*shared_->Transaction({{"INCR", "a"}, {"GET", "a"}}))[1].AsString().value(), "3");
  EXPECT_EQ((*shared_->Pipeline({{"INCR", "a"}, {"INCR", "a"}}))[1].AsInteger().value(), 5);
  EXPECT_EQ(*shared_->Command({"EVAL", "return {1, false, 'x'}", "0"})->AsArray()->at(2).AsString(),
            "x");
}

TEST_F(SharedRedisConnectionTest, HoweverManyWaitThereIsOneClient) {
  constexpr int kWaiters = 20;
  std::vector<std::thread> waiters;
  waiters.reserve(kWaiters);
  for (int i = 0; i < kWaiters; ++i) {
    waiters.emplace_back([&, i] {
      const auto reply = AwaitKey(absl::StrCat(i));
      EXPECT_TRUE(reply.ok() && !reply->IsNil()) << reply.status();
    });
  }
  AwaitChannels(kWaiters);
  EXPECT_EQ(Clients(), 1);
  for (int i = 0; i < kWaiters; ++i) {
    EXPECT_EQ(*shared_->Command({"INCR", "sum"})->AsInteger(), i + 1) << "while others wait";
    // Another client sets half of the keys, and the waiting connection itself sets the other half.
    RedisCaller& setter = i % 2 == 0 ? static_cast<RedisCaller&>(*observer_) : *shared_;
    EXPECT_TRUE(SetKey(setter, absl::StrCat(i)).ok());
  }
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(Clients(), 1);
  AwaitChannels(0);
}

// Redis 7.0 delivers such a message in the middle of the transaction's reply.
TEST_F(SharedRedisConnectionTest, HearsItselfInATransaction) {
  std::thread waiter([&] { EXPECT_TRUE(HasCome(*AwaitKey("a"))); });
  AwaitChannels(1);
  const auto replies = shared_->Transaction(
      {{"PUBLISH", "about a", ""}, {"SET", "a", "v"}, {"PUBLISH", "about a", ""}, {"GET", "a"}});
  ASSERT_TRUE(replies.ok()) << replies.status();
  EXPECT_EQ(*(*replies)[0].AsInteger(), 1);
  EXPECT_EQ(*(*replies)[3].AsString(), "v");
  waiter.join();
}

TEST_F(SharedRedisConnectionTest, WaitersOfOneChannelShareASubscription) {
  std::atomic<int> woken{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back([&] { woken += AwaitKey("a").ok() ? 1 : 0; });
  }
  // All three have asked for the key: no other code reads it.
  const absl::Time deadline = kClock.Now() + kLong;
  while (redis_->CommandCalls()["get"] < 3 && kClock.Now() < deadline) std::this_thread::yield();
  EXPECT_EQ(redis_->CommandCalls()["subscribe"], 1);
  EXPECT_TRUE(AwaitKey("a", absl::Milliseconds(1))->IsNil()) << "the deadline has come";
  EXPECT_TRUE(SetKey(*observer_, "a").ok());
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(woken, 3);
  AwaitChannels(0);
  EXPECT_EQ(redis_->CommandCalls()["unsubscribe"], 1);
}

TEST_F(SharedRedisConnectionTest, RefusedSubscriptionIsThatCallersAlone) {
  const auto redis = RedisFixture::StartTcp("root");
  ASSERT_TRUE(redis->Connect()
                  ->Command({"ACL", "SETUSER", "job", "on", ">secret", "~*", "&ours", "+@all"})
                  .ok());
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.user = "job";
  endpoint.password = "secret";
  const auto shared = *SharedRedisConnection::Connect(endpoint, {});
  const absl::Time deadline = kClock.Now() + kLong;
  bool asked = false;
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(shared->AskOnPush("theirs", {"GET", "a"}, HasCome, deadline, asked).status().code(),
              absl::StatusCode::kPermissionDenied);
    EXPECT_TRUE(shared->Command({"SET", "b", "1"}).ok());
    EXPECT_TRUE(shared->AskOnPush("ours", {"GET", "b"}, HasCome, deadline, asked).ok());
  }
  EXPECT_EQ(shared->AskOnPush("ours", {"LPOP", "b"}, HasCome, deadline, asked).status().code(),
            absl::StatusCode::kFailedPrecondition)
      << "a question that is refused ends the subscription too";
  EXPECT_EQ(redis->Connect()->Command({"PUBSUB", "CHANNELS"})->AsArray()->size(), 0);
}

TEST_F(SharedRedisConnectionTest, MendsItselfWhenTheServerIsRestarted) {
  std::thread waiter(
      [&] { EXPECT_EQ(AwaitKey("a").status().code(), absl::StatusCode::kUnavailable); });
  AwaitChannels(1);
  redis_->Restart();
  waiter.join();
  // INCR is not idempotent: it succeeds because the broken connection is seen before sending.
  const auto reply = shared_->Command({"INCR", "n"});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(*reply->AsInteger(), 1);
  redis_->Restart();
  EXPECT_EQ(*shared_->Command({"INCR", "n"})->AsInteger(), 1) << "also where nobody was reading";
}

TEST_F(SharedRedisConnectionTest, LostServerIsUnavailableToEachWithinItsTime) {
  redis_->Kill();
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      const absl::Status status =
          shared_->Command({"GET", "a"}, Within(absl::Milliseconds(20 * i + 20), true)).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(AwaitKey("a").status().code(), absl::StatusCode::kUnavailable);
  redis_->Restart();
  EXPECT_TRUE(shared_->Command({"GET", "a"}, Within(kLong, true)).ok());
}

// A caller with a short deadline times out. No other caller gets its late reply.
TEST_F(SharedRedisConnectionTest, ImpatientCallerDisturbsNobody) {
  ASSERT_EQ(kill(redis_->pid(), SIGSTOP), 0);
  std::thread patient([&] { EXPECT_EQ(*shared_->Command({"INCR", "n"})->AsInteger(), 1); });
  EXPECT_EQ(shared_->Command({"ECHO", "late"}, Within(absl::Milliseconds(20))).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  ASSERT_EQ(kill(redis_->pid(), SIGCONT), 0);
  patient.join();
  EXPECT_EQ(*shared_->Command({"ECHO", "in step"})->AsString(), "in step");
  EXPECT_EQ(Clients(), 1);
}

TEST_F(SharedRedisConnectionTest, SilentServerIsGivenUpForAll) {
  RedisConnectionOptions options;
  options.command_timeout = absl::Milliseconds(500);
  const auto shared = Open(options);
  std::thread waiter([&] {
    bool asked = true;
    const auto reply = shared->AskOnPush("c", {"GET", "a"}, HasCome, kClock.Now() + kLong, asked);
    EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnavailable) << reply.status();
    EXPECT_FALSE(asked);
  });
  AwaitChannels(1);
  EXPECT_TRUE(shared->Command({"PING"}).ok()) << "what was asked before has been answered";
  ASSERT_EQ(kill(redis_->pid(), SIGSTOP), 0);
  EXPECT_EQ(shared->Command({"GET", "a"}, Within(kLong)).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  waiter.join();
  ASSERT_EQ(kill(redis_->pid(), SIGCONT), 0);
  EXPECT_TRUE(shared->Command({"GET", "a"}, Within(kLong, true)).ok());
}

TEST_F(SharedRedisConnectionTest, AQuestionWithoutAnAnswerIsToldOf) {
  RedisConnectionOptions options;
  options.command_timeout = absl::Milliseconds(50);
  const auto shared = Open(options);
  ASSERT_EQ(kill(redis_->pid(), SIGSTOP), 0);
  bool asked = false;
  const auto ask = [&] {
    return shared->AskOnPush("c", {"GET", "a"}, HasCome, kClock.Now() + kLong, asked).status();
  };
  EXPECT_EQ(ask().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(asked);
  EXPECT_EQ(ask().code(), absl::StatusCode::kUnavailable) << "it makes no connection";
  EXPECT_FALSE(asked);
  ASSERT_EQ(kill(redis_->pid(), SIGCONT), 0);
}

// As after a failover by address: the connection leads nowhere, and each caller's deadline is
// shorter than command_timeout.
TEST_F(SharedRedisConnectionTest, SilentServerIsGivenUpAlsoWhenNobodyHasMuchTime) {
  RedisConnectionOptions options;
  options.command_timeout = absl::Milliseconds(200);
  const auto shared = Open(options);
  std::atomic<bool> given_up{false};
  std::thread waiter([&] {
    bool asked = true;
    const auto reply = shared->AskOnPush("c", {"GET", "a"}, HasCome, kClock.Now() + kLong, asked);
    EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnavailable) << reply.status();
    EXPECT_FALSE(asked);
    given_up = true;
  });
  AwaitChannels(1);
  EXPECT_TRUE(shared->Command({"PING"}).ok()) << "what was asked before has been answered";
  ASSERT_EQ(kill(redis_->pid(), SIGSTOP), 0);
  // Far fewer requests than fill the socket, which would end the connection too.
  for (int i = 0; i < 100 && !given_up; ++i) {
    EXPECT_FALSE(shared->Command({"GET", "a"}, Within(absl::Milliseconds(20))).ok());
  }
  EXPECT_TRUE(given_up);
  ASSERT_EQ(kill(redis_->pid(), SIGCONT), 0);
  waiter.join();
  EXPECT_TRUE(shared->Command({"GET", "a"}, Within(kLong, true)).ok());
}

TEST_F(SharedRedisConnectionTest, LargeRequestsAndRepliesPassEachOther) {
  const std::string large(4 << 20, 'x');
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(shared_->Command({"SET", absl::StrCat(t), large}).ok());
        EXPECT_EQ(shared_->Command({"GET", absl::StrCat(t)})->AsString()->size(), large.size());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// As the store of a worker: its connection breaks after the operator has changed the password.
TEST(SharedRedisConnectionAuthTest, AChangedPasswordIsReadAgain) {
  const auto redis = RedisFixture::StartTcp("old");
  const auto own = redis->Connect();
  const ::ddp::testing::TemporaryFolder folder;
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.password_file = folder.path() + "/password";
  const auto shared = *SharedRedisConnection::Connect(endpoint, {});
  ASSERT_TRUE(own->Command({"CONFIG", "SET", "requirepass", "new"}).ok());
  std::ofstream(endpoint.password_file) << "new";
  for (const char* type : {"normal", "pubsub"}) {
    ASSERT_TRUE(own->Command({"CLIENT", "KILL", "TYPE", type}).ok());
  }
  const auto reply = shared->Command({"SET", "k", "v"}, Within(kLong, true));
  EXPECT_TRUE(reply.ok()) << reply.status();
}

// A failover that breaks no connection, during requests that must not be sent twice.
TEST(SharedRedisConnectionFailOverTest, EveryThreadGoesOnAtTheNewMaster) {
  constexpr int kThreads = 8;
  constexpr int kCalls = 200;
  RedisFailOver servers;
  const auto shared = *SharedRedisConnection::Connect(servers.endpoint(), {});
  std::atomic<int> called{0};
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kCalls; ++i, ++called) {
        const auto reply = shared->Command({"INCR", absl::StrCat("n", t)});
        EXPECT_TRUE(reply.ok()) << reply.status();
      }
    });
  }
  while (called < kThreads * kCalls / 4) std::this_thread::yield();
  servers.ChangeRoles();
  servers.MoveName();
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(shared->Command({"SET", "last", "v"}).ok());
  EXPECT_EQ(servers.AskSecond({"GET", "last"}), "v");
  const int64_t id = *shared->Command({"CLIENT", "ID"})->AsInteger();
  EXPECT_EQ(*shared->Command({"CLIENT", "ID"})->AsInteger(), id) << "it stays there";
}

TEST(SharedRedisConnectionFailOverTest, AWaitEndsWithTheConnectionAndMayBeBegunAgain) {
  RedisFailOver servers;
  const auto shared = *SharedRedisConnection::Connect(servers.endpoint(), {});
  absl::Status ended;
  bool asked = true;
  std::thread waiter([&] {
    ended = shared->AskOnPush("news", {"GET", "a"}, HasCome, kClock.Now() + kLong, asked).status();
  });
  while (servers.AskFirst({"PUBSUB", "CHANNELS"}) != "array of 1") {
    std::this_thread::yield();
  }
  servers.ChangeRoles();
  servers.MoveName();
  EXPECT_TRUE(shared->Command({"SET", "b", "v"}).ok());
  waiter.join();
  EXPECT_TRUE(absl::IsUnavailable(ended)) << ended;
  EXPECT_TRUE(absl::StrContains(ended.message(), "READONLY")) << ended;
  EXPECT_FALSE(asked) << "what was asked has been answered";
  servers.AskSecond({"SET", "a", "v"});
  EXPECT_TRUE(shared->AskOnPush("news", {"GET", "a"}, HasCome, kClock.Now() + kLong, asked)
                  ->AsString()
                  .ok());
}

TEST(SharedRedisConnectionToOthersTest, OldServerIsNamed) {
  ScriptedRedisServer server({{"+PONG\r\n", "-ERR unknown command `HELLO`\r\n", ""}});
  const auto shared = SharedRedisConnection::Connect(server.endpoint(), {});
  ASSERT_TRUE(shared.ok()) << shared.status();
  const absl::Status status = (*shared)->Command({"GET", "a"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "use Redis 6 or newer")) << status;
}

TEST(SharedRedisConnectionToOthersTest, UnaskedReplyEndsTheConnection) {
  ScriptedRedisServer server(
      {{"+PONG\r\n", "%0\r\n+a\r\n+unasked\r\n", "", ""}, {"+PONG\r\n", "%0\r\n+b\r\n", "", ""}});
  const auto shared = *SharedRedisConnection::Connect(server.endpoint(), {});
  EXPECT_EQ(*shared->Command({"GET", "a"}, Within(kLong, true))->AsString(), "a");
  EXPECT_EQ(*shared->Command({"GET", "b"}, Within(kLong, true))->AsString(), "b");
}

TEST(SharedRedisConnectionToOthersTest, WhatIsNoReplyIsAnError) {
  for (const char* nonsense : {"HTTP/1.1 400\r\n", "%0\r\n>0\r\n", "%0\r\n$-7\r\n"}) {
    ScriptedRedisServer server({{"+PONG\r\n", nonsense, "", ""}});
    const auto shared = *SharedRedisConnection::Connect(server.endpoint(), {});
    EXPECT_EQ(shared->Command({"GET", "a"}).status().code(), absl::StatusCode::kInternal)
        << nonsense;
  }
}

}  // namespace
}  // namespace ddp::store
