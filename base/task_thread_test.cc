#include "base/task_thread.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/detached_thread.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "testing/refused_calls.h"

namespace ddp {
namespace {

class TaskThreadTest : public ::testing::Test {
 protected:
  TaskThreadTest() : loop_(*EventLoop::Create()), thread_(*TaskThread::Create(loop_.get(), "it")) {
    std::array<int, 2> fds{};
    EXPECT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
    gate_ = std::make_shared<UniqueFd>(fds[0]);
    open_gate_.reset(fds[1]);
    loop_->AddTimer(absl::Seconds(60), [] {
      ADD_FAILURE() << "the test did not end";
      abort();
    });
  }

  // Returns a task that ends when open_gate_ is closed.
  std::function<void()> Stalled() {
    return [gate = gate_] {
      char byte = 0;
      (void)!::read(gate->get(), &byte, 1);
    };
  }

  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<TaskThread> thread_;
  std::shared_ptr<UniqueFd> gate_;
  UniqueFd open_gate_;
};

TEST_F(TaskThreadTest, TasksRunInOrderOnANamedThreadAndEndOnTheLoop) {
  const auto order = std::make_shared<std::vector<int>>();
  std::vector<int> done;
  const auto name = std::make_shared<std::string>(16, '\0');
  const auto here = std::this_thread::get_id();
  for (int i = 0; i < 100; ++i) {
    thread_->Run(
        [order, name, i] {
          order->push_back(i);
          ::prctl(PR_GET_NAME, name->data());
        },
        [&, i] {
          EXPECT_EQ(std::this_thread::get_id(), here);
          done.push_back(i);
          if (i == 99) loop_->Stop();
        });
  }
  EXPECT_EQ(thread_->pending(), 100U);
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(thread_->pending(), 0U);
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ((*order)[i], i);
    EXPECT_EQ(done[i], i);
  }
  EXPECT_STREQ(name->c_str(), "it");
}

TEST_F(TaskThreadTest, TheLoopGoesOnWhileATaskIsStalled) {
  int ticks = 0;
  std::function<void()> tick = [&] {
    if (++ticks == 20) return open_gate_.reset();
    loop_->AddTimer(absl::Milliseconds(1), tick);
  };
  thread_->Run(Stalled(), [&] { loop_->Stop(); });
  tick();
  ASSERT_TRUE(loop_->Run().ok());
  EXPECT_EQ(ticks, 20);
}

TEST_F(TaskThreadTest, WithoutAThreadATaskRunsInTheCaller) {
  bool refused = false;
  std::thread([&] {
    refused = testing::RefuseCalls({{SYS_clone3, EPERM}});
    if (!refused) return;
    const absl::Status started = StartDetachedThread("it", [] {});
    EXPECT_EQ(started.message(),
              "cannot start a thread: pthread_create: Operation not permitted (a filter of system "
              "calls may refuse clone3)");
    std::thread::id ran_in;
    thread_->Run([&] { ran_in = std::this_thread::get_id(); }, nullptr);
    EXPECT_EQ(ran_in, std::this_thread::get_id());
  }).join();
  if (!refused) GTEST_SKIP() << "filters of system calls are not allowed here";
}

TEST_F(TaskThreadTest, TheDestructorWaitsForNothing) {
  const auto ran = std::make_shared<bool>(false);
  bool done = false;
  thread_->Run(Stalled(), [&] { done = true; });
  thread_->Run([ran] { *ran = true; }, nullptr);
  thread_.reset();
  const std::weak_ptr<UniqueFd> held = gate_;
  gate_.reset();
  open_gate_.reset();
  while (!held.expired()) std::this_thread::yield();  // the thread has dropped its task
  EXPECT_FALSE(*ran);
  EXPECT_FALSE(done);
}

TEST_F(TaskThreadTest, EndsCanBeTakenWithoutTheLoop) {
  int done = 0;
  thread_->Run([] {}, [&] { ++done; });
  pollfd polled{.fd = thread_->fd(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&polled, 1, 60'000), 1);
  thread_->Dispatch();
  EXPECT_EQ(done, 1);
}

TEST_F(TaskThreadTest, DoneMayDestroyTheThread) {
  thread_->Run([] {},
               [&] {
                 thread_.reset();
                 loop_->Stop();
               });
  thread_->Run([] {}, [] { FAIL() << "the thread is gone"; });
  ASSERT_TRUE(loop_->Run().ok());
}

}  // namespace
}  // namespace ddp
