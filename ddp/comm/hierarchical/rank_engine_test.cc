#include "ddp/comm/hierarchical/collective_queue.h"

#include <atomic>
#include <functional>
#include <latch>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "ddp/comm/hierarchical/hierarchical_engine.h"
#include "ddp/comm/hierarchical/host_layout.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/shared_memory/collective_engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Seconds(60);

// The queue of one rank, and what it works with.
struct Rank {
  Rank(GroupEntry::Result entry, int rank, int size)
      : rank(rank),
        group(std::move(entry)),
        local(&group),
        engine(HostLayout({{0, size}}, rank), &local, nullptr, {}),
        queue(std::make_unique<CollectiveQueue>(CollectiveQueue::Parts{
            .group = &group, .local = &local, .engine = &engine, .close_connections = [this] {
              Close();
            }})) {}

  void Close() {
    if (!closing.exchange(true)) closed.count_down();
  }

  // Starts a collective that all ranks call with the same `number`.
  std::shared_ptr<std::latch> Push(
      int number, absl::Status* status,
      std::function<absl::Status()> run = [] { return absl::OkStatus(); }) {
    auto done = std::make_shared<std::latch>(1);
    queue->Push({.header = {.elements = static_cast<uint64_t>(number)},
                 .deadline = MonotonicClock().Now() + kTimeout,
                 .run = [run = std::move(run)](absl::Time) { return run(); },
                 .done =
                     [done, status](const absl::Status& result) {
                       *status = result;
                       done->count_down();
                     }});
    return done;
  }

  absl::Status RunOne(int number) {
    absl::Status status;
    Push(number, &status)->wait();
    return status;
  }

  const int rank;
  std::atomic<bool> closing = false;
  std::latch closed{1};
  HostGroup group;
  CollectiveEngine local;
  HierarchicalEngine engine;
  std::unique_ptr<CollectiveQueue> queue;
};

// Runs `body` in each rank of one host. No rank leaves before all bodies have returned.
void RunRanks(int size, const std::function<void(Rank&)>& body) {
  FakeGroupStore store;
  std::latch done(size);
  RunThreads(size, [&](int member) {
    auto entry = GroupEntry::Run(store, {.member = member, .size = size, .timeout = kTimeout});
    ASSERT_TRUE(entry.ok()) << entry.status();
    Rank rank(*std::move(entry), member, size);
    body(rank);
    done.arrive_and_wait();
  });
}

// An exception in the thread does not end the process: the collective fails on all ranks.
TEST(CollectiveQueueTest, ACollectiveThatThrowsFails) {
  RunRanks(2, [](Rank& self) {
    absl::Status status;
    const auto run = [&]() -> absl::Status {
      if (self.rank == 1) throw std::runtime_error("no memory for the tensor");
      return absl::OkStatus();
    };
    self.Push(1, &status, run)->wait();
    EXPECT_EQ(status.message(), self.rank == 1 ? "no memory for the tensor" : "");
    EXPECT_FALSE(self.RunOne(2).ok());
  });
}

TEST(CollectiveQueueTest, CollectivesRunInTheirOrder) {
  RunRanks(2, [](Rank& self) {
    std::vector<int> order;
    absl::Status first, second;
    self.Push(1, &first, [&] {
      order.push_back(1);
      return absl::OkStatus();
    });
    self.Push(2, &second,
              [&] {
                order.push_back(2);
                return absl::OkStatus();
              })
        ->wait();
    EXPECT_TRUE(first.ok()) << first;
    EXPECT_TRUE(second.ok()) << second;
    EXPECT_THAT(order, ElementsAre(1, 2));
    EXPECT_FALSE(self.closing);
  });
}

// The memory that a collective holds is free when its waiter continues.
TEST(CollectiveQueueTest, TheFunctionIsGoneBeforeTheEndIsReported) {
  RunRanks(2, [](Rank& self) {
    auto held = std::make_shared<int>(7);
    const std::weak_ptr<int> watched = held;
    bool gone = false;
    std::latch done(1);
    self.queue->Push({.deadline = MonotonicClock().Now() + kTimeout,
                      .run = [held = std::move(held)](absl::Time) { return absl::OkStatus(); },
                      .done =
                          [&](const absl::Status&) {
                            gone = watched.expired();
                            done.count_down();
                          }});
    done.wait();
    EXPECT_TRUE(gone);
  });
}

TEST(CollectiveQueueTest, AFailureEndsTheQueuesOfAllRanks) {
  RunRanks(2, [](Rank& self) {
    absl::Status status;
    self.Push(1, &status, [&] {
      return self.rank == 0 ? absl::UnavailableError("the link is cut") : absl::OkStatus();
    });
    const absl::Status next = self.RunOne(2);
    if (self.rank == 0) {
      EXPECT_EQ(status, absl::UnavailableError("the link is cut"));
      EXPECT_EQ(next, status);
    } else {
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(next.code(), absl::StatusCode::kUnavailable) << next;
    }
    self.closed.wait();
    EXPECT_TRUE(self.group.ended());
  });
}

TEST(CollectiveQueueTest, AMismatchLeavesTheConnectionsOpen) {
  RunRanks(2, [](Rank& self) {
    const absl::Status status = self.RunOne(10 + self.rank);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 has started another collective"));
    EXPECT_FALSE(self.closing);
    EXPECT_EQ(self.RunOne(3), status);
  });
}

// Without a collective in progress, too: the ranks of other hosts may wait for this rank.
TEST(CollectiveQueueTest, TheEndOfTheGroupClosesTheConnections) {
  RunRanks(2, [](Rank& self) {
    if (self.rank == 1) return self.group.Abort();
    self.closed.wait();
    EXPECT_TRUE(self.group.ended());
  });
}

TEST(CollectiveQueueTest, AnAbortFailsWhatWaits) {
  RunRanks(2, [](Rank& self) {
    if (self.rank == 1) return self.closed.wait();
    absl::Status first, second;
    const auto first_done = self.Push(1, &first);
    const auto second_done = self.Push(2, &second);
    EXPECT_TRUE(self.queue->Abort());
    EXPECT_TRUE(first_done->try_wait());
    EXPECT_TRUE(second_done->try_wait());
    EXPECT_FALSE(first.ok());
    EXPECT_FALSE(second.ok());
    EXPECT_EQ(self.RunOne(3).code(), absl::StatusCode::kCancelled);
  });
}

TEST(CollectiveQueueTest, AnIdleRankLeavesWithoutAnEndOfTheGroup) {
  RunRanks(2, [](Rank& self) {
    EXPECT_TRUE(self.RunOne(1).ok());
    EXPECT_TRUE(self.queue->Abort());
    EXPECT_TRUE(self.closing);
    EXPECT_FALSE(self.group.ended());
  });
}

TEST(CollectiveQueueTest, TheDestructorFailsWhatWaits) {
  RunRanks(2, [](Rank& self) {
    if (self.rank == 1) return self.closed.wait();
    absl::Status status;
    const auto done = self.Push(1, &status);
    self.queue.reset();
    EXPECT_TRUE(done->try_wait());
    EXPECT_FALSE(status.ok());
  });
}

}  // namespace
}  // namespace ddp::internal
