#include "ddp/comm/message_thread.h"

#include <filesystem>
#include <iterator>
#include <memory>
#include <thread>
#include <vector>

#include <ATen/core/ivalue.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/comm/backend/gloo_backend.h"
#include "ddp/comm/point_to_point.h"
#include "ddp/comm/reports/wake_signal.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

constexpr absl::Duration kDeadline = absl::Seconds(60);

// Two ranks in this process, over LibTorch's Gloo.
class MessageThreadTest : public ::testing::Test {
 protected:
  MessageThreadTest() {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto connect = [&](int rank) {
      ranks_[rank] = MakeGlooBackend(
          store, {.rank = rank, .size = 2, .timeout = kDeadline, .single_host = true});
    };
    std::thread peer([&] { connect(1); });
    connect(0);
    peer.join();
  }

  BackendPtr ranks_[2];
};

int Threads() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<int>(std::distance(begin(tasks), end(tasks)));
}

// Waits as a Communicator does.
void Await(PointToPoint& rank, const WorkFuture& future) {
  const auto signal = std::make_shared<WakeSignal>();
  future->addCallback([signal](c10::ivalue::Future&) { signal->Notify(); });
  const absl::Time end = MonotonicClock().Now() + kDeadline;
  while (!future->completed() && MonotonicClock().Now() < end) {
    (void)rank.thread()->Hurry(future);
    signal->Wait([&] { return future->completed(); }, absl::Milliseconds(2));
  }
  ASSERT_TRUE(future->completed());
  future->waitAndThrow();
}

TEST_F(MessageThreadTest, OneThreadCompletesMessagesInAnyOrder) {
  constexpr int kMessages = 50;
  PointToPoint receiver(ranks_[0], /*matches_tags=*/true);
  PointToPoint sender(ranks_[1], /*matches_tags=*/true);
  std::vector<at::Tensor> received;
  std::vector<WorkFuture> receives;
  const int before = Threads();
  for (int tag = 0; tag < kMessages; ++tag) {
    received.push_back(at::zeros({3}));
    receives.push_back(receiver.Receive(received[tag], 1, tag).future);
  }
  EXPECT_EQ(Threads(), before + 1);
  for (int tag = kMessages - 1; tag >= 0; --tag) {
    const WorkFuture sent = sender.Send(at::full({3}, static_cast<float>(tag)), 0, tag).future;
    Await(receiver, receives[tag]);
    Await(sender, sent);
    EXPECT_EQ(received[tag].sum().item<float>(), 3 * tag);
  }
}

// The thread waits for the first message, which never comes until the second one has had its turn.
TEST_F(MessageThreadTest, WhatFollowsFromAMessageGetsItsTurn) {
  PointToPoint receiver(ranks_[0], /*matches_tags=*/true);
  PointToPoint sender(ranks_[1], /*matches_tags=*/true);
  const at::Tensor first = at::zeros({1});
  const at::Tensor second = at::zeros({1});
  const WorkFuture late = receiver.Receive(first, 1, 0).future;
  const WorkFuture after = Then(receiver.Receive(second, 1, 1).future, nullptr, {second});
  const WorkFuture sent = sender.Send(at::full({1}, 2.0F), 0, 1).future;
  Await(receiver, after);
  EXPECT_FALSE(late->completed());
  EXPECT_EQ(second.item<float>(), 2);
  const WorkFuture last = sender.Send(at::full({1}, 1.0F), 0, 0).future;
  Await(receiver, late);
  Await(sender, sent);
  Await(sender, last);
  EXPECT_EQ(first.item<float>(), 1);
}

// Gloo would end the process for a message that is longer than its receiver expects.
TEST_F(MessageThreadTest, AMessageOfAnotherSizeEndsWithItsHeader) {
  PointToPoint receiver(ranks_[0], /*matches_tags=*/true);
  PointToPoint sender(ranks_[1], /*matches_tags=*/true);
  const WorkFuture received = receiver.Receive(at::zeros({2}), 1, 0).future;
  (void)sender.Send(at::zeros({3}), 0, 0);
  EXPECT_THAT([&] { Await(receiver, received); },
              ::testing::ThrowsMessage<std::exception>(
                  ::testing::HasSubstr("rank 1 sends 3 elements of Float")));
}

}  // namespace
}  // namespace ddp::internal
