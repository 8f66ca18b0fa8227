#include "store/redis/redis_endpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace ddp::store {
namespace {

TEST(ParseRedisEndpointTest, AcceptsWhatAPersonTypes) {
  struct Case {
    const char* text;
    const char* host;
    int port;
    int database;
  };
  for (const Case& c :
       {Case{"node-1", "node-1", 6379, 0}, Case{"node-1:7000", "node-1", 7000, 0},
        Case{"10.0.0.1:1", "10.0.0.1", 1, 0}, Case{"[::1]:7000", "::1", 7000, 0},
        Case{"[fe80::1]", "fe80::1", 6379, 0}, Case{"fe80::1", "fe80::1", 6379, 0},
        Case{"redis://a", "a", 6379, 0}, Case{"redis://a:65535/3", "a", 65535, 3},
        Case{"redis://[::1]:5/", "::1", 5, 0}, Case{"[fe80::1%eth0]:5", "fe80::1%eth0", 5, 0}}) {
    const absl::StatusOr<RedisEndpoint> endpoint = ParseRedisEndpoint(c.text);
    ASSERT_TRUE(endpoint.ok()) << c.text << ": " << endpoint.status();
    EXPECT_EQ(endpoint->host, c.host) << c.text;
    EXPECT_EQ(endpoint->port, c.port) << c.text;
    EXPECT_EQ(endpoint->database, c.database) << c.text;
    EXPECT_FALSE(endpoint->is_unix());
  }
  EXPECT_EQ(ParseRedisEndpoint("unix:///run/redis.sock")->unix_path, "/run/redis.sock");
}

TEST(ParseRedisEndpointTest, TheCallersPortIsForThoseThatNameNone) {
  EXPECT_EQ(ParseRedisEndpoint("head", 29400)->port, 29400);
  EXPECT_EQ(ParseRedisEndpoint("head:6379", 29400)->port, 6379);
  EXPECT_EQ(ParseRedisEndpoint("redis://[::1]/2", 29400)->port, 29400);
}

TEST(ParseRedisEndpointTest, RefusesEverythingElseAndSaysWhy) {
  for (const std::string& text : {std::string(""),
                                  std::string(":6379"),
                                  std::string("host:"),
                                  std::string("host:0"),
                                  std::string("host:65536"),
                                  std::string("host:99999999999"),
                                  std::string("host:+1"),
                                  std::string("host: 1"),
                                  std::string("host:a"),
                                  std::string("ho st"),
                                  std::string("[::1"),
                                  std::string("[::1]6379"),
                                  std::string("[]:1"),
                                  std::string("a:b:c"),
                                  std::string("host:1:2"),
                                  std::string("10.0.0.1:1:2"),
                                  std::string("[host]:1"),
                                  std::string("[10.0.0.1]:1"),
                                  std::string("redis://a:b:c/1"),
                                  std::string("http://host"),
                                  std::string("redis://"),
                                  std::string("redis://host/x"),
                                  std::string("redis://host/-1"),
                                  std::string("a\nb"),
                                  std::string("a\nb:c"),
                                  std::string("a\033[2J"),
                                  std::string("::1\0x", 5),
                                  std::string("unix:///a%0ab"),
                                  std::string("unix:///a%00b"),
                                  std::string("unix:///a\n%"),
                                  std::string("unix://run/redis.sock"),
                                  std::string("unix://"),
                                  std::string("host?prefix=a"),
                                  "unix:///" + std::string(107, 'a')}) {
    const absl::Status status = ParseRedisEndpoint(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_EQ(status.message().find_first_of("\n\033"), absl::string_view::npos) << text;
  }
}

TEST(ParseRedisEndpointTest, RefusesASecretWithoutRepeatingIt) {
  const absl::Status status = ParseRedisEndpoint("redis://me:hunter2@host:1").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(status.message(), "DDP_REDIS_PASSWORD_FILE"));
  EXPECT_FALSE(absl::StrContains(status.message(), "hunter2"));
  EXPECT_FALSE(absl::StrContains(ParseStoreAddress("redis://me:hunter2@host:1").status().message(),
                                 "hunter2"));
}

TEST(RedisEndpointTest, DebugStringHidesThePassword) {
  RedisEndpoint endpoint = *ParseRedisEndpoint("redis://[::1]:7000/2");
  EXPECT_EQ(endpoint.DebugString(), "[::1]:7000/2");
  endpoint.password = "hunter2";
  EXPECT_EQ(endpoint.DebugString(), "[::1]:7000/2 (user default, with a password)");
  EXPECT_EQ(ParseRedisEndpoint("unix:///a")->DebugString(), "unix:///a");
}

TEST(StoreAddressTest, ComesBackAsItWas) {
  for (const char* endpoint :
       {"host:7000", "redis://[::1]:7000/2", "unix:///tmp/a%3Fb c/redis.sock"}) {
    for (const std::string& prefix :
         {std::string("ddp:{run}:i1:g2.abcd:store:"), std::string("a&b=c?d%e f/\n\xff")}) {
      StoreAddress address{*ParseRedisEndpoint(endpoint), prefix};
      if (address.endpoint.is_unix()) address.endpoint.database = 4;
      const std::string url = FormatStoreAddress(address);
      EXPECT_EQ(url.find_first_of(" \n{}"), std::string::npos) << url;
      const absl::StatusOr<StoreAddress> parsed = ParseStoreAddress(url);
      ASSERT_TRUE(parsed.ok()) << url << ": " << parsed.status();
      EXPECT_EQ(*parsed, address) << url;
    }
  }
}

TEST(StoreAddressTest, CarriesNoCredentials) {
  StoreAddress address{*ParseRedisEndpoint("host"), "p:"};
  address.endpoint.user = "alice";
  address.endpoint.password = "hunter2";
  EXPECT_EQ(FormatStoreAddress(address), "redis://host:6379?prefix=p:");
}

TEST(StoreAddressTest, RefusesWhatIsNoStore) {
  for (const char* url :
       {"", "host:1", "redis://host:1", "redis://host:1?",
        "redis://host:1?prefix=", "redis://host:1?prefix=%4", "redis://host:1?other=1&prefix=a",
        "unix:///a?database=x&prefix=a", "host:1?prefix=a"}) {
    EXPECT_EQ(ParseStoreAddress(url).status().code(), absl::StatusCode::kInvalidArgument) << url;
  }
}

TEST(RedisEndpointTest, TlsHasASchemeAndFiles) {
  const RedisEndpoint plain = *ParseRedisEndpoint("rediss://redis.example:7000/2");
  EXPECT_TRUE(plain.tls);
  EXPECT_EQ(plain.host, "redis.example");
  EXPECT_EQ(plain.port, 7000);
  EXPECT_EQ(plain.database, 2);
  EXPECT_EQ(plain.DebugString(), "rediss://redis.example:7000/2");
  EXPECT_FALSE(ParseRedisEndpoint("redis://redis.example")->tls);

  const std::string url =
      "rediss://[::1]:7000?tls_ca_cert_file=/a%20b/ca.pem&tls_cert_file=/c.pem&tls_key_file=/k.pem";
  const RedisEndpoint endpoint = *ParseRedisEndpoint(url);
  EXPECT_EQ(endpoint.tls_ca_cert_file, "/a b/ca.pem");
  EXPECT_EQ(endpoint.tls_cert_file, "/c.pem");
  EXPECT_EQ(endpoint.tls_key_file, "/k.pem");
  EXPECT_EQ(endpoint.DebugString(), "rediss://[::1]:7000") << "for people";
  EXPECT_EQ(*ParseRedisEndpoint(FormatRedisEndpoint(endpoint)), endpoint);
  const StoreAddress address = {endpoint, "p:"};
  EXPECT_EQ(*ParseStoreAddress(FormatStoreAddress(address)), address);
}

TEST(RedisEndpointTest, ARelativeTlsFileBecomesAbsolute) {
  const RedisEndpoint endpoint = *ParseRedisEndpoint("rediss://h?tls_ca_cert_file=ca.pem");
  EXPECT_EQ(endpoint.tls_ca_cert_file, std::filesystem::current_path().string() + "/ca.pem");
}

TEST(RedisEndpointTest, TlsFilesFitTogether) {
  const auto message = [](const char* text) {
    return std::string(ParseRedisEndpoint(text).status().message());
  };
  EXPECT_EQ(message("rediss://h?tls_cert_file=/c"), "tls_cert_file is given without tls_key_file");
  EXPECT_EQ(message("rediss://h?tls_key_file=/k"), "tls_key_file is given without tls_cert_file");
  EXPECT_TRUE(absl::StrContains(message("rediss://h?cert=/c"), "unknown part 'cert=/c'"));
  EXPECT_TRUE(absl::StrContains(message("redis://h?tls_cert_file=/c"), "'?' has no place here"));
  EXPECT_EQ(ParseStoreAddress("redis://h?tls_ca_cert_file=/c&prefix=p").status().message(),
            "tls_ca_cert_file is given, but not TLS: write the endpoint as rediss://HOST:PORT");
}

TEST(RedisEndpointTest, SentinelsHaveAScheme) {
  const std::string url = "redis+sentinel://a:1,[::1]:26379/my%20master/2";
  const RedisEndpoint endpoint = *ParseRedisEndpoint("redis+sentinel://a:1,[::1]/my%20master/2");
  EXPECT_TRUE(endpoint.is_behind_sentinels());
  EXPECT_EQ(endpoint.master_name, "my master");
  EXPECT_EQ(endpoint.database, 2);
  EXPECT_EQ(endpoint.DebugString(), url);
  EXPECT_EQ(*ParseRedisEndpoint(FormatRedisEndpoint(endpoint)), endpoint);
  const StoreAddress address = {endpoint, "p:"};
  EXPECT_EQ(*ParseStoreAddress(FormatStoreAddress(address)), address);
  for (const char* text :
       {"redis+sentinel://a", "redis+sentinel://a/", "redis+sentinel:///m", "redis+sentinel://a,/m",
        "redis+sentinel://a:0/m", "redis+sentinel://a/m/x", "redis+sentinel://a/m/0/1"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseRedisEndpoint(text).status())) << text;
  }
}

