#include "store/redis/redis_dialer.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_socket.h"
#include "testing/network/loopback_socket.h"
#include "testing/redis/delaying_proxy.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/scripted_redis_server.h"
#include "testing/temporary_folder.h"

namespace ddp::store {
namespace {

using ::ddp::testing::RedisFixture;

constexpr absl::Duration kLong = absl::Seconds(60);

class RedisDialerTest : public ::testing::Test {
 protected:
  RedisDialerTest() : loop_(*EventLoop::Create()) { options_.connect_timeout = kLong; }

  // Makes one attempt, and runs the loop meanwhile.
  absl::StatusOr<RedisSocket> Dial(RedisDialer& dialer) {
    absl::StatusOr<RedisSocket> result = absl::CancelledError("not called");
    dialer.Dial(loop_.get(), absl::InfiniteFuture(), [&](absl::StatusOr<RedisSocket> fd) {
      result = std::move(fd);
      loop_->Stop();
    });
    EXPECT_TRUE(loop_->Run().ok());
    return result;
  }

  // Returns the endpoint with a name: the test tells the dialer the addresses.
  static RedisEndpoint Named(const RedisFixture& redis) {
    RedisEndpoint endpoint = redis.endpoint();
    endpoint.host = "no such name.invalid";
    return endpoint;
  }

  // Returns a socket on which the kernel accepts connections that nobody answers.
  static UniqueFd ListenAt(const char* address, int port) {
    UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_port = htons(port);
    EXPECT_EQ(inet_pton(AF_INET, address, &name.sin_addr), 1);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
    EXPECT_EQ(listen(fd.get(), SOMAXCONN), 0);
    return fd;
  }

  static std::string Ask(int fd, const std::vector<std::string>& command) {
    const std::string question = RedisWireForm({command});
    EXPECT_EQ(send(fd, question.data(), question.size(), 0), ssize_t(question.size()));
    EXPECT_TRUE(AwaitSocket(fd, POLLIN, MonotonicClock().Now() + kLong));
    char answer[256];
    const ssize_t count = recv(fd, answer, sizeof(answer), MSG_DONTWAIT);
    return std::string(answer, std::max<ssize_t>(count, 0));
  }

  absl::StatusOr<RedisSocket> Dial(const RedisEndpoint& endpoint) {
    RedisDialer dialer(endpoint, options_);
    return Dial(dialer);
  }

