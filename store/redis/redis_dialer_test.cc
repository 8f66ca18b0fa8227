#include "store/redis/redis_dialer.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_socket.h"
#include "testing/network/loopback_socket.h"
#include "testing/redis/redis_fixture.h"
#include "testing/redis/scripted_redis_server.h"

namespace ddp::store {
namespace {

using ::ddp::testing::RedisFixture;

constexpr absl::Duration kLong = absl::Seconds(60);

class RedisDialerTest : public ::testing::Test {
 protected:
  RedisDialerTest() : loop_(*EventLoop::Create()) { options_.connect_timeout = kLong; }

  // Makes one attempt, and runs the loop meanwhile.
  absl::StatusOr<UniqueFd> Dial(RedisDialer& dialer) {
    absl::StatusOr<UniqueFd> result = absl::CancelledError("not called");
    dialer.Dial([&](absl::StatusOr<UniqueFd> fd) {
      result = std::move(fd);
      loop_->Stop();
    });
    EXPECT_TRUE(loop_->Run().ok());
    return result;
  }

  static std::string Ask(int fd, const std::vector<std::string>& command) {
    const std::string question = RedisWireForm({command});
    EXPECT_EQ(send(fd, question.data(), question.size(), 0), ssize_t(question.size()));
    EXPECT_TRUE(AwaitSocket(fd, POLLIN, MonotonicClock().Now() + kLong));
    char answer[256];
    const ssize_t count = recv(fd, answer, sizeof(answer), MSG_DONTWAIT);
    return std::string(answer, std::max<ssize_t>(count, 0));
  }

  absl::StatusOr<UniqueFd> Dial(const RedisEndpoint& endpoint) {
    RedisDialer dialer(endpoint, options_, loop_.get());
    return Dial(dialer);
  }

  const std::unique_ptr<EventLoop> loop_;
  RedisConnectionOptions options_;
};

TEST_F(RedisDialerTest, TheSocketIsGreetedAndOfUse) {
  options_.client_name = "test";
  const auto redis = RedisFixture::StartTcp("secret");
  for (const RedisEndpoint& endpoint : {redis->endpoint(), redis->SocketEndpoint()}) {
    absl::StatusOr<UniqueFd> fd = Dial(endpoint);
    ASSERT_TRUE(fd.ok()) << fd.status();
    EXPECT_EQ(Ask(fd->get(), {"CLIENT", "GETNAME"}), "$4\r\ntest\r\n");
  }
}

TEST_F(RedisDialerTest, TheGreetingEndsInResp3WhereThatIsWanted) {
  options_.resp3 = true;
  const auto redis = RedisFixture::Start();
  absl::StatusOr<UniqueFd> fd = Dial(redis->endpoint());
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(Ask(fd->get(), {"GET", "nothing"}), "_\r\n");
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
  RedisDialer dialer(endpoint, options_, loop_.get());
  EXPECT_TRUE(Dial(dialer).ok());
  EXPECT_TRUE(Dial(dialer).ok()) << "and not again";
}

// The name cannot be resolved, so a lookup would fail the attempt.
TEST_F(RedisDialerTest, AServerThatWasReachedIsLookedForAtItsAddress) {
  const auto redis = RedisFixture::StartTcp();
  RedisEndpoint endpoint = redis->endpoint();
  endpoint.host = "no such name.invalid";
  RedisDialer dialer(endpoint, options_, loop_.get());
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
  RedisDialer dialer(endpoint, options_, loop_.get());
  dialer.FoundAt("127.0.0.2");
  EXPECT_FALSE(Dial(dialer).ok()) << "the name is not asked for at once";
  dialer.Doubt();
  const absl::Time deadline = MonotonicClock().Now() + kLong;
  while (!Dial(dialer).ok()) ASSERT_LT(MonotonicClock().Now(), deadline);
}

TEST_F(RedisDialerTest, ANameThatMeansNothing) {
  RedisEndpoint endpoint;
  endpoint.host = "no such name.invalid";
  RedisDialer dialer(endpoint, options_, loop_.get());
  for (int i = 0; i < 2; ++i) {
    const absl::Status status = Dial(dialer).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_NE(status.message().find(endpoint.host), std::string::npos) << status;
  }
  const auto redis = RedisFixture::StartTcp();
  endpoint.port = redis->endpoint().port;
  RedisDialer other(endpoint, options_, loop_.get());
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
  RedisDialer given_up(redis->endpoint(), options_, loop_.get());
  RedisDialer other(redis->endpoint(), options_, loop_.get());
  const auto dial_in_vain = [&] {
    given_up.Dial([](const absl::StatusOr<UniqueFd>&) { ADD_FAILURE(); });
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
