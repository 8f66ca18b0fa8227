#include "store/tcp_store/tcp_store_connection.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/tcp_store/tcp_store_protocol.h"

namespace ddp::store {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

std::string Get(const std::string& key) {
  std::string bytes;
  AppendQuery(bytes, TcpStoreQuery::kGet);
  AppendString(bytes, key);
  return bytes;
}

// A connection whose client is the test.
class TcpStoreConnectionTest : public ::testing::Test {
 protected:
  TcpStoreConnectionTest() {
    int ends[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    client_.reset(ends[0]);
    connection_.emplace(loop_.get(), UniqueFd(ends[1]), &limits_, [this](uint32_t) {
      ++wakes_;
      last_ = connection_->Advance();
      loop_->Stop();
    });
    EXPECT_TRUE(connection_->Start().ok());
  }

  void Write(const std::string& bytes) {
    ASSERT_EQ(write(client_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }

  // Runs the loop until the socket is ready, and returns the result of Advance().
  absl::Status AwaitReady() {
    const EventLoop::TimerId timer = loop_->AddTimer(kLong, [this] {
      ADD_FAILURE() << "the socket is not watched";
      loop_->Stop();
    });
    EXPECT_TRUE(loop_->Run().ok());
    loop_->CancelTimer(timer);
    return last_;
  }

  // Runs the loop once, without waiting for the socket. Returns true when the socket was ready.
  bool IsReady() {
    const int before = wakes_;
    loop_->AddTimer(absl::ZeroDuration(), [this] { loop_->Stop(); });
    EXPECT_TRUE(loop_->Run().ok());
    return wakes_ != before;
  }

  // Returns the key of the next request, or "" when there is none.
  std::string NextKey() {
    auto request = connection_->NextRequest();
    EXPECT_TRUE(request.ok()) << request.status();
    return request.ok() && request->has_value() ? (*request)->keys[0] : "";
  }

  const std::unique_ptr<EventLoop> loop_ = *EventLoop::Create();
  const TcpStoreLimits limits_;
  UniqueFd client_;
  std::optional<TcpStoreConnection> connection_;
  int wakes_ = 0;
  absl::Status last_;
};

TEST_F(TcpStoreConnectionTest, CutsWhatComesIntoRequests) {
  const std::string bytes = Get("/one") + Get("/two");
  Write(bytes.substr(0, 5));
  ASSERT_TRUE(AwaitReady().ok());
  EXPECT_EQ(NextKey(), "");
  Write(bytes.substr(5));
  ASSERT_TRUE(AwaitReady().ok());
  EXPECT_EQ(NextKey(), "/one");
  EXPECT_EQ(NextKey(), "/two");
  EXPECT_EQ(NextKey(), "");
}

TEST_F(TcpStoreConnectionTest, WhatIsNoRequestEndsIt) {
  Write("\xff nonsense");
  ASSERT_TRUE(AwaitReady().ok());
  EXPECT_TRUE(absl::IsInvalidArgument(connection_->NextRequest().status()));
}

TEST_F(TcpStoreConnectionTest, WhileAReplyWaitsNothingIsRead) {
  const std::string reply(4 << 20, 'r');
  ASSERT_TRUE(connection_->Send(reply).ok());
  EXPECT_GT(connection_->held_bytes(), reply.size() / 2) << "more than the socket takes";
  Write(Get("/k"));
  EXPECT_FALSE(IsReady());
  EXPECT_EQ(NextKey(), "");
  std::string got;
  std::vector<char> buffer(1 << 20);
  while (got.size() < reply.size()) {
    const ssize_t count = read(client_.get(), buffer.data(), buffer.size());
    if (count > 0) {
      got.append(buffer.data(), static_cast<size_t>(count));
    } else {
      ASSERT_TRUE(AwaitReady().ok());
    }
  }
  EXPECT_EQ(got, reply);
  std::string key;
  while ((key = NextKey()).empty() && !HasFailure()) ASSERT_TRUE(AwaitReady().ok());
  EXPECT_EQ(key, "/k");
}

TEST_F(TcpStoreConnectionTest, AHeldRequestComesBackAndNothingIsReadMeanwhile) {
  Write(Get("/held"));
  ASSERT_TRUE(AwaitReady().ok());
  auto request = connection_->NextRequest();
  ASSERT_TRUE(request.ok() && request->has_value());
  const size_t held_before = connection_->held_bytes();
  ASSERT_TRUE(connection_->Hold(**std::move(request)).ok());
  EXPECT_TRUE(connection_->is_holding());
  EXPECT_GT(connection_->held_bytes(), held_before);
  Write(Get("/next"));
  EXPECT_FALSE(IsReady());
  const auto released = connection_->Release();
  ASSERT_TRUE(released.ok()) << released.status();
  EXPECT_EQ(released->keys[0], "/held");
  EXPECT_FALSE(connection_->is_holding());
  ASSERT_TRUE(AwaitReady().ok());
  EXPECT_EQ(NextKey(), "/next");
}

TEST_F(TcpStoreConnectionTest, AClientThatGoesIsSeenAlsoWhileItsRequestIsHeld) {
  ASSERT_TRUE(connection_->Hold({}).ok());
  EXPECT_FALSE(connection_->HasGone());
  client_.reset();
  EXPECT_TRUE(connection_->HasGone());
  EXPECT_TRUE(absl::IsUnavailable(AwaitReady()));
}

TEST_F(TcpStoreConnectionTest, AClientThatGoesIsSeen) {
  client_.reset();
  EXPECT_TRUE(absl::IsUnavailable(AwaitReady()));
  EXPECT_TRUE(absl::IsUnavailable(connection_->Send("reply")));
}

}  // namespace
}  // namespace ddp::store
