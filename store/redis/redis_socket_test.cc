#include "store/redis/redis_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "gtest/gtest.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {
namespace {

// A pair of connected sockets: the client's, and the one that plays the server.
class RedisSocketTest : public ::testing::Test {
 protected:
  RedisSocketTest() {
    int fds[2] = {-1, -1};
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    client_ = RedisSocket(UniqueFd(fds[0]));
    server_ = RedisSocket(UniqueFd(fds[1]));
    endpoint_.host = "redis";
  }

  absl::StatusOr<size_t> Receive(RedisSocket::Blocking blocking = RedisSocket::Blocking::kNever) {
    return client_.Receive(absl::MakeSpan(buffer_), blocking, endpoint_);
  }

  RedisEndpoint endpoint_;
  RedisSocket client_;
  RedisSocket server_;
  char buffer_[4] = {};
};

TEST_F(RedisSocketTest, ReceivesWhatHasCome) {
  EXPECT_EQ(Receive().value(), 0u) << "nothing";
  EXPECT_FALSE(client_.HasInput(endpoint_).value());
  ASSERT_EQ(server_.Send("abcdef", endpoint_).value(), 6u);
  EXPECT_TRUE(client_.HasInput(endpoint_).value());
  EXPECT_EQ(Receive().value(), 4u);
  EXPECT_EQ(absl::string_view(buffer_, 4), "abcd");
  EXPECT_EQ(Receive().value(), 2u);
  EXPECT_EQ(Receive().value(), 0u);
}

TEST_F(RedisSocketTest, AReceiveThatMayBlockEndsAtItsLimit) {
  ASSERT_TRUE(client_.LimitBlocking(absl::Milliseconds(1)).ok());
  EXPECT_EQ(Receive(RedisSocket::Blocking::kMayBlock).value(), 0u);
}

TEST_F(RedisSocketTest, TheEndOfAConnectionNamesTheServer) {
  EXPECT_FALSE(client_.IsBroken());
  server_.reset();
  EXPECT_TRUE(client_.IsBroken());
  const absl::Status received = Receive().status();
  EXPECT_TRUE(absl::IsUnavailable(received)) << received;
  EXPECT_EQ(received.message(), "Redis at redis:6379 closed the connection");
  EXPECT_EQ(client_.HasInput(endpoint_).status(), received);
  const absl::Status sent = client_.Send("abc", endpoint_).status();
  EXPECT_TRUE(absl::IsUnavailable(sent)) << sent;
  EXPECT_TRUE(absl::StartsWith(sent.message(), "the connection broke to Redis at redis:6379: "))
      << sent;
}

TEST_F(RedisSocketTest, AFullSocketTakesNothing) {
  const std::string bytes(1 << 16, 'x');
  size_t sent = 0;
  while (const size_t count = client_.Send(bytes, endpoint_).value()) sent += count;
  EXPECT_GT(sent, 0u);
  EXPECT_FALSE(AwaitSocket(client_.fd(), POLLOUT, MonotonicClock().Now()));
}

}  // namespace
}  // namespace ddp::store
