#include "store/redis/server_locator.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {
namespace {

const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1000);
const absl::Status kNoName = absl::UnavailableError("no such name");

absl::Time At(int seconds) { return kStart + absl::Seconds(seconds); }

RedisEndpoint Named(const std::string& host) {
  RedisEndpoint endpoint;
  endpoint.host = host;
  endpoint.port = 7000;
  endpoint.password = "secret";
  return endpoint;
}

// Returns the hosts of the next targets.
std::vector<std::string> NextHosts(ServerLocator& locator, int count) {
  std::vector<std::string> hosts;
  for (int i = 0; i < count; ++i) hosts.push_back(locator.NextTarget().host);
  return hosts;
}

TEST(ServerLocatorTest, BeforeTheServerWasReachedTheNameIsDue) {
  ServerLocator locator(Named("redis"), {});
  EXPECT_TRUE(locator.NameIsDue(At(0)));
  EXPECT_FALSE(locator.knows_address());
  locator.NameFailed(kNoName, At(0));
  EXPECT_TRUE(locator.NameIsDue(At(0))) << "no pause was asked for";
  locator.Lost(At(0));
  EXPECT_TRUE(locator.NameIsDue(At(0)));
}

TEST(ServerLocatorTest, FailedLookupsOfAServerNeverReachedPause) {
  ServerLocator locator(Named("redis"), {.first_name_pause = absl::Seconds(1)});
  EXPECT_TRUE(locator.name_error().ok());
  locator.NameFailed(kNoName, At(0));
  EXPECT_FALSE(locator.NameIsDue(At(1) - absl::Nanoseconds(1)));
  EXPECT_TRUE(locator.NameIsDue(At(1)));
  EXPECT_EQ(locator.name_error(), kNoName);
  EXPECT_FALSE(locator.knows_address());
}

TEST(ServerLocatorTest, OnceReachedTheServerIsAtItsAddress) {
  ServerLocator locator(Named("redis"), {});
  locator.Reached("10.0.0.1");
  EXPECT_FALSE(locator.NameIsDue(At(1'000'000)));
  const RedisEndpoint expected = Named("10.0.0.1");
  EXPECT_EQ(locator.NextTarget(), expected) << "port and password stay";
}

TEST(ServerLocatorTest, ALostServerIsLookedForByNameAfterHalfAMinute) {
  ServerLocator locator(Named("redis"), {});
  locator.Reached("10.0.0.1");
  locator.Lost(At(0));
  EXPECT_EQ(NextHosts(locator, 2), std::vector<std::string>({"10.0.0.1", "10.0.0.1"}));
  locator.Lost(At(20));  // does not move the time
  EXPECT_FALSE(locator.NameIsDue(At(30) - absl::Nanoseconds(1)));
  EXPECT_TRUE(locator.NameIsDue(At(30)));
  // The name leads nowhere: the known address stays, and the name has a pause.
  locator.NameFailed(kNoName, At(30));
  EXPECT_EQ(NextHosts(locator, 1), std::vector<std::string>({"10.0.0.1"}));
  EXPECT_FALSE(locator.NameIsDue(At(59)));
  EXPECT_TRUE(locator.NameIsDue(At(60)));
  // The server is back: nothing is due.
  locator.Reached("10.0.0.1");
  EXPECT_FALSE(locator.NameIsDue(At(1'000'000)));
  locator.Lost(At(1'000'000));
  EXPECT_TRUE(locator.NameIsDue(At(1'000'030))) << "a new loss";
}

TEST(ServerLocatorTest, ADoubtedServerIsLookedForByNameAtOnce) {
  ServerLocator locator(Named("redis"), {.first_name_pause = absl::Seconds(1)});
  locator.Reached("10.0.0.1");
  locator.Doubt();
  EXPECT_TRUE(locator.NameIsDue(At(0)));
  EXPECT_EQ(NextHosts(locator, 1), std::vector<std::string>({"10.0.0.1"})) << "still known";
  locator.Lost(At(0));
  EXPECT_TRUE(locator.NameIsDue(At(0))) << "a failure does not dispel the doubt";
  locator.NameFailed(kNoName, At(0));
  EXPECT_FALSE(locator.NameIsDue(At(29))) << "an address is known: the long pause";
  locator.Doubt();
  EXPECT_TRUE(locator.NameIsDue(At(1))) << "doubt cuts the pause short";
  locator.Reached("10.0.0.2");
  EXPECT_FALSE(locator.NameIsDue(At(1'000'000)));
  EXPECT_EQ(NextHosts(locator, 1), std::vector<std::string>({"10.0.0.2"}));
}

TEST(ServerLocatorTest, TheAddressesOfANameTakeTurns) {
  ServerLocator locator(Named("redis"), {});
  locator.NameFound({"10.0.0.1", "10.0.0.2", "::1"}, At(0));
  EXPECT_EQ(locator.address_count(), 3u);
  EXPECT_EQ(NextHosts(locator, 4),
            std::vector<std::string>({"10.0.0.1", "10.0.0.2", "::1", "10.0.0.1"}));
  EXPECT_FALSE(locator.NameIsDue(At(29)));
  EXPECT_TRUE(locator.NameIsDue(At(30))) << "none was reached";
  locator.NameFound({"10.0.0.9", "10.0.0.8"}, At(30));
  EXPECT_EQ(NextHosts(locator, 1), std::vector<std::string>({"10.0.0.9"})) << "the first one";
  locator.Reached("10.0.0.9");
  EXPECT_EQ(locator.address_count(), 1u);
  EXPECT_EQ(NextHosts(locator, 2), std::vector<std::string>({"10.0.0.9", "10.0.0.9"}));
}

TEST(ServerLocatorTest, WhatHasNoNameIsNeverLookedUp) {
  RedisEndpoint unix_socket;
  unix_socket.unix_path = "/run/redis.sock";
  for (const RedisEndpoint& endpoint : {Named("10.0.0.1"), Named("fd00::1"), unix_socket}) {
    ServerLocator locator(endpoint, {});
    EXPECT_FALSE(locator.NameIsDue(At(0))) << endpoint.DebugString();
    EXPECT_EQ(locator.NextTarget(), endpoint);
    locator.Lost(At(0));
    EXPECT_FALSE(locator.NameIsDue(At(1'000'000))) << endpoint.DebugString();
    locator.Doubt();
    EXPECT_FALSE(locator.NameIsDue(At(1'000'000))) << endpoint.DebugString();
    locator.Reached(endpoint.host);
    EXPECT_EQ(locator.NextTarget(), endpoint);
  }
}

}  // namespace
}  // namespace ddp::store
