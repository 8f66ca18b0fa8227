#include "elastic/rendezvous/rendezvous_connection.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/scripted_redis_server.h"

namespace ddp::elastic {
namespace {

using ::ddp::testing::RedisFixture;
using ::ddp::testing::ScriptedRedisServer;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Timeout of a request; a passing test never waits for it.
constexpr absl::Duration kLong = absl::Seconds(60);
constexpr char kGreeted[] = "+PONG\r\n%0\r\n";

class RendezvousConnectionTest : public ::testing::Test {
 protected:
  RendezvousConnectionTest() : loop_(*EventLoop::Create()) {
    options_.connect_timeout = kLong;
    options_.command_timeout = kLong;
    options_.client_name = "agent";
  }

  // Records the callbacks in told_: "subscribed", "push TEXT", "end".
  std::unique_ptr<RendezvousConnection> To(const store::RedisEndpoint& endpoint) {
    return std::make_unique<RendezvousConnection>(
        endpoint, options_, loop_.get(),
        RendezvousConnection::Callbacks{
            .on_subscribed = [this] { Tell("subscribed"); },
            .on_push = [this](const std::string& text) { Tell("push " + text); },
            .on_end =
                [this](absl::Status why) {
                  why_ended_ = std::move(why);
                  Tell("end");
                }});
  }

  void Tell(const std::string& what) {
    told_.push_back(what);
    if (until_ != nullptr && until_()) loop_->Stop();
  }

  void RunUntil(std::function<bool()> done) {
    if (done()) return;
    until_ = std::move(done);
    const EventLoop::TimerId guard = loop_->AddTimer(kLong, [] {
      ADD_FAILURE() << "nothing happened";
      abort();
    });
    EXPECT_TRUE(loop_->Run().ok());
    loop_->CancelTimer(guard);
    until_ = nullptr;
  }
  void RunUntilTold(const std::string& what) {
    RunUntil([&] { return std::count(told_.begin(), told_.end(), what) > 0; });
  }

  // Begins a call; records its answer in told_ as "reply TEXT" or "error CODE".
  void Begin(RendezvousConnection& connection, std::vector<std::string> words) {
    connection.Call(std::move(words), [this](const absl::StatusOr<store::RedisReply>& reply) {
      Tell(reply.ok() ? absl::StrCat("reply ", reply->DebugString())
                      : absl::StrCat("error ", absl::StatusCodeToString(reply.status().code())));
    });
  }

  absl::StatusOr<store::RedisReply> Await(
      const std::function<void(RendezvousConnection::Done)>& begin) {
    absl::StatusOr<store::RedisReply> result = absl::CancelledError("not called");
    bool done = false;
    begin([&](absl::StatusOr<store::RedisReply> reply) {
      result = std::move(reply);
      done = true;
      loop_->Stop();
    });
    EXPECT_FALSE(done) << "from within the call";
    RunUntil([&] { return done; });
    return result;
  }
  absl::StatusOr<store::RedisReply> Call(RendezvousConnection& connection,
                                         const std::vector<std::string>& words) {
    return Await([&](RendezvousConnection::Done done) { connection.Call(words, std::move(done)); });
  }

  const std::unique_ptr<EventLoop> loop_;
  store::RedisConnectionOptions options_;
  std::vector<std::string> told_;
  absl::Status why_ended_;
  std::function<bool()> until_;
};

class RendezvousConnectionToRedisTest : public RendezvousConnectionTest {
 protected:
  RendezvousConnectionToRedisTest() : redis_(RedisFixture::StartTcp()), own_(redis_->Connect()) {}

