#include "elastic/rendezvous/script_channel.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "store/redis_connection.h"
#include "store/redis_reply.h"
#include "testing/redis_fixture.h"

namespace ddp::elastic {
namespace {

using ::ddp::testing::RedisFixture;

constexpr absl::Duration kLong = absl::Seconds(60);

class ScriptChannelTest : public ::testing::Test {
 protected:
  ScriptChannelTest() : loop_(*EventLoop::Create()), redis_(RedisFixture::StartTcp()) {}

  std::unique_ptr<ScriptChannel> Channel(absl::Duration connect_timeout) {
    auto connection =
        store::RedisConnection::Connect(redis_->endpoint(), {.connect_timeout = connect_timeout});
    EXPECT_TRUE(connection.ok()) << connection.status();
    return std::make_unique<ScriptChannel>(*std::move(connection), loop_.get(), kLong);
  }

  absl::StatusOr<store::RedisReply> Call(ScriptChannel& channel, std::vector<std::string> words) {
    absl::StatusOr<store::RedisReply> result = absl::CancelledError("not called");
    channel.Call(std::move(words), [&](absl::StatusOr<store::RedisReply> reply) {
      result = std::move(reply);
      loop_->Stop();
    });
    EXPECT_TRUE(loop_->Run().ok());
    return result;
  }

  const std::unique_ptr<EventLoop> loop_;
  const std::unique_ptr<RedisFixture> redis_;
};

TEST_F(ScriptChannelTest, AServerThatComesBackIsFoundByTheNextCall) {
  const auto channel = Channel(kLong);
  EXPECT_TRUE(Call(*channel, {"SET", "k", "v"}).ok());
  redis_->Kill();
  EXPECT_FALSE(Call(*channel, {"GET", "k"}).ok());
  EXPECT_TRUE(absl::IsUnavailable(Call(*channel, {"GET", "k"}).status()));
  redis_->Restart();
  const absl::StatusOr<store::RedisReply> reply = Call(*channel, {"GET", "k"});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->IsNil());
}

// The server's process stands still, as its machine may: it takes connections, and says nothing.
TEST_F(ScriptChannelTest, TheLoopGoesOnWhileTheServerDoesNotAnswer) {
  const auto channel = Channel(absl::Seconds(1));
  redis_->Kill();
  EXPECT_FALSE(Call(*channel, {"PING"}).ok());
  redis_->Restart();
  ASSERT_EQ(kill(redis_->pid(), SIGSTOP), 0);
  // Had the call waited for the connection, its end would come first.
  std::vector<std::string> order;
  channel->Call({"PING"}, [&](const absl::StatusOr<store::RedisReply>& reply) {
    EXPECT_TRUE(absl::IsUnavailable(reply.status())) << reply.status();
    order.push_back("answer");
    loop_->Stop();
  });
  loop_->AddTimer(absl::Milliseconds(1), [&] { order.push_back("something else"); });
  ASSERT_TRUE(loop_->Run().ok());
  ASSERT_EQ(kill(redis_->pid(), SIGCONT), 0);
  EXPECT_EQ(order, (std::vector<std::string>{"something else", "answer"}));
}

}  // namespace
}  // namespace ddp::elastic
