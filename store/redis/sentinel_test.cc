#include "store/redis/sentinel.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "testing/network/loopback_socket.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/sentinels.h"

namespace ddp::store {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(60);

TEST(SentinelTest, ClientsFollowTheMaster) {
  ddp::testing::Sentinels sentinels;
  const auto connection = RedisConnection::Connect(sentinels.endpoint(), {.total_timeout = kLong});
  ASSERT_TRUE(connection.ok()) << connection.status();
  EXPECT_EQ(*(*connection)->Command({"SET", "k", "1"})->AsString(), "OK");

  // The old master lives, and refuses to write.
  sentinels.FailOver();
  const auto at = absl::StrCat("127.0.0.1:", sentinels.replica_port());
  const RedisCallOptions again = {.idempotent = true};
  while (*AskSentinels(sentinels.endpoint()) != std::vector<std::string>{at}) {
    ASSERT_TRUE((*connection)->Command({"SET", "k", "2"}, again).ok());
  }
  ASSERT_TRUE((*connection)->Command({"SET", "k", "3"}, again).ok());
  EXPECT_EQ(*(*connection)->Command({"GET", "k"}, again)->AsString(), "3");
}

TEST(SentinelTest, AMasterThatDiesIsReplaced) {
  ddp::testing::Sentinels sentinels;
  const auto connection = RedisConnection::Connect(sentinels.endpoint(), {.total_timeout = kLong});
  ASSERT_TRUE(connection.ok()) << connection.status();
  sentinels.KillMaster();
  const absl::StatusOr<RedisReply> reply =
      (*connection)->Command({"SET", "k", "2"}, {.idempotent = true});
  EXPECT_TRUE(reply.ok()) << reply.status();
  EXPECT_THAT(*AskSentinels(sentinels.endpoint()),
              ElementsAre(absl::StrCat("127.0.0.1:", sentinels.replica_port())));
}

TEST(SentinelTest, ADeadSentinelIsPassedOver) {
  ddp::testing::Sentinels sentinels;
  RedisEndpoint endpoint = sentinels.endpoint();
  const auto dead = ddp::testing::BindLoopback();
  endpoint.sentinels[0] = {"127.0.0.1", dead.port};
  endpoint.sentinels[1] = {"no-such-host.invalid", 26379};
  EXPECT_TRUE(AskSentinels(endpoint).ok()) << AskSentinels(endpoint).status();
}

TEST(SentinelTest, TheReasonIsNamed) {
  const auto redis = ddp::testing::RedisFixture::StartTcp();
  RedisEndpoint endpoint;
  endpoint.master_name = "ddp";
  endpoint.sentinels = {{"127.0.0.1", redis->endpoint().port}};
  const absl::Status status =
      RedisConnection::Connect(endpoint, {.total_timeout = absl::ZeroDuration()}).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(),
              HasSubstr(absl::StrCat("cannot reach Redis at redis+sentinel://127.0.0.1:",
                                     redis->endpoint().port, "/ddp: sentinel 127.0.0.1:")));
  EXPECT_THAT(status.message(), HasSubstr("ERR unknown command"));
}

}  // namespace
}  // namespace ddp::store