TEST(RedisEndpointTest, AUnixSocketsUrlHasItsDatabase) {
  RedisEndpoint endpoint = *ParseRedisEndpoint("unix:///run/redis.sock?database=3");
  EXPECT_EQ(endpoint.database, 3);
  EXPECT_EQ(FormatRedisEndpoint(endpoint), "unix:///run/redis.sock?database=3");
}

class CredentialsTest : public ::testing::Test {
 protected:
  void SetUp() override { Clear(); }
  void TearDown() override { Clear(); }
  static void Clear() {
    for (const char* name : {"DDP_REDIS_USER", "DDP_REDIS_PASSWORD", "DDP_REDIS_PASSWORD_FILE"}) {
      unsetenv(name);
    }
  }

  static std::string WriteFile(const std::string& content) {
    const std::string path = ::testing::TempDir() + "/password";
    FILE* file = fopen(path.c_str(), "w");
    fwrite(content.data(), 1, content.size(), file);
    fclose(file);
    return path;
  }

  RedisEndpoint endpoint_ = *ParseRedisEndpoint("host");
};

TEST_F(CredentialsTest, NothingSetChangesNothing) {
  endpoint_.password = "kept";
  ASSERT_TRUE(ApplyRedisCredentialsFromEnvironment(endpoint_).ok());
  EXPECT_EQ(endpoint_.password, "kept");
}

