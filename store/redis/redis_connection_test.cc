#include "store/redis/redis_connection.h"

#include <fcntl.h>
#include <poll.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/redis/redis_fail_over.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/scripted_redis_server.h"

namespace ddp::store {
namespace {

using ::ddp::testing::RedisFailOver;
using ::ddp::testing::RedisFixture;
using ::ddp::testing::ScriptedRedisServer;
using ::testing::HasSubstr;
using ::testing::Not;
using Answers = ScriptedRedisServer::Answers;

RedisConnection::Options Hasty(absl::Duration total) {
  RedisConnection::Options options;
  options.total_timeout = total;
  options.backoff_initial = absl::Milliseconds(1);
  options.backoff_max = absl::Milliseconds(5);
  return options;
}

class RedisConnectionTest : public ::testing::Test {
 protected:
  const std::unique_ptr<RedisFixture> redis_ = RedisFixture::Start();
  const std::unique_ptr<RedisConnection> connection_ = redis_->Connect();
};

TEST_F(RedisConnectionTest, CarriesAnyBytes) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  ASSERT_TRUE(connection_->Command({"SET", all, all + all}).ok());
  EXPECT_EQ(*connection_->Command({"GET", all})->AsString(), all + all);
  EXPECT_TRUE(connection_->Command({"GET", "missing"})->IsNil());
}

TEST_F(RedisConnectionTest, CarriesLargeValues) {
  const std::string large(20 << 20, 'x');
  ASSERT_TRUE(connection_->Command({"SET", "k", large}).ok());
  EXPECT_EQ(*connection_->Command({"GET", "k"})->AsString(), large);
}

TEST_F(RedisConnectionTest, PipelineAnswersInOrder) {
  std::vector<std::vector<std::string>> commands;
  for (int i = 0; i < 5000; ++i) commands.push_back({"ECHO", absl::StrCat(i)});
  const auto replies = connection_->Pipeline(commands);
  ASSERT_TRUE(replies.ok()) << replies.status();
  ASSERT_EQ(replies->size(), 5000);
  for (int i = 0; i < 5000; ++i) EXPECT_EQ(*(*replies)[i].AsString(), absl::StrCat(i));
  EXPECT_TRUE(connection_->Pipeline({})->empty());
}

TEST_F(RedisConnectionTest, ErrorRepliesBecomeStatuses) {
  ASSERT_TRUE(connection_->Command({"SET", "s", "text"}).ok());
  const absl::Status wrong_type = connection_->Command({"LPUSH", "s", "x"}).status();
  EXPECT_EQ(wrong_type.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(wrong_type.message(), "WRONGTYPE")) << wrong_type;
  EXPECT_TRUE(absl::StrContains(wrong_type.message(), redis_->endpoint().unix_path));
  EXPECT_EQ(connection_->Pipeline({{"SET", "a", "1"}, {"LPUSH", "s", "x"}, {"SET", "b", "1"}})
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(*connection_->Command({"GET", "b"})->AsString(), "1") << "in step after an error";
}

TEST_F(RedisConnectionTest, OutOfMemoryIsResourceExhausted) {
  ASSERT_TRUE(connection_->Command({"CONFIG", "SET", "maxmemory", "1"}).ok());
  EXPECT_EQ(connection_->Command({"SET", "k", "v"}).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(RedisConnectionTest, TransactionAnswersItsCommands) {
  const auto replies = connection_->Transaction({{"SET", "a", "1"}, {"INCR", "a"}, {"GET", "a"}});
  ASSERT_TRUE(replies.ok()) << replies.status();
  ASSERT_EQ(replies->size(), 3);
  EXPECT_EQ(*(*replies)[1].AsInteger(), 2);
  EXPECT_EQ(*(*replies)[2].AsString(), "2");
  const absl::Status failed =
      connection_->Transaction({{"SET", "s", "text"}, {"INCR", "s"}}).status();
  EXPECT_EQ(failed.code(), absl::StatusCode::kFailedPrecondition) << failed;
  ASSERT_TRUE(connection_->Command({"CONFIG", "SET", "maxmemory", "1"}).ok());
  const absl::Status refused = connection_->Transaction({{"SET", "b", "1"}}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(*connection_->Command({"ECHO", "in step"})->AsString(), "in step");
}

TEST_F(RedisConnectionTest, ScriptsTravelOnce) {
  const RedisScript script("return {KEYS[1], ARGV[1], redis.call('INCR', KEYS[1])}");
  EXPECT_EQ(*connection_->Command({"SCRIPT", "LOAD", script.source()})->AsString(),
            script.sha1_hex());
  ASSERT_TRUE(connection_->Command({"SCRIPT", "FLUSH"}).ok());
  for (int i = 1; i <= 3; ++i) {
    const auto reply = connection_->Eval(script, {"n"}, {"arg"});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(*(*reply->AsArray())[1].AsString(), "arg");
    EXPECT_EQ(*(*reply->AsArray())[2].AsInteger(), i);
  }
  EXPECT_EQ(redis_->CommandCalls()["eval"], 1);
  EXPECT_EQ(redis_->CommandCalls()["evalsha"], 3);
}

TEST_F(RedisConnectionTest, ScriptErrorsCarryRedisText) {
  const RedisScript refuses("return redis.error_reply('STALE generation 3')");
  const absl::Status stale = connection_->Eval(refuses, {}, {}).status();
  EXPECT_EQ(stale.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(absl::StrContains(stale.message(), "STALE generation 3")) << stale;
  EXPECT_EQ(connection_->Eval(RedisScript("syntax error"), {}, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(RedisConnectionTest, GoesOnAfterTheServerWasRestarted) {
  redis_->Restart();
  // INCR is not idempotent: it succeeds because the broken connection is seen before sending.
  EXPECT_EQ(*connection_->Command({"INCR", "n"})->AsInteger(), 1);
  const RedisScript script("return 7");
  EXPECT_EQ(*connection_->Eval(script, {}, {})->AsInteger(), 7);
  redis_->Restart();
  EXPECT_EQ(*connection_->Eval(script, {}, {})->AsInteger(), 7);
}

TEST_F(RedisConnectionTest, WaitsForAServerThatComesBack) {
  redis_->Kill();
  absl::StatusOr<RedisReply> reply = absl::UnknownError("not asked yet");
  std::thread asking([&] { reply = connection_->Command({"INCR", "n"}); });
  redis_->Restart();
  asking.join();
  ASSERT_TRUE(reply.ok()) << reply.status();
}

TEST_F(RedisConnectionTest, CommandTimeoutEndsABlockingCommand) {
  RedisCallOptions call;
  call.command_timeout = absl::Milliseconds(30);
  const absl::Status status = connection_->Command({"BLPOP", "q", "0"}, call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "may or may not have been applied"));
  EXPECT_EQ(*connection_->Command({"ECHO", "fresh"})->AsString(), "fresh");
}

TEST_F(RedisConnectionTest, DatabaseIsSelectedOnEveryConnection) {
  RedisEndpoint endpoint = redis_->endpoint();
  endpoint.database = 3;
  const auto other = RedisConnection::Connect(endpoint);
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_TRUE((*other)->Command({"SET", "k", "three"}).ok());
  (*other)->Disconnect();
  EXPECT_EQ(*(*other)->Command({"GET", "k"})->AsString(), "three");
  EXPECT_TRUE(connection_->Command({"GET", "k"})->IsNil());
}

TEST_F(RedisConnectionTest, ReceivesWhatIsPushed) {
  ASSERT_TRUE(connection_->Send({{"SUBSCRIBE", "news"}}).ok());
  const auto confirmed = connection_->Receive(absl::Seconds(20));
  ASSERT_TRUE(confirmed.ok()) << confirmed.status();
  EXPECT_EQ(connection_->Receive(absl::ZeroDuration()).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(connection_->connected()) << "nothing yet is not an error";
  const auto publisher = redis_->Connect();
  ASSERT_TRUE(publisher->Command({"PUBLISH", "news", "hello"}).ok());
  pollfd readable{.fd = connection_->fd(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&readable, 1, 20'000), 1);
  const auto message = connection_->Receive(absl::ZeroDuration());
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(*(*message->AsArray())[2].AsString(), "hello");
}

TEST_F(RedisConnectionTest, ReceiveSeesTheServerGo) {
  ASSERT_TRUE(connection_->Send({{"SUBSCRIBE", "news"}}).ok());
  ASSERT_TRUE(connection_->Receive(absl::Seconds(20)).ok());
  redis_->Kill();
  EXPECT_EQ(connection_->Receive(absl::Seconds(20)).status().code(),
            absl::StatusCode::kUnavailable);
  EXPECT_FALSE(connection_->connected());
  EXPECT_EQ(connection_->fd(), -1);
  EXPECT_EQ(connection_->Send({{"PING"}}).code(), absl::StatusCode::kUnavailable);
}

TEST_F(RedisConnectionTest, DescriptorIsNotInherited) {
  EXPECT_TRUE(fcntl(connection_->fd(), F_GETFD) & FD_CLOEXEC);
}

TEST(RedisConnectTest, SaysWhereAndHowLongItTried) {
  RedisEndpoint endpoint;
  endpoint.unix_path = "/tmp/ddp-no-redis-here.sock";
  const absl::Status status =
      RedisConnection::Connect(endpoint, Hasty(absl::Milliseconds(50))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "unix:///tmp/ddp-no-redis-here.sock")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "No such file or directory")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "(tried ")) << status;
  EXPECT_EQ(status.message().find('\n'), absl::string_view::npos);

  const absl::Status once =
      RedisConnection::Connect(endpoint, Hasty(absl::ZeroDuration())).status();
  EXPECT_TRUE(absl::StrContains(once.message(), "(tried 1 time in ")) << once;
  EXPECT_FALSE(absl::StrContains(once.message(), " in 0)")) << once;
}

TEST(RedisConnectTest, NamesAnUnknownHost) {
  RedisEndpoint endpoint;
  endpoint.host = "no-such-host.invalid";
  const absl::Status status =
      RedisConnection::Connect(endpoint, Hasty(absl::ZeroDuration())).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "no-such-host.invalid:6379")) << status;
}

TEST(RedisFailOverTest, ADemotedMasterIsLeftForWhereItsNameLeads) {
  RedisFailOver servers;
  const auto connection = *RedisConnection::Connect(servers.endpoint());
  ASSERT_EQ(*connection->Command({"INCR", "n"})->AsInteger(), 1);
  servers.ChangeRoles();
  EXPECT_TRUE(connection->Command({"PING"}).ok());
  servers.MoveName();
  // INCR must not be sent twice if the server may have applied it.
  const auto reply = connection->Command({"INCR", "n"});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(servers.AskSecond({"GET", "n"}), absl::StrCat(*reply->AsInteger()));
  servers.AskSecond({"SET", "only", "there"});
  EXPECT_EQ(*connection->Command({"GET", "only"})->AsString(), "there");
}

TEST(RedisFailOverTest, ATransactionAndAScriptGoOnAfterIt) {
  const RedisScript script("return redis.call('SET', KEYS[1], ARGV[1])");
  for (const bool by_script : {false, true}) {
    RedisFailOver servers;
    const auto connection = *RedisConnection::Connect(servers.endpoint());
    ASSERT_TRUE(connection->Eval(script, {"k"}, {"old"}).ok());
    servers.ChangeRoles();
    servers.MoveName();
    const absl::Status status = by_script ? connection->Eval(script, {"k"}, {"new"}).status()
                                          : connection->Transaction({{"SET", "k", "new"}}).status();
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(servers.AskSecond({"GET", "k"}), "new");
  }
}

// The name points to the new master later than the roles change: the call repeats the lookup.
TEST(RedisFailOverTest, ANameThatFollowsLateIsWaitedFor) {
  RedisFailOver servers;
  const auto connection = *RedisConnection::Connect(servers.endpoint(), Hasty(absl::Seconds(20)));
  servers.ChangeRoles();
  absl::Status status = absl::UnknownError("not asked yet");
  std::thread asking([&] { status = connection->Command({"SET", "k", "v"}).status(); });
  while (servers.AskFirst({"INFO", "errorstats"}).find("errorstat_READONLY") == std::string::npos) {
    std::this_thread::yield();
  }
  servers.MoveName();
  asking.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(servers.AskSecond({"GET", "k"}), "v");
}

TEST(RedisFailOverTest, AReplicaThatTheNameListsFirstHidesNoMaster) {
  RedisFailOver servers;
  if (!servers.has_host_name()) GTEST_SKIP() << "needs a name in /etc/hosts";
  servers.ChangeRoles();
  servers.NameBoth();
  const auto connection = *RedisConnection::Connect(servers.endpoint());
  for (const char* value : {"a", "b"}) {
    ASSERT_TRUE(connection->Command({"SET", "k", value}).ok());
    EXPECT_EQ(servers.AskSecond({"GET", "k"}), value);
    connection->Disconnect();
  }
}

TEST(RedisAuthTest, PasswordAndUser) {
  const auto redis = RedisFixture::StartTcp("open-sesame");
  const auto connection = redis->Connect();
  ASSERT_TRUE(connection
                  ->Command({"ACL", "SETUSER", "alice", "on", ">wonder", "~ddp:*", "&ddp:*", "+get",
                             "+ping", "+select"})
                  .ok());
  RedisEndpoint alice = redis->endpoint();
  alice.user = "alice";
  alice.password = "wonder";
  const auto hers = RedisConnection::Connect(alice);
  ASSERT_TRUE(hers.ok()) << hers.status();
  EXPECT_TRUE((*hers)->Command({"GET", "ddp:x"}).ok());
  EXPECT_EQ((*hers)->Command({"GET", "other"}).status().code(),
            absl::StatusCode::kPermissionDenied);
  EXPECT_EQ((*hers)->Command({"SET", "ddp:x", "1"}).status().code(),
            absl::StatusCode::kPermissionDenied);
}

TEST(RedisAuthTest, MessagesNameTheVariablesAndNotTheSecret) {
  const auto redis = RedisFixture::StartTcp("open-sesame");
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.password = "";
  const absl::Status none = RedisConnection::Connect(endpoint).status();
  EXPECT_EQ(none.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(absl::StrContains(none.message(), "DDP_REDIS_PASSWORD_FILE")) << none;
  endpoint.password = "wrong-guess";
  const absl::Status wrong = RedisConnection::Connect(endpoint).status();
  EXPECT_EQ(wrong.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(absl::StrContains(wrong.message(), "DDP_REDIS_PASSWORD")) << wrong;
  EXPECT_FALSE(absl::StrContains(wrong.message(), "wrong-guess")) << wrong;
}

TEST(RedisAuthTest, PasswordForAServerWithoutOne) {
  const auto redis = RedisFixture::Start();
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.password = "unneeded";
  const absl::Status status = RedisConnection::Connect(endpoint).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_TRUE(absl::StrContains(status.message(), "unset DDP_REDIS_PASSWORD")) << status;
}

TEST(RedisRetryTest, WhatMayHaveBeenAppliedIsNotSentTwice) {
  ScriptedRedisServer server({Answers{"+PONG\r\n", ""}, Answers{"+PONG\r\n", ":1\r\n"}});
  const auto connection = RedisConnection::Connect(server.endpoint(), Hasty(absl::Seconds(20)));
  ASSERT_TRUE(connection.ok()) << connection.status();
  const absl::Status status = (*connection)->Command({"INCR", "n"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "INCR may or may not have been applied"))
      << status;
  EXPECT_EQ(server.Finish().size(), 2) << "PING, INCR";
}

TEST(RedisRetryTest, WhatIsIdempotentIsSentAgain) {
  ScriptedRedisServer server(
      {Answers{"+PONG\r\n", ""}, Answers{"+PONG\r\n", ""}, Answers{"+PONG\r\n", "+OK\r\n"}});
  const auto connection = RedisConnection::Connect(server.endpoint(), Hasty(absl::Seconds(20)));
  ASSERT_TRUE(connection.ok()) << connection.status();
  RedisCallOptions call;
  call.idempotent = true;
  EXPECT_TRUE((*connection)->Command({"SET", "k", "v"}, call).ok());
  EXPECT_EQ(server.Finish().size(), 6);
}

TEST(RedisRetryTest, WaitsWhileTheServerIsLoading) {
  const std::string loading = "-LOADING Redis is loading the dataset in memory\r\n";
  ScriptedRedisServer server({Answers{loading}, Answers{"+PONG\r\n", loading, loading, ":1\r\n"}});
  const auto connection = RedisConnection::Connect(server.endpoint(), Hasty(absl::Seconds(20)));
  ASSERT_TRUE(connection.ok()) << connection.status();
  const auto reply = (*connection)->Command({"INCR", "n"});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(*reply->AsInteger(), 1);
}

TEST(RedisRetryTest, ARefusedTransactionIsSentAgain) {
  const std::string refused =
      "+OK\r\n-LOADING Redis is loading the dataset in memory\r\n"
      "-EXECABORT Transaction discarded because of previous errors.\r\n";
  ScriptedRedisServer server(
      {Answers{"+PONG\r\n", refused, refused, "+OK\r\n+QUEUED\r\n*1\r\n:1\r\n"}});
  const auto connection = RedisConnection::Connect(server.endpoint(), Hasty(absl::Seconds(20)));
  ASSERT_TRUE(connection.ok()) << connection.status();
  const auto replies = (*connection)->Transaction({{"INCR", "n"}});
  ASSERT_TRUE(replies.ok()) << replies.status();
  EXPECT_EQ(*(*replies)[0].AsInteger(), 1);
}

TEST(RedisRetryTest, TotalTimeoutHolds) {
  const std::string busy = "-BUSY Redis is busy running a script\r\n";
  Answers answers(1000, busy);
  answers[0] = "+PONG\r\n";
  ScriptedRedisServer server({answers});
  const auto connection =
      RedisConnection::Connect(server.endpoint(), Hasty(absl::Milliseconds(60)));
  ASSERT_TRUE(connection.ok()) << connection.status();
  const absl::Status status = (*connection)->Command({"INCR", "n"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "BUSY")) << status;
}

TEST(RedisHostileTest, GarbageIsAnErrorNotAnAnswer) {
  for (const char* answer : {"HTTP/1.1 400 Bad Request\r\n",
                             "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n"
                             "*1\r\n*1\r\n*1\r\n*1\r\n",
                             "$-7\r\n"}) {
    ScriptedRedisServer server({Answers{"+PONG\r\n", answer}});
    const auto connection = RedisConnection::Connect(server.endpoint(), Hasty(absl::Seconds(20)));
    ASSERT_TRUE(connection.ok()) << connection.status();
    EXPECT_EQ((*connection)->Command({"GET", "k"}).status().code(), absl::StatusCode::kInternal)
        << answer;
    EXPECT_FALSE((*connection)->connected());
  }
}

// ---- What RedisCaller decides for every connection.

// A server that is away while `away` is set. Keeps the deadline of the last attempt.
class Caller : public RedisCaller {
 public:
  Caller() : RedisCaller({}, {}) {}

  bool away = false;
  absl::Time deadline;

 protected:
  absl::StatusOr<std::vector<RedisReply>> TryOnce(const Request& request, absl::Time until,
                                                  bool&) override {
    deadline = until;
    if (away) return absl::UnavailableError("nobody there");
    return std::vector<RedisReply>(request.replies);
  }
};

constexpr absl::Duration kLong = absl::Minutes(10);
constexpr absl::Duration kShort = absl::Milliseconds(5);

RedisCallOptions Within(absl::Duration timeout) {
  return {.idempotent = true, .total_timeout = timeout};
}

TEST(RedisCallerTest, WhatEarlierCallsHaveWaitedCounts) {
  const MonotonicClock clock;
  Caller caller;
  caller.away = true;
  const absl::Time begin = clock.Now();
  const absl::Status first = caller.Command({"GET", "a"}, Within(kShort)).status();
  EXPECT_THAT(std::string(first.message()), Not(HasSubstr("away for")));
  const absl::Time later = clock.Now();
  ASSERT_GE(later - begin, kShort / 2);

  caller.away = false;
  EXPECT_TRUE(caller.Command({"GET", "a"}, Within(kLong)).ok());
  EXPECT_GE(caller.deadline, begin + kLong);
  EXPECT_LT(caller.deadline, later + kLong) << "counts from the first call that found nobody";

  const absl::Time now = clock.Now();
  EXPECT_TRUE(caller.Command({"GET", "a"}, Within(kLong)).ok());
  EXPECT_GE(caller.deadline, now + kLong) << "the server has answered since";
}

TEST(RedisCallerTest, ALimitThatIsOverLeavesASecond) {
  const MonotonicClock clock;
  Caller caller;
  caller.away = true;
  EXPECT_FALSE(caller.Command({"GET", "a"}, Within(kShort)).ok());
  const absl::Time now = clock.Now();
  const absl::Status second = caller.Command({"GET", "a"}, Within(2 * kShort)).status();
  EXPECT_GE(caller.deadline, now + 2 * kShort) << "no longer than the limit itself, no less";
  EXPECT_THAT(std::string(second.message()), HasSubstr(", away for "));
  caller.away = false;
  EXPECT_TRUE(caller.Command({"GET", "a"}, Within(absl::Seconds(1))).ok());
  EXPECT_GE(caller.deadline, now + absl::Seconds(1));
}

TEST(RedisCallerTest, AfterASilenceLongerThanTheLimitTheWholeLimitCounts) {
  Caller caller;
  caller.away = true;
  EXPECT_FALSE(caller.Command({"GET", "a"}, Within(kShort)).ok());
  const absl::Status later = caller.Command({"GET", "a"}, Within(absl::Nanoseconds(1))).status();
  EXPECT_THAT(std::string(later.message()), Not(HasSubstr("away for")));
}

}  // namespace
}  // namespace ddp::store
