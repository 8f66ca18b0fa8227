// Connections by TLS to a real server, of both kinds of client.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/shared_redis_connection.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/tls_certificates.h"

namespace ddp::store {
namespace {

using ::ddp::testing::RedisFixture;
using ::ddp::testing::TlsCertificates;
using ::testing::AllOf;
using ::testing::HasSubstr;

class TlsTest : public ::testing::Test {
 protected:
  static absl::Status Try(const RedisEndpoint& endpoint,
                          absl::Duration timeout = absl::Seconds(30)) {
    return RedisConnection::Connect(endpoint, {.total_timeout = timeout}).status();
  }

  const TlsCertificates certificates_;
};

TEST_F(TlsTest, EveryKindOfCallWorks) {
  const auto redis = RedisFixture::StartTls(certificates_);
  const auto connection = redis->Connect();
  EXPECT_EQ(*connection->Command({"SET", "k", "v"})->AsString(), "OK");
  EXPECT_EQ(
      *connection->Eval(RedisScript("return redis.call('GET', KEYS[1])"), {"k"}, {})->AsString(),
      "v");
  EXPECT_EQ(connection->Transaction({{"INCR", "n"}, {"INCR", "n"}})->size(), 2u);
}

TEST_F(TlsTest, TheNameIsCheckedAsTheUserWroteIt) {
  const auto redis = RedisFixture::StartTls(certificates_);
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.host = "localhost";
  EXPECT_EQ(Try(endpoint), absl::OkStatus());
  endpoint.host = "127.1";  // the same address under a name that is not in the certificate
  const absl::Status status = Try(endpoint);
  EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("its certificate is not accepted: "));
}

TEST_F(TlsTest, AForeignAuthorityIsRefusedAtOnce) {
  const auto redis = RedisFixture::StartTls(certificates_);
  const TlsCertificates others;
  RedisEndpoint endpoint = redis->endpoint();
  for (const std::string& ca : {others.ca(), std::string()}) {
    endpoint.tls_ca_cert_file = ca;
    const absl::Status status = Try(endpoint);
    EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("its certificate is not accepted: "));
  }
}

TEST_F(TlsTest, AServerMayDemandAClientsCertificate) {
  const auto redis = RedisFixture::StartTls(certificates_, /*asks_clients=*/true);
  EXPECT_EQ(Try(redis->endpoint()), absl::OkStatus());
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.tls_cert_file.clear();
  endpoint.tls_key_file.clear();
  const absl::Status status = Try(endpoint);
  EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("tls_cert_file and tls_key_file"));
}

TEST_F(TlsTest, AFileThatCannotBeReadIsNamedAtOnce) {
  const auto redis = RedisFixture::StartTls(certificates_);
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.tls_ca_cert_file = "/nonexistent/ca.pem";
  absl::Status status = Try(endpoint);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.message(), AllOf(HasSubstr("tls_ca_cert_file=/nonexistent/ca.pem: "),
                                      HasSubstr("No such file")));
  endpoint = redis->endpoint();
  endpoint.tls_cert_file = certificates_.client_cert();
  endpoint.tls_key_file = certificates_.server_key();
  status = Try(endpoint);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("tls_key_file="));
}

TEST_F(TlsTest, AServerWithoutTlsIsSaidToBeOne) {
  const auto redis = RedisFixture::StartTcp();
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.tls = true;
  const absl::Status status =
      RedisConnection::Connect(endpoint, {.connect_timeout = absl::Milliseconds(200),
                                          .total_timeout = absl::ZeroDuration()})
          .status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.message(), HasSubstr("TLS"));
}

TEST_F(TlsTest, AServerThatClosesInTheHandshakeIsUnavailable) {
  const auto redis = RedisFixture::StartTls(certificates_);
  redis->Kill();
  EXPECT_TRUE(absl::IsUnavailable(Try(redis->endpoint(), absl::ZeroDuration())));
}

TEST_F(TlsTest, AConnectionIsMadeAgain) {
  const auto redis = RedisFixture::StartTls(certificates_);
  const auto connection = redis->Connect();
  const auto shared = SharedRedisConnection::Connect(redis->endpoint(), {});
  ASSERT_TRUE(shared.ok()) << shared.status();
  redis->Restart();
  // Not idempotent: it works because the closed connection is seen before.
  EXPECT_EQ(*connection->Command({"INCR", "n"})->AsInteger(), 1);
  EXPECT_EQ(*(*shared)->Command({"INCR", "n"})->AsInteger(), 2);
}

// More than a record of TLS and than the buffers of a socket, in both directions.
TEST_F(TlsTest, LargeValuesPass) {
  const auto redis = RedisFixture::StartTls(certificates_);
  const auto connection = redis->Connect();
  for (const size_t size : {size_t{16 * 1024 - 40}, size_t{16 * 1024}, size_t{8} << 20}) {
    const std::string value(size, 'x');
    ASSERT_TRUE(connection->Command({"SET", "k", value}).ok());
    EXPECT_EQ(*connection->Command({"GET", "k"})->AsString(), value);
  }
}

// One thread receives while others send.
TEST_F(TlsTest, ThreadsShareAConnection) {
  constexpr int kThreads = 8;
  constexpr int kCalls = 200;
  const auto redis = RedisFixture::StartTls(certificates_);
  const auto shared = SharedRedisConnection::Connect(redis->endpoint(), {});
  ASSERT_TRUE(shared.ok()) << shared.status();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const std::string value(t * 5000, 'a' + t);
      const std::string key = absl::StrCat("k", t);
      for (int i = 0; i < kCalls; ++i) {
        ASSERT_TRUE((*shared)->Command({"SET", key, value}).ok());
        ASSERT_EQ(*(*shared)->Command({"GET", key})->AsString(), value);
        ASSERT_TRUE((*shared)->Command({"INCR", "n"}).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(*(*shared)->Command({"GET", "n"})->AsString(), absl::StrCat(kThreads * kCalls));
}

}  // namespace
}  // namespace ddp::store
