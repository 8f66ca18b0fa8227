#ifndef DDP_TESTING_LOOP_THREAD_H_
#define DDP_TESTING_LOOP_THREAD_H_

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <thread>

#include "base/event_loop.h"
#include "base/unique_fd.h"

namespace ddp::testing {

// Runs an event loop on its own thread while this object lives. A test makes all objects that use
// the loop before this object, and does not use them while this object lives.
class LoopThread {
 public:
  // `loop` is not owned and must outlive the thread.
  explicit LoopThread(EventLoop* loop) : loop_(loop), stop_(eventfd(0, EFD_CLOEXEC)) {
    EXPECT_TRUE(loop_->Watch(stop_.get(), EPOLLIN, [this](uint32_t) { loop_->Stop(); }).ok());
    thread_ = std::thread([this] { EXPECT_TRUE(loop_->Run().ok()); });
  }
  ~LoopThread() {
    const uint64_t one = 1;
    EXPECT_EQ(write(stop_.get(), &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
    thread_.join();
    loop_->Unwatch(stop_.get());
  }
  LoopThread(const LoopThread&) = delete;
  LoopThread& operator=(const LoopThread&) = delete;

 private:
  EventLoop* const loop_;
  const UniqueFd stop_;
  std::thread thread_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_LOOP_THREAD_H_
