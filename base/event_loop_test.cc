#include "base/event_loop.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <vector>

#include "base/unique_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp {
namespace {

using ::testing::ElementsAre;

struct Pipe {
  Pipe() {
    int fds[2];
    EXPECT_EQ(pipe(fds), 0);
    reader.reset(fds[0]);
    writer.reset(fds[1]);
  }
  void Write() { EXPECT_EQ(write(writer.get(), "x", 1), 1); }
  void Read() {
    char byte = 0;
    EXPECT_EQ(read(reader.get(), &byte, 1), 1);
  }
  UniqueFd reader;
  UniqueFd writer;
};

class EventLoopTest : public ::testing::Test {
 protected:
  void SetUp() override {
    absl::StatusOr<std::unique_ptr<EventLoop>> loop = EventLoop::Create();
    ASSERT_TRUE(loop.ok()) << loop.status();
    loop_ = *std::move(loop);
    // This timer ends a test that would hang.
    loop_->AddTimer(absl::Seconds(60), [] { FAIL() << "the event did not come"; });
  }

  std::unique_ptr<EventLoop> loop_;
};

TEST_F(EventLoopTest, CallsBackForAReadyDescriptor) {
  Pipe pipe;
  uint32_t seen = 0;
  ASSERT_TRUE(loop_
                  ->Watch(pipe.reader.get(), EPOLLIN,
                          [&](uint32_t events) {
                            seen = events;
                            loop_->Stop();
                          })
                  .ok());
  pipe.Write();
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_TRUE(seen & EPOLLIN);
}

TEST_F(EventLoopTest, IsLevelTriggered) {
  Pipe pipe;
  int calls = 0;
  ASSERT_TRUE(loop_
                  ->Watch(pipe.reader.get(), EPOLLIN,
                          [&](uint32_t) {
                            if (++calls == 3) loop_->Stop();
                          })
                  .ok());
  pipe.Write();
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(calls, 3);
}

TEST_F(EventLoopTest, RefusesToWatchADescriptorTwice) {
  Pipe pipe;
  ASSERT_TRUE(loop_->Watch(pipe.reader.get(), EPOLLIN, [](uint32_t) {}).ok());
  EXPECT_EQ(loop_->Watch(pipe.reader.get(), EPOLLIN, [](uint32_t) {}).code(),
            absl::StatusCode::kAlreadyExists);
  loop_->Unwatch(pipe.reader.get());
  EXPECT_TRUE(loop_->Watch(pipe.reader.get(), EPOLLIN, [](uint32_t) {}).ok());
}

TEST_F(EventLoopTest, ACallbackMayUnwatchItselfAndOthersThatAreReady) {
  Pipe first;
  Pipe second;
  int calls = 0;
  auto once = [&](uint32_t) {
    ++calls;
    loop_->Unwatch(first.reader.get());
    loop_->Unwatch(second.reader.get());
    loop_->AddTimer(absl::ZeroDuration(), [&] { loop_->Stop(); });
  };
  ASSERT_TRUE(loop_->Watch(first.reader.get(), EPOLLIN, once).ok());
  ASSERT_TRUE(loop_->Watch(second.reader.get(), EPOLLIN, once).ok());
  first.Write();
  second.Write();
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(calls, 1);
}

TEST_F(EventLoopTest, AReusedDescriptorDoesNotGetItsPredecessorsEvent) {
  Pipe first;
  Pipe second;
  Pipe quiet;
  int quiet_calls = 0;
  auto replace = [&](uint32_t) {
    loop_->Unwatch(first.reader.get());
    loop_->Unwatch(second.reader.get());
    // The descriptor number of `second` is now the end of a pipe without data.
    ASSERT_EQ(dup2(quiet.reader.get(), second.reader.get()), second.reader.get());
    ASSERT_TRUE(loop_->Watch(second.reader.get(), EPOLLIN, [&](uint32_t) { ++quiet_calls; }).ok());
    loop_->AddTimer(absl::ZeroDuration(), [&] { loop_->Stop(); });
  };
  ASSERT_TRUE(loop_->Watch(first.reader.get(), EPOLLIN, replace).ok());
  ASSERT_TRUE(loop_->Watch(second.reader.get(), EPOLLIN, replace).ok());
  first.Write();
  second.Write();
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(quiet_calls, 0);
}

TEST_F(EventLoopTest, TimersFireInOrderOfTheirTime) {
  std::vector<int> order;
  loop_->AddTimer(absl::Milliseconds(2), [&] {
    order.push_back(2);
    loop_->Stop();
  });
  loop_->AddTimer(absl::Milliseconds(1), [&] { order.push_back(1); });
  loop_->AddTimer(absl::ZeroDuration(), [&] { order.push_back(0); });
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_THAT(order, ElementsAre(0, 1, 2));
}

TEST_F(EventLoopTest, ACancelledTimerDoesNotFire) {
  bool fired = false;
  const EventLoop::TimerId id = loop_->AddTimer(absl::Milliseconds(1), [&] { fired = true; });
  loop_->AddTimer(absl::ZeroDuration(), [&] { loop_->CancelTimer(id); });
  loop_->AddTimer(absl::Milliseconds(2), [&] { loop_->Stop(); });
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_FALSE(fired);
  loop_->CancelTimer(id);       // fired or gone: nothing
  loop_->CancelTimer(999'999);  // unknown: nothing
}

TEST_F(EventLoopTest, ATimerThatAddsItselfDoesNotStarveDescriptors) {
  Pipe pipe;
  std::function<void()> again = [&] { loop_->AddTimer(absl::ZeroDuration(), again); };
  again();
  ASSERT_TRUE(loop_->Watch(pipe.reader.get(), EPOLLIN, [&](uint32_t) { loop_->Stop(); }).ok());
  pipe.Write();
  EXPECT_TRUE(loop_->Run().ok());
}

TEST_F(EventLoopTest, AnInfiniteDelayIsForEver) {
  loop_->AddTimer(absl::InfiniteDuration(), [] { FAIL(); });
  loop_->AddTimer(absl::ZeroDuration(), [&] { loop_->Stop(); });
  EXPECT_TRUE(loop_->Run().ok());
}

TEST_F(EventLoopTest, RunsAgainAfterAStop) {
  for (int round = 0; round < 2; ++round) {
    loop_->AddTimer(absl::ZeroDuration(), [&] { loop_->Stop(); });
    EXPECT_TRUE(loop_->Run().ok());
  }
}

}  // namespace
}  // namespace ddp
