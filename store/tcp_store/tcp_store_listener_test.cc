#include "store/tcp_store/tcp_store_listener.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "testing/network/loopback_client.h"

namespace ddp::store {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

class TcpStoreListenerTest : public ::testing::Test {
 protected:
  TcpStoreListenerTest() {
    EXPECT_TRUE(listener_
                    ->Start([this](UniqueFd socket) {
                      clients_.push_back(std::move(socket));
                      loop_->Stop();
                    })
                    .ok());
  }

  UniqueFd Connect() const {
    UniqueFd client = testing::DialLoopback(listener_->port());
    EXPECT_TRUE(client.valid());
    return client;
  }

  // Runs the loop until a client has connected.
  void AwaitClient() {
    const EventLoop::TimerId timer = loop_->AddTimer(kLong, [this] { loop_->Stop(); });
    EXPECT_TRUE(loop_->Run().ok());
    loop_->CancelTimer(timer);
  }

  const std::unique_ptr<EventLoop> loop_ = *EventLoop::Create();
  const std::unique_ptr<TcpStoreListener> listener_ =
      *TcpStoreListener::Listen(loop_.get(), "127.0.0.1", 0);
  std::vector<UniqueFd> clients_;
};

TEST_F(TcpStoreListenerTest, HandsOverWhoComes) {
  const UniqueFd one = Connect();
  AwaitClient();
  ASSERT_EQ(clients_.size(), 1U);
  EXPECT_NE(fcntl(clients_[0].get(), F_GETFL) & O_NONBLOCK, 0);
  EXPECT_NE(fcntl(clients_[0].get(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST_F(TcpStoreListenerTest, TakesAllThatWaitWithoutTheEventLoop) {
  std::vector<UniqueFd> waiting;
  for (int i = 0; i < 100; ++i) waiting.push_back(Connect());
  int rounds = 1;
  while (listener_->Accept()) ++rounds;
  EXPECT_EQ(clients_.size(), waiting.size());
  EXPECT_GT(rounds, 1) << "others have their turn in between";
  EXPECT_LE(rounds, TcpStoreListener::kMaxRounds);
}

TEST_F(TcpStoreListenerTest, WithoutDescriptorsClientsWait) {
  const UniqueFd client = Connect();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_FALSE(listener_->Accept());
  EXPECT_FALSE(listener_->Accept()) << "nor while it pauses";
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(clients_.empty());
  AwaitClient();
  EXPECT_EQ(clients_.size(), 1U);
}

}  // namespace
}  // namespace ddp::store