  store::RedisReply Redis(const std::vector<std::string>& command) {
    const absl::StatusOr<store::RedisReply> reply = own_->Command(command);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.value_or(store::RedisReply());
  }
  // Returns how many connections named "agent" the server has.
  int Connections() {
    const std::string list = *Redis({"CLIENT", "LIST"}).AsString();
    int count = 0;
    for (size_t at = list.find("name=agent"); at != list.npos; at = list.find("name=agent", ++at)) {
      ++count;
    }
    return count;
  }
  void KillConnection(RendezvousConnection& connection) {
    Redis({"CLIENT", "KILL", "ID", absl::StrCat(*Call(connection, {"CLIENT", "ID"})->AsInteger())});
  }

  const std::unique_ptr<RedisFixture> redis_;
  const std::unique_ptr<store::RedisConnection> own_;
};

TEST_F(RendezvousConnectionToRedisTest, OneConnectionCallsAndHears) {
  const auto connection = To(redis_->endpoint());
  connection->Listen("news");
  EXPECT_EQ(*Call(*connection, {"PING"})->AsString(), "PONG");
  RunUntilTold("subscribed");
  Redis({"PUBLISH", "news", "a"});
  RunUntilTold("push a");
  EXPECT_TRUE(Call(*connection, {"GET", "nothing"})->IsNil());
  EXPECT_EQ(Connections(), 1);
  EXPECT_THAT(told_, ElementsAre("subscribed", "push a"));
}

TEST_F(RendezvousConnectionToRedisTest, GoesOnWithASocketThatWasGreeted) {
  options_.resp3 = true;
  const auto opener = *store::RedisConnection::Connect(redis_->endpoint(), options_);
  const int64_t id = *opener->Command({"CLIENT", "ID"})->AsInteger();
  EXPECT_TRUE(opener->Command({"GET", "nothing"})->IsNil());
  const auto connection = To(redis_->endpoint());
  connection->Adopt(opener->Release());
  EXPECT_FALSE(opener->connected());
  EXPECT_EQ(*Call(*connection, {"CLIENT", "ID"})->AsInteger(), id);
  EXPECT_EQ(Connections(), 1);
}

TEST_F(RendezvousConnectionToRedisTest, AScriptsReplyComesBeforeWhatItPublishes) {
  const auto connection = To(redis_->endpoint());
  connection->Listen("news");
  RunUntilTold("subscribed");
  const store::RedisScript script("redis.call('PUBLISH', KEYS[1], ARGV[1]) return {1, false, 'x'}");
  for (const char* text : {"with its source", "by its name"}) {
    connection->Call(script, {"news"}, {text}, [&](const absl::StatusOr<store::RedisReply>& reply) {
      ASSERT_TRUE(reply.ok()) << reply.status();
      EXPECT_EQ(reply->AsArray()->size(), 3u);
      Tell("reply");
    });
    EXPECT_TRUE(connection->busy());
    RunUntilTold(absl::StrCat("push ", text));
    EXPECT_FALSE(connection->busy());
  }
  EXPECT_THAT(told_, ElementsAre("subscribed", "reply", "push with its source", "reply",
                                 "push by its name"));
  EXPECT_EQ(redis_->CommandCalls()["eval"], 1);
}

TEST_F(RendezvousConnectionToRedisTest, AServerThatComesBackIsFoundByTheNextCall) {
  const auto connection = To(redis_->endpoint());
  EXPECT_TRUE(Call(*connection, {"SET", "k", "v"}).ok());
  redis_->Kill();
  EXPECT_FALSE(Call(*connection, {"GET", "k"}).ok());
  EXPECT_TRUE(absl::IsUnavailable(Call(*connection, {"GET", "k"}).status()));
  redis_->Restart();
  const absl::StatusOr<store::RedisReply> reply = Call(*connection, {"GET", "k"});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->IsNil());
  EXPECT_THAT(told_, IsEmpty()) << "there was no subscription";
}

// The server's process is stopped, as its machine may be: it accepts connections, and never
// answers.
TEST_F(RendezvousConnectionToRedisTest, TheLoopGoesOnWhileTheServerDoesNotAnswer) {
  options_.connect_timeout = absl::Seconds(1);
  const auto connection = To(redis_->endpoint());
  ASSERT_EQ(kill(redis_->pid(), SIGSTOP), 0);
  // If the call waited for the connection, its end would come first.
  Begin(*connection, {"PING"});
  connection->Listen("news");
  loop_->AddTimer(absl::Milliseconds(1), [&] { Tell("something else"); });
  RunUntilTold("error UNAVAILABLE");
  ASSERT_EQ(kill(redis_->pid(), SIGCONT), 0);
  EXPECT_THAT(told_, ElementsAre("something else", "end", "error UNAVAILABLE"));
}

TEST_F(RendezvousConnectionToRedisTest, ABreakEndsBothAndOneConnectionReplacesIt) {
  const auto connection = To(redis_->endpoint());
  connection->Listen("news");
  RunUntilTold("subscribed");
  const std::string id = absl::StrCat(*Call(*connection, {"CLIENT", "ID"})->AsInteger());
  Begin(*connection, {"BLPOP", "nothing", "0"});
  Redis({"CLIENT", "KILL", "ID", id});
  RunUntilTold("error UNAVAILABLE");
  EXPECT_THAT(told_, ElementsAre("subscribed", "end", "error UNAVAILABLE"));
  EXPECT_TRUE(absl::IsUnavailable(why_ended_)) << why_ended_;

  told_.clear();
  Begin(*connection, {"ECHO", "again"});
  connection->Listen("news");
  RunUntil([&] { return told_.size() == 2; });
  EXPECT_THAT(told_, Contains("subscribed"));
  EXPECT_EQ(Connections(), 1);
  Redis({"PUBLISH", "news", "b"});
  RunUntilTold("push b");
}

TEST_F(RendezvousConnectionToRedisTest, AServerThatBecomesAReplicaIsLeft) {
  const auto connection = To(redis_->endpoint());
  connection->Listen("news");
  RunUntilTold("subscribed");
  const int64_t id = *Call(*connection, {"CLIENT", "ID"})->AsInteger();
  Redis({"REPLICAOF", "127.0.0.1", "1"});
  Begin(*connection, {"SET", "key", "value"});
  RunUntilTold("error UNAVAILABLE");
  EXPECT_THAT(told_, ElementsAre("subscribed", "end", "error UNAVAILABLE"));
  EXPECT_TRUE(absl::StrContains(why_ended_.message(), "READONLY")) << why_ended_;
  Redis({"REPLICAOF", "NO", "ONE"});
  EXPECT_NE(*Call(*connection, {"CLIENT", "ID"})->AsInteger(), id) << "another connection";
}

TEST_F(RendezvousConnectionToRedisTest, TheEndOfAnIdleConnectionIsNoticedAtOnce) {
  const auto connection = To(redis_->endpoint());
  connection->Listen("news");
  RunUntilTold("subscribed");
  KillConnection(*connection);
  RunUntilTold("end");
  EXPECT_THAT(told_, ElementsAre("subscribed", "end"));
  EXPECT_EQ(*Call(*connection, {"PING"})->AsString(), "PONG");
}

TEST_F(RendezvousConnectionToRedisTest, ALateReplyIsNotThatOfTheNextCall) {
  options_.command_timeout = absl::Milliseconds(20);
  const auto connection = To(redis_->endpoint());
  do {  // 20 ms may be too short under load
    told_.clear();
    connection->Listen("news");
    RunUntil([&] { return !told_.empty(); });
  } while (told_.front() == "end");
  EXPECT_TRUE(absl::IsDeadlineExceeded(Call(*connection, {"BLPOP", "queue", "0"}).status()));
  EXPECT_THAT(told_, ElementsAre("subscribed", "end"));
  Redis({"RPUSH", "queue", "late"});
  absl::StatusOr<store::RedisReply> reply;
  do {
    reply = Call(*connection, {"ECHO", "mine"});
  } while (absl::IsDeadlineExceeded(reply.status()));
  EXPECT_EQ(*reply->AsString(), "mine");
}

TEST_F(RendezvousConnectionToRedisTest, OfAnEarlierChannelNothingIsHeard) {
  const auto connection = To(redis_->endpoint());
  connection->Listen("old");
  RunUntilTold("subscribed");
  connection->Listen("new");
  connection->Listen("old");
  connection->Listen("new");
  RunUntil([&] { return told_.size() == 2; });
  Redis({"PUBLISH", "old", "a"});
  Redis({"PUBLISH", "new", "b"});
  RunUntilTold("push b");
  EXPECT_THAT(told_, ElementsAre("subscribed", "subscribed", "push b"));
  const store::RedisReply listeners = Redis({"PUBSUB", "NUMSUB", "old", "new"});
  EXPECT_EQ(*(*listeners.AsArray())[1].AsInteger(), 0);
  EXPECT_EQ(*(*listeners.AsArray())[3].AsInteger(), 1);
}

TEST_F(RendezvousConnectionToRedisTest, AChannelThatIsForbiddenCostsNoConnection) {
  Redis({"ACL", "SETUSER", "job", "on", ">secret", "~*", "+@all", "resetchannels", "&mine"});
  store::RedisEndpoint endpoint = redis_->endpoint();
  endpoint.user = "job";
  endpoint.password = "secret";
  const auto connection = To(endpoint);
  const int64_t id = *Call(*connection, {"CLIENT", "ID"})->AsInteger();
  connection->Listen("another's");
  Begin(*connection, {"GET"});
  RunUntilTold("error FAILED_PRECONDITION");
  EXPECT_THAT(told_, ElementsAre("end", "error FAILED_PRECONDITION")) << "each has its own error";
  EXPECT_TRUE(absl::IsPermissionDenied(why_ended_)) << why_ended_;
  EXPECT_TRUE(absl::StrContains(why_ended_.message(), "NOPERM")) << why_ended_;
  connection->Listen("mine");
  RunUntilTold("subscribed");
  EXPECT_EQ(*Call(*connection, {"CLIENT", "ID"})->AsInteger(), id);
}

TEST_F(RendezvousConnectionToRedisTest, ACallLargerThanASocketTakesAtOnce) {
  const auto connection = To(redis_->endpoint());
  const std::string large(8 << 20, 'x');
  const absl::StatusOr<store::RedisReply> reply = Call(*connection, {"SET", "k", large});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(*Redis({"STRLEN", "k"}).AsInteger(), 8 << 20);
}

// The two ends of a connection without a server.
struct Ends {
  Ends() {
    int fds[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    ours.reset(fds[0]);
    theirs.reset(fds[1]);
  }
  UniqueFd ours;
  UniqueFd theirs;
};

TEST_F(RendezvousConnectionTest, WhatCannotBeSentFailsLikeWhatIsNotAnswered) {
  Ends ends;
  const auto connection = To({});
  connection->Adopt(store::RedisSocket(std::move(ends.ours)));
  ends.theirs.reset();
  connection->Listen("news");
  Begin(*connection, {"PING"});
  EXPECT_THAT(told_, IsEmpty()) << "from within the call";
  RunUntilTold("error UNAVAILABLE");
  EXPECT_THAT(told_, ElementsAre("end", "error UNAVAILABLE"));
  EXPECT_TRUE(absl::StrContains(why_ended_.message(), "Broken pipe")) << why_ended_;
}

TEST_F(RendezvousConnectionTest, ASubscriptionThatNobodyAnswersEnds) {
  options_.command_timeout = absl::Milliseconds(1);
  Ends ends;
  const auto connection = To({});
  connection->Adopt(store::RedisSocket(std::move(ends.ours)));
  connection->Listen("news");
  RunUntilTold("end");
  EXPECT_TRUE(absl::IsDeadlineExceeded(why_ended_)) << why_ended_;
  EXPECT_TRUE(absl::StrContains(why_ended_.message(), "no answer to a subscription")) << why_ended_;
}

TEST_F(RendezvousConnectionTest, PushesOfOtherKindsAreDropped) {
  options_.client_name = "";
  const std::string pushes =
      ">3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n"
      ">3\r\n$7\r\nmonitor\r\n$4\r\nnews\r\n$1\r\na\r\n"
      ">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"
      ">3\r\n$9\r\nsubscribe\r\n$6\r\nothers\r\n:2\r\n"
      ">3\r\n$7\r\nmessage\r\n$4\r\nnews\r\n$1\r\nb\r\n";
  ScriptedRedisServer server({{kGreeted, pushes, ""}});
  auto connection = To(server.endpoint());
  connection->Listen("news");
  RunUntilTold("push b");
  EXPECT_THAT(told_, ElementsAre("subscribed", "push b"));
  connection.reset();
}

TEST_F(RendezvousConnectionTest, TheServerIsAskedForTheChannelFirst) {
  options_.client_name = "";
  ScriptedRedisServer server({ScriptedRedisServer::Answers{kGreeted, ""}});
  auto connection = To(server.endpoint());
  Begin(*connection, {"PING"});
  connection->Listen("news");
  RunUntilTold("end");  // the script is over
  connection.reset();
  const std::vector<std::string> received = server.Finish();
  ASSERT_GE(received.size(), 2u);
  EXPECT_TRUE(absl::StartsWith(received[1], "*2\r\n$9\r\nSUBSCRIBE\r\n$4\r\nnews\r\n"))
      << received[1];
}

TEST_F(RendezvousConnectionTest, AFloodLeavesTheLoopToItsOtherWork) {
  constexpr int kPushes = 20'000;
  std::string flood = ">3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n";
  for (int i = 0; i < kPushes; ++i) flood += ">3\r\n$7\r\nmessage\r\n$4\r\nnews\r\n$1\r\nx\r\n";
  options_.client_name = "";
  ScriptedRedisServer server({{kGreeted, flood + "+done\r\n", ""}});
  auto connection = To(server.endpoint());
  size_t seen = 0, most = 0;
  std::function<void()> turn = [&] {
    most = std::max(most, told_.size() - seen);
    seen = told_.size();
    loop_->AddTimer(absl::ZeroDuration(), turn);
  };
  turn();
  connection->Listen("news");
  RunUntil([&] { return told_.size() == kPushes + 1; });
  EXPECT_EQ(std::count(told_.begin(), told_.end(), "push x"), kPushes);
  EXPECT_LE(most, 128u) << "in one turn";
  connection.reset();
}

TEST_F(RendezvousConnectionTest, WhatIsNoAnswerEndsTheConnection) {
  options_.client_name = "";
  const std::string confirmed = ">3\r\n$9\r\nsubscribe\r\n$4\r\nnews\r\n:1\r\n";
  for (const std::string& nonsense :
       {std::string("HTTP/1.1 400\r\n"), std::string(">0\r\n"), std::string("$-7\r\n"),
        std::string("+to a subscription\r\n"), confirmed + "+to the call\r\n+unasked\r\n",
        confirmed + "+to the call\r\n-ERR unasked\r\n"}) {
    SCOPED_TRACE(nonsense);
    told_.clear();
    ScriptedRedisServer server({{kGreeted, nonsense, "", ""}});
    auto connection = To(server.endpoint());
    connection->Listen("news");
    Begin(*connection, {"PING"});
    RunUntilTold("end");
    connection.reset();
  }
}

TEST_F(RendezvousConnectionTest, AServerThatDoesNotSpeakResp3) {
  options_.client_name = "";
  ScriptedRedisServer server({{"+PONG\r\n-ERR unknown command `HELLO`\r\n"}});
  const auto connection = To(server.endpoint());
  const absl::Status status = Call(*connection, {"PING"}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "use Redis 6 or newer")) << status;
}

}  // namespace
}  // namespace ddp::elastic
