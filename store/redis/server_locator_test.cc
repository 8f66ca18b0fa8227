#include "store/redis/server_locator.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {
namespace {

using Hosts = std::vector<std::string>;

const absl::Time kStart = absl::UnixEpoch() + absl::Hours(1000);
const absl::Status kNoName = absl::UnavailableError("no such name");

absl::Time At(int seconds) { return kStart + absl::Seconds(seconds); }

RedisEndpoint Named(const std::string& host) {
  RedisEndpoint endpoint;
  endpoint.host = host;
  endpoint.port = 7000;
  return endpoint;
}

TEST(ServerLocatorTest, BeforeTheServerWasReachedTheNameIsDueOnceASecond) {
  ServerLocator locator(Named("redis"));
  EXPECT_TRUE(locator.NameIsDue(At(0)));
  EXPECT_FALSE(locator.knows_address());
  EXPECT_TRUE(locator.name_error().ok());
  for (int second = 0; second < 100; ++second) {
    locator.NameFailed(kNoName, At(second));
    locator.Lost();
    EXPECT_FALSE(locator.NameIsDue(At(second + 1) - absl::Nanoseconds(1)));
    EXPECT_TRUE(locator.NameIsDue(At(second + 1))) << "the pause does not grow";
  }
  EXPECT_EQ(locator.name_error(), kNoName);
  EXPECT_FALSE(locator.knows_address());
}

TEST(ServerLocatorTest, OnceReachedTheServerIsAtItsAddress) {
  ServerLocator locator(Named("redis"));
  locator.Reached("10.0.0.1");
  EXPECT_FALSE(locator.NameIsDue(At(1'000'000)));
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.1"}));
}

TEST(ServerLocatorTest, ALostServerIsLookedForByNameAtOnceAndThenMoreSeldom) {
  ServerLocator locator(Named("redis"));
  locator.NameFound({"10.0.0.1"}, At(0));
  locator.Reached("10.0.0.1");
  locator.Lost();
  EXPECT_TRUE(locator.NameIsDue(At(100)));
  int now = 100;
  for (const int pause : {2, 4, 8, 16, 30, 30, 30}) {
    locator.NameFailed(kNoName, At(now));
    locator.Lost();  // does not move the time
    EXPECT_FALSE(locator.NameIsDue(At(now + pause) - absl::Nanoseconds(1))) << pause;
    EXPECT_TRUE(locator.NameIsDue(At(now + pause))) << pause;
    now += pause;
  }
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.1"})) << "still known";
}

TEST(ServerLocatorTest, AServerThatComesAndGoesCostsALookupASecond) {
  ServerLocator locator(Named("redis"));
  for (int i = 0; i < 10; ++i) locator.NameFound({"10.0.0.1"}, At(0));
  locator.Reached("10.0.0.1");
  EXPECT_FALSE(locator.NameIsDue(At(1'000'000)));
  locator.Lost();
  EXPECT_FALSE(locator.NameIsDue(At(1) - absl::Nanoseconds(1)));
  EXPECT_TRUE(locator.NameIsDue(At(1))) << "the long pause is over";
}

TEST(ServerLocatorTest, ADoubtedServerIsLookedForByNameAtOnceAndTriedLast) {
  ServerLocator locator(Named("redis"));
  for (int i = 0; i < 10; ++i) locator.NameFound({"10.0.0.1", "10.0.0.2"}, At(0));
  locator.Reached("10.0.0.1");
  locator.Doubt();
  EXPECT_TRUE(locator.NameIsDue(At(1)));
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.2", "10.0.0.1"}));
  locator.Lost();
  EXPECT_TRUE(locator.NameIsDue(At(1))) << "a failure does not dispel the doubt";
  locator.NameFound({"10.0.0.1", "10.0.0.3"}, At(1));
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.3", "10.0.0.1"})) << "after a lookup, too";
  locator.Doubt();
  EXPECT_TRUE(locator.NameIsDue(At(2))) << "doubt cuts the pause short";
  locator.Reached("10.0.0.1");
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.1", "10.0.0.3"})) << "it is the master again";
}

// A replica listed first must not replace the list.
TEST(ServerLocatorTest, TheOtherAddressesOfANameAreKept) {
  ServerLocator locator(Named("redis"));
  locator.NameFound({"10.0.0.1", "10.0.0.2", "::1"}, At(0));
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.1", "10.0.0.2", "::1"}));
  locator.Reached("10.0.0.2");
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.2", "10.0.0.1", "::1"}));
  locator.Doubt();
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.1", "::1", "10.0.0.2"}));
  locator.Reached("10.0.0.9");
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.9", "10.0.0.1", "::1", "10.0.0.2"}));
  locator.NameFound({"10.0.0.7", "10.0.0.8"}, At(30));
  EXPECT_EQ(locator.addresses(), Hosts({"10.0.0.7", "10.0.0.8"}));
}

TEST(ServerLocatorTest, WhatHasNoNameIsNeverLookedUp) {
  RedisEndpoint unix_socket;
  unix_socket.unix_path = "/run/redis.sock";
  for (const RedisEndpoint& endpoint : {Named("10.0.0.1"), Named("fd00::1"), unix_socket}) {
    ServerLocator locator(endpoint);
    EXPECT_FALSE(locator.NameIsDue(At(0))) << endpoint.DebugString();
    EXPECT_EQ(locator.addresses(), Hosts({endpoint.host}));
    locator.Lost();
    EXPECT_FALSE(locator.NameIsDue(At(1'000'000))) << endpoint.DebugString();
    locator.Doubt();
    EXPECT_FALSE(locator.NameIsDue(At(1'000'000))) << endpoint.DebugString();
    locator.Reached(endpoint.host);
    EXPECT_EQ(locator.addresses(), Hosts({endpoint.host}));
  }
}

}  // namespace
}  // namespace ddp::store