  const std::unique_ptr<EventLoop> loop_;
  RedisConnectionOptions options_;
};

TEST_F(RedisDialerTest, TheSocketIsGreetedAndOfUse) {
  options_.client_name = "test";
  const auto redis = RedisFixture::StartTcp("secret");
  for (const RedisEndpoint& endpoint : {redis->endpoint(), redis->SocketEndpoint()}) {
    absl::StatusOr<RedisSocket> fd = Dial(endpoint);
    ASSERT_TRUE(fd.ok()) << fd.status();
    EXPECT_EQ(Ask(fd->fd(), {"CLIENT", "GETNAME"}), "$4\r\ntest\r\n");
  }
}

TEST_F(RedisDialerTest, TheGreetingEndsInResp3WhereThatIsWanted) {
  options_.resp3 = true;
  const auto redis = RedisFixture::Start();
  absl::StatusOr<RedisSocket> fd = Dial(redis->endpoint());
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(Ask(fd->fd(), {"GET", "nothing"}), "_\r\n");
}

TEST_F(RedisDialerTest, AServerThatDoesNotSpeakResp3) {
  options_.resp3 = true;
  testing::ScriptedRedisServer server({{"+PONG\r\n-ERR unknown command `HELLO`\r\n"}});
  const absl::Status status = Dial(server.endpoint()).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_NE(status.message().find("use Redis 6 or newer"), std::string::npos) << status;
}

TEST_F(RedisDialerTest, ANameIsLookedUp) {
  const auto redis = RedisFixture::StartTcp();
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.host = "localhost";
  RedisDialer dialer(endpoint, options_);
  EXPECT_TRUE(Dial(dialer).ok());
  EXPECT_TRUE(Dial(dialer).ok()) << "and not again";
}

// The name cannot be resolved, so a lookup would fail the attempt.
TEST_F(RedisDialerTest, AServerThatWasReachedIsLookedForAtItsAddress) {
  const auto redis = RedisFixture::StartTcp();
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.host = "no such name.invalid";
  RedisDialer dialer(endpoint, options_);
  dialer.FoundAt("127.0.0.1");
  EXPECT_TRUE(Dial(dialer).ok());
  redis->Kill();
  EXPECT_TRUE(absl::IsUnavailable(Dial(dialer).status()));
  redis->Restart();
  EXPECT_TRUE(Dial(dialer).ok());
}

TEST_F(RedisDialerTest, AnAddressThatIsDoubtedIsReplacedByThatOfTheName) {
  const auto redis = RedisFixture::StartTcp();
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.host = "localhost";
  RedisDialer dialer(endpoint, options_);
  dialer.FoundAt("127.0.0.2");
  EXPECT_FALSE(Dial(dialer).ok()) << "the name is not asked for yet";
  dialer.Doubt();
  const absl::Time deadline = MonotonicClock().Now() + kLong;
  while (!Dial(dialer).ok()) ASSERT_LT(MonotonicClock().Now(), deadline);
}

TEST_F(RedisDialerTest, AServerThatHasMovedIsFoundByItsNameAtOnce) {
  const auto redis = RedisFixture::StartTcp();
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.host = "localhost";
  RedisDialer dialer(endpoint, options_);
  dialer.FoundAt("127.0.0.2");
  const absl::Time deadline = MonotonicClock().Now() + absl::Seconds(20);
  while (!Dial(dialer).ok()) ASSERT_LT(MonotonicClock().Now(), deadline);
}

// An address that accepts and never answers comes first. Waiting for it would take a minute.
TEST_F(RedisDialerTest, ADeadFirstAddressHidesNoServer) {
  const auto redis = RedisFixture::StartTcp();
  const UniqueFd deaf = ListenAt("127.0.0.2", redis->endpoint().port);
  for (const bool resp3 : {false, true}) {
    options_.resp3 = resp3;
    RedisDialer dialer(Named(*redis), options_);
    dialer.FoundAt("127.0.0.1");
    dialer.FoundAt("127.0.0.2");
    const absl::Time start = MonotonicClock().Now();
    const absl::StatusOr<RedisSocket> fd = Dial(dialer);
    ASSERT_TRUE(fd.ok()) << fd.status();
    EXPECT_EQ(PeerAddress(fd->fd()), "127.0.0.1");
    EXPECT_LT(MonotonicClock().Now() - start, kLong / 2);
  }
}

TEST_F(RedisDialerTest, ThePoorestAddressHasTimeEvenWhereAttemptsAreShort) {
  const auto redis = RedisFixture::StartTcp();
  const UniqueFd deaf = ListenAt("127.0.0.2", redis->endpoint().port);
  options_.connect_timeout = absl::Milliseconds(100);  // less than the head start
  RedisDialer dialer(Named(*redis), options_);
  dialer.FoundAt("127.0.0.1");
  dialer.FoundAt("127.0.0.2");
  const absl::Time deadline = MonotonicClock().Now() + kLong;
  while (!Dial(dialer).ok()) ASSERT_LT(MonotonicClock().Now(), deadline);
}

TEST_F(RedisDialerTest, AReplicaIsTakenOnlyWhereThereIsNoMaster) {
  const auto master = RedisFixture::StartTcp();
  const auto replica = RedisFixture::StartTcpAt("127.0.0.2", master->endpoint().port);
  const std::string port = absl::StrCat(master->endpoint().port);
  ASSERT_TRUE(replica->Connect()->Command({"REPLICAOF", "127.0.0.1", port}).ok());
  for (const bool resp3 : {false, true}) {
    options_.resp3 = resp3;
    RedisDialer dialer(Named(*master), options_);
    dialer.FoundAt("127.0.0.1");
    dialer.FoundAt("127.0.0.2");
    const auto reached = [&] {
      const absl::StatusOr<RedisSocket> fd = Dial(dialer);
      return fd.ok() ? PeerAddress(fd->fd()) : fd.status().ToString();
    };
    EXPECT_EQ(reached(), "127.0.0.1");
    master->Kill();
    EXPECT_EQ(reached(), "127.0.0.2");
    master->Restart();
    EXPECT_EQ(reached(), "127.0.0.1") << "the replica has not replaced the list";
  }
}

// Each greeting takes 100 ms.
TEST_F(RedisDialerTest, AttemptsThatAreTooShortGrow) {
  const auto redis = RedisFixture::Start();
  const testing::DelayingProxy proxy(redis->endpoint().unix_path, absl::Milliseconds(50));
  options_.first_connect_timeout = absl::Milliseconds(10);
  RedisDialer dialer(proxy.endpoint(), options_);
  int failures = 0;
  const absl::Time deadline = MonotonicClock().Now() + kLong;
  for (; !Dial(dialer).ok(); ++failures) ASSERT_LT(MonotonicClock().Now(), deadline);
  EXPECT_GE(failures, 3) << "10, 20, 40 ms";
}

TEST_F(RedisDialerTest, APasswordThatWasChangedIsReadAgain) {
  const auto redis = RedisFixture::StartTcp("first");
  const auto own = redis->Connect();
  const testing::TemporaryFolder folder;
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.password_file = folder.path() + "/password";
  RedisDialer dialer(endpoint, options_);
  EXPECT_TRUE(Dial(dialer).ok()) << "the file is not needed";
  ASSERT_TRUE(own->Command({"CONFIG", "SET", "requirepass", "second"}).ok());
  EXPECT_TRUE(absl::IsUnauthenticated(Dial(dialer).status())) << "there is no file";
  std::ofstream(endpoint.password_file) << "first\n";
  EXPECT_TRUE(absl::IsUnauthenticated(Dial(dialer).status())) << "it is the same";
  std::ofstream(endpoint.password_file) << "second\n";
  EXPECT_TRUE(Dial(dialer).ok());
  ASSERT_TRUE(own->Command({"ACL", "SETUSER", "default", "resetpass", ">third"}).ok());
  std::ofstream(endpoint.password_file) << "third\n";
  EXPECT_TRUE(Dial(dialer).ok());
  // NOAUTH: no password was known.
  endpoint.password.clear();
  EXPECT_TRUE(Dial(endpoint).ok());
  endpoint.password_file.clear();
  EXPECT_TRUE(absl::IsUnauthenticated(Dial(endpoint).status()));
}

TEST_F(RedisDialerTest, ANameThatMeansNothing) {
  RedisEndpoint endpoint;
  endpoint.host = "no such name.invalid";
  RedisDialer dialer(endpoint, options_);
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = Dial(dialer).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_NE(status.message().find(endpoint.host), std::string::npos) << status;
  }
  const auto redis = RedisFixture::StartTcp();
  endpoint.port = redis->endpoint().port;
  RedisDialer other(endpoint, options_);
  EXPECT_FALSE(Dial(other).ok());
  other.FoundAt("127.0.0.1");
  EXPECT_TRUE(Dial(other).ok()) << "without the name";
}

TEST_F(RedisDialerTest, RefusalsAreToldApart) {
  const auto redis = RedisFixture::StartTcp("secret");
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.password = "wrong";
  EXPECT_TRUE(absl::IsUnauthenticated(Dial(endpoint).status()));
  redis->Kill();
  const absl::Status status = Dial(redis->endpoint()).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
}

TEST_F(RedisDialerTest, TheLoopGoesOnWhileAServerDoesNotAnswer) {
  const testing::LoopbackSocket deaf = testing::ListenOnLoopback();
  RedisEndpoint endpoint;
  endpoint.host = "127.0.0.1";
  endpoint.port = deaf.port;
  options_.connect_timeout = absl::Milliseconds(200);
  int ticks = 0;
  std::function<void()> tick = [&] {
    ++ticks;
    loop_->AddTimer(absl::Milliseconds(1), tick);
  };
  loop_->AddTimer(absl::ZeroDuration(), tick);
  const absl::Status status = Dial(endpoint).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_GT(ticks, 1);
}

TEST_F(RedisDialerTest, AnAttemptThatIsGivenUpIsNotAnswered) {
  const auto redis = RedisFixture::StartTcp();
  RedisDialer given_up(redis->endpoint(), options_);
  RedisDialer other(redis->endpoint(), options_);
  const auto dial_in_vain = [&] {
    given_up.Dial(loop_.get(), absl::InfiniteFuture(),
                  [](const absl::StatusOr<RedisSocket>&) { ADD_FAILURE(); });
  };
  // Cancels one attempt at once, and another under way, which was begun before the other dialer's.
  dial_in_vain();
  given_up.Cancel();
  EXPECT_TRUE(Dial(other).ok());
  dial_in_vain();
  loop_->AddTimer(absl::ZeroDuration(), [&] { given_up.Cancel(); });
  EXPECT_TRUE(Dial(other).ok());
  EXPECT_TRUE(Dial(given_up).ok()) << "it may be used again";
}

}  // namespace
}  // namespace ddp::store
