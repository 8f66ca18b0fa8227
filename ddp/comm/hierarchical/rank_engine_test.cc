#include "ddp/comm/hierarchical/rank_engine.h"

#include <functional>
#include <latch>
#include <memory>
#include <span>
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
#include "testing/backend/test_wire.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;
using ::ddp::testing::Wire;
using ::ddp::testing::WireLink;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = CollectiveRequest::Kind;

constexpr absl::Duration kTimeout = absl::Seconds(60);
constexpr RankRange kHosts[] = {{0, 2}, {2, 3}};

// The engine of one rank, and what it works with.
struct Rank {
  Rank(std::shared_ptr<HostGroup> group, std::span<const RankRange> hosts, int rank, Wire* wire)
      : rank(rank),
        group(std::move(group)),
        wire(wire),
        engine(std::make_unique<RankEngine>(
            HostLayout({hosts.begin(), hosts.end()}, rank), this->group,
            hosts.size() == 1 ? nullptr : std::make_unique<WireLink>(wire, rank),
            HierarchicalEngine::Options())) {}

  ~Rank() {
    if (engine) engine->Leave();
  }

  // Starts a collective that all ranks call with the same `number`.
  std::shared_ptr<std::latch> Start(int number, absl::Status* status) {
    return Start({.kind = Kind::kAllReduce, .elements = static_cast<uint64_t>(number)}, status);
  }
  std::shared_ptr<std::latch> Start(CollectiveRequest request, absl::Status* status) {
    auto done = std::make_shared<std::latch>(1);
    engine->Start(std::move(request), kTimeout, [done, status](const absl::Status& result) {
      *status = result;
      done->count_down();
    });
    return done;
  }

  absl::Status RunOne(int number) {
    absl::Status status;
    Start(number, &status)->wait();
    return status;
  }

  const int rank;
  const std::shared_ptr<HostGroup> group;
  Wire* const wire;
  std::unique_ptr<RankEngine> engine;
};

// A collective whose `on_sizes` is a function of the test.
CollectiveRequest Sized(std::function<void()> run) {
  return {.kind = Kind::kAllGatherSized,
          .on_sizes = [run = std::move(run)](const std::vector<size_t>& sizes) {
            run();
            return std::vector<std::span<std::byte>>(sizes.size());
          }};
}

// Runs `body` in each rank. No rank leaves before all bodies have returned.
void RunRanks(std::span<const RankRange> hosts, const std::function<void(Rank&)>& body) {
  const int size = hosts.back().end;
  std::vector<FakeGroupStore> stores(hosts.size());
  Wire wire;
  std::latch done(size);
  RunThreads(size, [&](int number) {
    const HostLayout layout({hosts.begin(), hosts.end()}, number);
    auto entry = GroupEntry::Run(
        stores[layout.host()],
        {.member = layout.member(), .size = layout.local().size(), .timeout = kTimeout});
    ASSERT_TRUE(entry.ok()) << entry.status();
    Rank rank(*std::move(entry), hosts, number, &wire);
    body(rank);
    done.arrive_and_wait();
  });
}

TEST(RankEngineTest, OnOneHostTheWaitingThreadDoesTheWork) {
  const RankRange host[] = {{0, 2}};
  RunRanks(host, [](Rank& self) {
    int32_t value = self.rank + 1;
    const auto bytes = std::as_writable_bytes(std::span(&value, 1));
    absl::Status status;
    const auto done = self.Start({.kind = Kind::kAllReduce,
                                  .type = ElementType::kInt32,
                                  .elements = 1,
                                  .inputs = {bytes},
                                  .outputs = {bytes}},
                                 &status);
    EXPECT_TRUE(self.engine->Drive([&] { return done->try_wait(); }, absl::InfiniteFuture()));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(value, 3);
    EXPECT_TRUE(self.engine->has_one_host());
  });
}

TEST(RankEngineTest, AWaitEndsWithTheCollectiveOrItsTime) {
  RunRanks(kHosts, [](Rank& self) {
    EXPECT_FALSE(self.engine->Drive([] { return false; }, MonotonicClock().Now()));
    absl::Status status;
    const auto done = self.Start(1, &status);
    EXPECT_TRUE(self.engine->Drive([&] { return done->try_wait(); }, absl::InfiniteFuture()));
    EXPECT_TRUE(status.ok()) << status;
  });
}

