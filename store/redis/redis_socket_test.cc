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
    client_ = UniqueFd(fds[0]);
    server_ = UniqueFd(fds[1]);
    endpoint_.host = "redis";
  }

  absl::StatusOr<size_t> Receive(int flags) {
    return ReceiveSome(client_.get(), absl::MakeSpan(buffer_), flags, endpoint_);
  }

  RedisEndpoint endpoint_;
  UniqueFd client_;
  UniqueFd server_;
  char buffer_[4] = {};
};

TEST_F(RedisSocketTest, ReceivesWhatHasCome) {
  EXPECT_EQ(Receive(MSG_DONTWAIT).value(), 0u) << "nothing";
  ASSERT_EQ(SendSome(server_.get(), "abcdef", endpoint_).value(), 6u);
  EXPECT_EQ(Receive(MSG_DONTWAIT | MSG_PEEK).value(), 4u);
  EXPECT_EQ(Receive(MSG_DONTWAIT).value(), 4u);
  EXPECT_EQ(absl::string_view(buffer_, 4), "abcd");
  EXPECT_EQ(Receive(MSG_DONTWAIT).value(), 2u);
  EXPECT_EQ(Receive(MSG_DONTWAIT).value(), 0u);
}

TEST_F(RedisSocketTest, AReceiveThatMayBlockEndsAtItsLimit) {
  ASSERT_TRUE(LimitBlocking(client_.get(), absl::Milliseconds(1)).ok());
  EXPECT_EQ(Receive(0).value(), 0u);
}

TEST_F(RedisSocketTest, TheEndOfAConnectionNamesTheServer) {
  server_.reset();
  const absl::Status received = Receive(MSG_DONTWAIT).status();
  EXPECT_TRUE(absl::IsUnavailable(received)) << received;
  EXPECT_EQ(received.message(), "Redis at redis:6379 closed the connection");
  const absl::Status sent = SendSome(client_.get(), "abc", endpoint_).status();
  EXPECT_TRUE(absl::IsUnavailable(sent)) << sent;
  EXPECT_TRUE(absl::StartsWith(sent.message(), "the connection broke to Redis at redis:6379: "))
      << sent;
}

TEST_F(RedisSocketTest, AFullSocketTakesNothing) {
  const std::string bytes(1 << 16, 'x');
  size_t sent = 0;
  while (const size_t count = SendSome(client_.get(), bytes, endpoint_).value()) sent += count;
  EXPECT_GT(sent, 0u);
  EXPECT_FALSE(AwaitSocket(client_.get(), POLLOUT, MonotonicClock().Now()));
}

}  // namespace
}  // namespace ddp::store