TEST_F(CredentialsTest, TakesUserAndPassword) {
  setenv("DDP_REDIS_USER", "alice", 1);
  setenv("DDP_REDIS_PASSWORD", "secret", 1);
  ASSERT_TRUE(ApplyRedisCredentialsFromEnvironment(endpoint_).ok());
  EXPECT_EQ(endpoint_.user, "alice");
  EXPECT_EQ(endpoint_.password, "secret");
}

TEST_F(CredentialsTest, ReadsTheFileWithoutItsLineEnd) {
  setenv("DDP_REDIS_PASSWORD_FILE", WriteFile(" secret \r\n").c_str(), 1);
  ASSERT_TRUE(ApplyRedisCredentialsFromEnvironment(endpoint_).ok());
  EXPECT_EQ(endpoint_.password, " secret ");
}

TEST_F(CredentialsTest, NamesWhatIsWrong) {
  setenv("DDP_REDIS_PASSWORD_FILE", "/nonexistent/password", 1);
  const absl::Status missing = ApplyRedisCredentialsFromEnvironment(endpoint_);
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(absl::StrContains(missing.message(), "/nonexistent/password"));

  setenv("DDP_REDIS_PASSWORD_FILE", WriteFile("\n").c_str(), 1);
  EXPECT_EQ(ApplyRedisCredentialsFromEnvironment(endpoint_).code(),
            absl::StatusCode::kInvalidArgument);

  setenv("DDP_REDIS_PASSWORD", "secret", 1);
  EXPECT_EQ(ApplyRedisCredentialsFromEnvironment(endpoint_).code(),
            absl::StatusCode::kInvalidArgument);

  Clear();
  setenv("DDP_REDIS_USER", "alice", 1);
  EXPECT_EQ(ApplyRedisCredentialsFromEnvironment(endpoint_).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace ddp::store
