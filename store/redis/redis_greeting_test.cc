#include "store/redis/redis_greeting.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::store {
namespace {

const RedisReply kOk = RedisReply::Status("OK");

RedisEndpoint Server() {
  RedisEndpoint endpoint;
  endpoint.host = "redis";
  return endpoint;
}

TEST(RedisGreetingTest, SaysNoMoreThanIsNeeded) {
  RedisGreeting greeting(Server(), "", /*resp3=*/false);
  EXPECT_EQ(greeting.WireForm(), RedisWireForm({{"PING"}}));
  EXPECT_FALSE(greeting.done());
  EXPECT_TRUE(greeting.Take(RedisReply::Status("PONG")).ok());
  EXPECT_TRUE(greeting.done());
}

TEST(RedisGreetingTest, SaysAllThatIsNeededInOrder) {
  RedisEndpoint endpoint = Server();
  endpoint.password = "secret";
  endpoint.database = 2;
  EXPECT_EQ(RedisGreeting(endpoint, "", false).WireForm(),
            RedisWireForm({{"AUTH", "secret"}, {"SELECT", "2"}, {"PING"}}));
  endpoint.user = "alice";
  RedisGreeting greeting(endpoint, "agent", /*resp3=*/true);
  EXPECT_EQ(greeting.WireForm(), RedisWireForm({{"AUTH", "alice", "secret"},
                                                {"SELECT", "2"},
                                                {"CLIENT", "SETNAME", "agent"},
                                                {"PING"},
                                                {"HELLO", "3"}}));
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(greeting.done());
    EXPECT_TRUE(greeting.Take(kOk).ok());
  }
  EXPECT_TRUE(greeting.done());
}

TEST(RedisGreetingTest, ARefusalIsItsError) {
  RedisEndpoint endpoint = Server();
  endpoint.password = "secret";
  RedisGreeting wrong(endpoint, "", false);
  const absl::Status status = wrong.Take(RedisReply::Error("WRONGPASS invalid"));
  EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
  EXPECT_FALSE(absl::StrContains(status.message(), "secret")) << status;
  RedisGreeting full(endpoint, "", false);
  EXPECT_TRUE(absl::IsUnavailable(full.Take(RedisReply::Error("ERR max number of clients"))));
}

TEST(RedisGreetingTest, TheNameIsOptional) {
  RedisGreeting greeting(Server(), "agent", false);
  EXPECT_TRUE(greeting.Take(RedisReply::Error("NOPERM no right")).ok());
  EXPECT_FALSE(greeting.done());
  EXPECT_TRUE(absl::IsPermissionDenied(greeting.Take(RedisReply::Error("NOPERM no right"))));
}

TEST(RedisGreetingTest, TheRoleIsAskedWhereItMatters) {
  const RedisReply replica = RedisReply::Array(
      {RedisReply::String("id"), RedisReply::Integer(7), RedisReply::String("role"),
       RedisReply::String("replica"), RedisReply::String("modules"), RedisReply::Array({})});
  for (const bool resp3 : {false, true}) {
    RedisGreeting greeting(Server(), "", resp3, /*asks_role=*/true);
    EXPECT_EQ(greeting.WireForm(), RedisWireForm({{"PING"}, {"HELLO", resp3 ? "3" : "2"}}));
    EXPECT_TRUE(greeting.Take(RedisReply::Status("PONG")).ok());
    EXPECT_TRUE(greeting.Take(replica).ok());
    EXPECT_TRUE(greeting.is_replica());
  }
  RedisGreeting old(Server(), "", /*resp3=*/false, /*asks_role=*/true);
  EXPECT_TRUE(old.Take(RedisReply::Status("PONG")).ok());
  EXPECT_TRUE(old.Take(RedisReply::Error("ERR unknown command `HELLO`")).ok());
  EXPECT_FALSE(old.is_replica());
}

TEST(RedisGreetingTest, AServerWithoutResp3IsNamedAsSuch) {
  for (const char* text : {"ERR unknown command `HELLO`", "NOPROTO unsupported version"}) {
    RedisGreeting greeting(Server(), "", true);
    EXPECT_TRUE(greeting.Take(kOk).ok());
    for (const absl::Status& status : {greeting.Take(RedisReply::Error(text)),
                                       JudgeRedisHello(RedisReply::Error(text), Server())}) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_TRUE(absl::StrContains(status.message(), "use Redis 6 or newer")) << status;
    }
  }
  EXPECT_TRUE(JudgeRedisHello(RedisReply::Array({}), Server()).ok());
  EXPECT_TRUE(
      absl::IsPermissionDenied(JudgeRedisHello(RedisReply::Error("NOPERM no right"), Server())));
}

}  // namespace
}  // namespace ddp::store
