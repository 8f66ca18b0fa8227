#include "tools/bench/redis_pinger.h"

#include <poll.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "store/redis/redis_connection.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::bench {
namespace {

using ::ddp::testing::RedisFixture;

constexpr int kConnections = 30;
constexpr absl::Duration kInterval = absl::Milliseconds(50);

class RedisPingerTest : public ::testing::Test {
 protected:
  RedisPingerTest() {
    for (int i = 0; i < kConnections; ++i) connections_.push_back(redis_->Connect());
  }

  RedisPinger Pinger() const { return RedisPinger(redis_->endpoint().port, kInterval); }

  const std::unique_ptr<RedisFixture> redis_ = RedisFixture::StartTcp();
  std::vector<std::unique_ptr<store::RedisConnection>> connections_;
};

TEST_F(RedisPingerTest, AsksEachConnectionOncePerInterval) {
  RedisPinger pinger = Pinger();
  ASSERT_EQ(pinger.connections(), kConnections);
  const int64_t before = redis_->CommandCalls()["ping"];
  int turns = 0;
  const absl::StatusOr<int64_t> answered = pinger.Run([&] { return turns++ < 2 * kConnections; });
  ASSERT_TRUE(answered.ok()) << answered.status();
  // A connection whose first reply was not read in time gets no second PING.
  EXPECT_GE(*answered, kConnections);
  EXPECT_LE(*answered, 2 * kConnections);
  // The connection that asks for the count sends one more PING in its greeting.
  EXPECT_EQ(redis_->CommandCalls()["ping"] - before - 1, *answered);
}

TEST_F(RedisPingerTest, TheOwnersHaveTheirConnectionsAgain) {
  RedisPinger pinger = Pinger();
  int turns = 0;
  ASSERT_TRUE(pinger.Run([&] { return turns++ < kConnections; }).ok());
  for (const auto& connection : connections_) {
    EXPECT_EQ(*connection->Command({"ECHO", "mine"})->AsString(), "mine");
  }
}

TEST_F(RedisPingerTest, AConnectionWithAnAnswerForItsOwnerIsLeftAlone) {
  ASSERT_TRUE(connections_[0]->Send({{"ECHO", "mine"}}).ok());
  pollfd readable = {.fd = connections_[0]->fd(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&readable, 1, 60'000), 1);
  EXPECT_EQ(Pinger().connections(), kConnections - 1);
  EXPECT_EQ(*connections_[0]->Receive(absl::Seconds(60))->AsString(), "mine");
}

TEST_F(RedisPingerTest, WhatIsNoAnswerToAPingIsAnError) {
  ASSERT_TRUE(connections_[0]->Send({{"BLPOP", "queue", "0"}}).ok());
  RedisPinger pinger = Pinger();
  ASSERT_TRUE(connections_[1]->Command({"RPUSH", "queue", "x"}).ok());
  const absl::StatusOr<int64_t> answered = pinger.Run([] { return true; });
  EXPECT_TRUE(absl::IsInternal(answered.status())) << answered.status();
}

}  // namespace
}  // namespace ddp::bench