// An exception in the thread does not end the process: the collective fails on all ranks.
TEST(RankEngineTest, ACollectiveThatThrowsFails) {
  RunRanks(kHosts, [](Rank& self) {
    absl::Status status;
    const auto run = [&] {
      if (self.rank == 1) throw std::runtime_error("no memory for the tensor");
    };
    self.Start(Sized(run), &status)->wait();
    if (self.rank == 1) {
      EXPECT_EQ(status.message(), "no memory for the tensor");
    }
    const absl::Status next = self.RunOne(2);
    EXPECT_FALSE(next.ok());
    if (self.rank == 1) {
      EXPECT_EQ(next, status);
    }
    self.wire->AwaitClosed();
    if (self.rank < 2) {
      EXPECT_TRUE(self.group->ended());
    }
  });
}

TEST(RankEngineTest, CollectivesRunInTheirOrder) {
  RunRanks(kHosts, [](Rank& self) {
    std::vector<int> order;
    absl::Status first, second;
    self.Start(Sized([&] { order.push_back(1); }), &first);
    self.Start(Sized([&] { order.push_back(2); }), &second)->wait();
    EXPECT_TRUE(first.ok()) << first;
    EXPECT_TRUE(second.ok()) << second;
    EXPECT_THAT(order, ElementsAre(1, 2));
    EXPECT_FALSE(self.wire->closed());
  });
}

// The memory that a collective holds is free when its waiter continues.
TEST(RankEngineTest, TheRequestIsGoneBeforeTheEndIsReported) {
  RunRanks(kHosts, [](Rank& self) {
    auto held = std::make_shared<int>(7);
    const std::weak_ptr<int> watched = held;
    bool gone = false;
    std::latch done(1);
    self.engine->Start(Sized([held = std::move(held)] {}), kTimeout, [&](const absl::Status&) {
      gone = watched.expired();
      done.count_down();
    });
    done.wait();
    EXPECT_TRUE(gone);
  });
}

TEST(RankEngineTest, AMismatchLeavesTheConnectionsOpen) {
  RunRanks(kHosts, [](Rank& self) {
    const absl::Status status = self.RunOne(10 + self.rank);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 has started another collective"));
    EXPECT_FALSE(self.wire->closed());
    EXPECT_EQ(self.RunOne(3), status);
  });
}

// Without a collective in progress, too: the ranks of other hosts may wait for this rank.
TEST(RankEngineTest, TheEndOfTheGroupClosesTheConnections) {
  RunRanks(kHosts, [](Rank& self) {
    if (self.rank == 1) self.group->Abort();
    self.wire->AwaitClosed();
  });
}

// The reader of the status looks for the cause elsewhere.
TEST(RankEngineTest, ARankWhosePeerGivesUpHasLostItsConnection) {
  RunRanks(kHosts, [](Rank& self) {
    if (self.rank == 1) return self.group->Abort();
    if (self.rank == 2) return;
    const absl::Status status = self.RunOne(1);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  });
}

TEST(RankEngineTest, AnAbortFailsWhatWaits) {
  RunRanks(kHosts, [](Rank& self) {
    if (self.rank > 0) return self.wire->AwaitClosed();
    absl::Status first, second;
    const auto first_done = self.Start(1, &first);
    const auto second_done = self.Start(2, &second);
    EXPECT_TRUE(self.engine->Abort());
    EXPECT_TRUE(first_done->try_wait());
    EXPECT_TRUE(second_done->try_wait());
    EXPECT_FALSE(first.ok());
    EXPECT_FALSE(second.ok());
    EXPECT_EQ(self.RunOne(3).code(), absl::StatusCode::kCancelled);
  });
}

TEST(RankEngineTest, AnIdleRankLeavesWithoutAnEndOfTheGroup) {
  std::latch idle(3);
  RunRanks(kHosts, [&](Rank& self) {
    EXPECT_TRUE(self.RunOne(1).ok());
    idle.arrive_and_wait();
    EXPECT_TRUE(self.engine->Abort());
    EXPECT_TRUE(self.wire->closed());
    EXPECT_FALSE(self.group->ended());
  });
}

TEST(RankEngineTest, ARankThatLeavesFailsWhatWaits) {
  RunRanks(kHosts, [](Rank& self) {
    if (self.rank > 0) return self.wire->AwaitClosed();
    absl::Status status;
    const auto done = self.Start(1, &status);
    self.engine->Leave();
    EXPECT_TRUE(done->try_wait());
    EXPECT_FALSE(status.ok());
  });
}

}  // namespace
}  // namespace ddp::internal
