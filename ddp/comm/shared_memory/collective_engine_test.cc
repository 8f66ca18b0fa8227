#include "ddp/comm/shared_memory/collective_engine.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/kernels/reduce.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;
using ::testing::Each;
using ::testing::HasSubstr;
using Kind = CollectiveRequest::Kind;

constexpr absl::Duration kTimeout = absl::Seconds(60);

// One rank: a thread of the test.
struct Rank {
  // Calls `place`, unless it is null, before the engine looks at the group.
  Rank(GroupStore& store, int member, int size,
       const std::function<void(HostGroup&)>& place = nullptr) {
    auto entry = GroupEntry::Run(store, {.member = member, .size = size, .timeout = kTimeout});
    EXPECT_TRUE(entry.ok()) << entry.status();
    group = *std::move(entry);
    if (place) place(*group);
    engine = std::make_unique<CollectiveEngine>(group.get());
  }

  // Starts a collective and waits for its end.
  absl::Status Run(CollectiveRequest request, absl::Duration timeout = kTimeout) {
    std::atomic<bool> done = false;
    absl::Status result;
    engine->Start(std::move(request), timeout, [&](const absl::Status& status) {
      result = status;
      done = true;
    });
    engine->Drive([&] { return done.load(); }, MonotonicClock().Now() + 2 * kTimeout);
    EXPECT_TRUE(done);
    return result;
  }

  int member() const { return group->member(); }
  int size() const { return group->size(); }

  std::shared_ptr<HostGroup> group;
  std::unique_ptr<CollectiveEngine> engine;
};

// Runs `body` in each rank. No rank leaves before all bodies have returned.
void RunRanks(int size, const std::function<void(Rank&)>& body,
              const std::function<void(HostGroup&)>& place = nullptr) {
  FakeGroupStore store;
  std::latch done(size);
  RunThreads(size, [&](int member) {
    Rank rank(store, member, size, place);
    body(rank);
    done.arrive_and_wait();
  });
}

template <typename Value>
std::span<const std::byte> In(const std::vector<Value>& values) {
  return std::as_bytes(std::span(values));
}
template <typename Value>
std::span<std::byte> Out(std::vector<Value>& values) {
  return std::as_writable_bytes(std::span(values));
}

CollectiveRequest AllReduce(std::vector<float>& values) {
  return {.kind = Kind::kAllReduce,
          .type = ElementType::kFloat,
          .elements = values.size(),
          .inputs = {In(values)},
          .outputs = {Out(values)}};
}

class CollectiveEngineTest : public ::testing::TestWithParam<int> {};

TEST_P(CollectiveEngineTest, AllReduceSumsInEverySize) {
  RunRanks(GetParam(), [](Rank& rank) {
    // 4 floats go along with the announcement, 5 do not.
    for (const size_t count : {1, 3, 4, 5, 1000, 65'536, 65'537, 200'001}) {
      std::vector<float> values(count);
      std::iota(values.begin(), values.end(), static_cast<float>(rank.member()));
      ASSERT_TRUE(rank.Run(AllReduce(values)).ok());
      const auto size = static_cast<float>(rank.size());
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(values[i], size * static_cast<float>(i) + size * (size - 1) / 2) << i;
      }
    }
  });
}

// Sizes on both sides of those from which tensors are reduced where they lie. In the odd rounds one
// rank's tensor is in no arena.
TEST_P(CollectiveEngineTest, AllReduceWorksWhereTheTensorsLie) {
  constexpr size_t kMost = 300'007;
  Arena& arena = Arena::OfProcess();
  auto demand = arena.AddDemand(
      {.gradient_bytes = std::vector<size_t>(8, kMost * sizeof(float)), .capacity_bytes = 0});
  ASSERT_TRUE(demand.ok()) << demand.status();
  RunRanks(GetParam(), [&](Rank& rank) {
    auto* const block = static_cast<float*>(arena.Allocate(kMost * sizeof(float)));
    ASSERT_NE(block, nullptr);
    std::vector<float> elsewhere(kMost);
    for (const size_t count :
         {size_t{1'000}, size_t{1'024}, size_t{20'001}, size_t{65'536}, kMost}) {
      for (int round = 0; round < 4; ++round) {
        const bool outside = round % 2 == 1 && rank.member() == round / 2;
        const std::span values(outside ? elsewhere.data() : block, count);
        std::iota(values.begin(), values.end(), static_cast<float>(rank.member() + round));
        ASSERT_TRUE(rank.Run({.kind = Kind::kAllReduce,
                              .type = ElementType::kFloat,
                              .elements = count,
                              .inputs = {std::as_bytes(values)},
                              .outputs = {std::as_writable_bytes(values)}})
                        .ok());
        const auto size = static_cast<float>(rank.size());
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(values[i], size * static_cast<float>(i + round) + size * (size - 1) / 2) << i;
        }
      }
    }
    arena.Free(block);
  });
}

// Bits: the balanced tree over the ranks, whatever the NUMA nodes.
TEST(CollectiveEngineTest, RanksOfANumaNodeReduceAmongThemselvesFirst) {
  constexpr size_t kCount = 270'011;
  Arena& arena = Arena::OfProcess();
  auto demand = arena.AddDemand(
      {.gradient_bytes = std::vector<size_t>(24, kCount * sizeof(float)), .capacity_bytes = 0});
  ASSERT_TRUE(demand.ok()) << demand.status();
  for (const auto& [size, on_node] : {std::pair(16, 8), std::pair(24, 8)}) {
    std::vector<std::vector<float>> inputs(size, std::vector<float>(kCount));
    std::vector<const std::byte*> from;
    for (int member = 0; member < size; ++member) {
      std::mt19937 random(static_cast<unsigned>(member));
      std::normal_distribution<float> normal;
      for (float& value : inputs[member]) value = normal(random);
      from.push_back(In(inputs[member]).data());
    }
    std::vector<float> expected(kCount);
    std::byte* const to = Out(expected).data();
    ReduceTree(ReduceKind::kSum, ElementType::kFloat, from, {&to, 1}, kCount);
    std::latch placed(size);
    const auto place = [&, on_node = on_node](HostGroup& group) {
      group.segment().row(group.member()).numa_node = group.member() / on_node;
      placed.arrive_and_wait();
    };
    const auto body = [&, size = size](Rank& rank) {
      const std::span values(static_cast<float*>(arena.Allocate(kCount * sizeof(float))), kCount);
      ASSERT_NE(values.data(), nullptr);
      for (int round = 0; round < 3; ++round) {
        std::ranges::copy(inputs[rank.member()], values.begin());
        ASSERT_TRUE(rank.Run({.kind = Kind::kAllReduce,
                              .type = ElementType::kFloat,
                              .elements = kCount,
                              .inputs = {std::as_bytes(values)},
                              .outputs = {std::as_writable_bytes(values)}})
                        .ok());
        EXPECT_TRUE(std::ranges::equal(values, expected)) << size << " ranks, round " << round;
      }
      arena.Free(values.data());
    };
    RunRanks(size, body, place);
  }
}

// Return the parts of `values` for each of `size` members.
absl::InlinedVector<std::span<std::byte>, 2> PartsOf(std::vector<int64_t>& values, int size) {
  const size_t bytes = values.size() / size * sizeof(int64_t);
  absl::InlinedVector<std::span<std::byte>, 2> parts;
  for (int part = 0; part < size; ++part) parts.push_back(Out(values).subspan(part * bytes, bytes));
  return parts;
}
absl::InlinedVector<std::span<const std::byte>, 2> InputsOf(std::vector<int64_t>& values,
                                                            int size) {
  absl::InlinedVector<std::span<const std::byte>, 2> parts;
  for (const auto part : PartsOf(values, size)) parts.push_back(part);
  return parts;
}

TEST_P(CollectiveEngineTest, MovesDataInEveryWay) {
  RunRanks(GetParam(), [](Rank& rank) {
    const int size = rank.size();
    const int me = rank.member();
    for (const size_t count : {1, 1001, 100'003}) {
      std::vector<int64_t> mine(count, me + 1);
      std::vector<int64_t> all(count * size);
      ASSERT_TRUE(rank.Run({.kind = Kind::kAllGather,
                            .elements = count * 8,
                            .inputs = {In(mine)},
                            .outputs = PartsOf(all, size)})
                      .ok());
      for (int part = 0; part < size; ++part) ASSERT_EQ(all[(part + 1) * count - 1], part + 1);

      std::vector<int64_t> sum(count);
      ASSERT_TRUE(rank.Run({.kind = Kind::kReduceScatter,
                            .type = ElementType::kInt64,
                            .elements = count,
                            .inputs = InputsOf(all, size),
                            .outputs = {Out(sum)}})
                      .ok());
      ASSERT_THAT(sum, Each((me + 1) * size));

      for (int part = 0; part < size; ++part) {
        std::fill_n(all.begin() + part * count, count, 100 * me + part);
      }
      std::vector<int64_t> other(count * size);
      ASSERT_TRUE(rank.Run({.kind = Kind::kAllToAll,
                            .elements = count * 8,
                            .inputs = InputsOf(all, size),
                            .outputs = PartsOf(other, size)})
                      .ok());
      for (int part = 0; part < size; ++part) ASSERT_EQ(other[part * count], 100 * part + me);
    }
  });
}

TEST_P(CollectiveEngineTest, GathersInputsOfDifferentSizes) {
  RunRanks(GetParam(), [](Rank& rank) {
    // The longest needs several rounds; some are empty, and in one turn all are.
    for (const size_t unit : {0, 3, 200'001}) {
      const auto count_of = [&](int member) { return unit * static_cast<size_t>(member % 3); };
      const std::vector<int32_t> mine(count_of(rank.member()), rank.member());
      std::vector<std::vector<int32_t>> parts;
      const auto on_sizes = [&](const std::vector<size_t>& sizes) {
        std::vector<std::span<std::byte>> memory;
        for (const size_t size : sizes) parts.emplace_back(size / sizeof(int32_t));
        for (std::vector<int32_t>& part : parts) memory.push_back(Out(part));
        return memory;
      };
      ASSERT_TRUE(rank.Run({.kind = Kind::kAllGatherSized,
                            .tag = 7,
                            .inputs = {In(mine)},
                            .on_sizes = on_sizes})
                      .ok());
      ASSERT_EQ(parts.size(), static_cast<size_t>(rank.size()));
      for (int member = 0; member < rank.size(); ++member) {
        ASSERT_EQ(parts[member].size(), count_of(member));
        EXPECT_EQ(std::ranges::count(parts[member], member), count_of(member));
      }
    }
  });
}

TEST_P(CollectiveEngineTest, MovesDataFromARoot) {
  RunRanks(GetParam(), [](Rank& rank) {
    const int me = rank.member();
    const int root = rank.size() - 1;
    for (const size_t count : {1, 1001, 100'003}) {
      std::vector<int64_t> word(count, me == root ? 77 : 0);
      CollectiveRequest broadcast{.kind = Kind::kBroadcast, .root = root, .elements = count * 8};
      if (me == root) broadcast.inputs = {In(word)};
      if (me != root) broadcast.outputs = {Out(word)};
      ASSERT_TRUE(rank.Run(std::move(broadcast)).ok());
      ASSERT_THAT(word, Each(77));
      ASSERT_TRUE(rank.Run({.kind = Kind::kBarrier}).ok());
    }
  });
}

TEST_P(CollectiveEngineTest, MessagesOfDifferentTagsMayCrossEachOther) {
  RunRanks(GetParam(), [](Rank& rank) {
    const int to = (rank.member() + 1) % rank.size();
    const int from = (rank.member() + rank.size() - 1) % rank.size();
    if (to == rank.member()) return;
    std::atomic<int> done = 0;
    const auto count = [&](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      ++done;
    };
    std::vector<int> small(10, rank.member());
    std::vector<int> large(100'000, 1000 + rank.member());
    std::vector<int> got_small(10);
    std::vector<int> got_large(100'000);
    rank.engine->Send(to, 1, In(small), kTimeout, count);
    rank.engine->Send(to, 2, In(large), kTimeout, count);
    rank.engine->Receive(from, 2, Out(got_large), kTimeout, count);
    rank.engine->Receive(from, 1, Out(got_small), kTimeout, count);
    EXPECT_TRUE(rank.engine->Drive([&] { return done == 4; }, MonotonicClock().Now() + kTimeout));
    EXPECT_THAT(got_small, Each(from));
    EXPECT_THAT(got_large, Each(1000 + from));
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, CollectiveEngineTest, ::testing::Values(1, 2, 3, 4, 8));

TEST(CollectiveEngineTest, TheGroupsThreadCompletesWhatNobodyWaitsFor) {
  RunRanks(2, [](Rank& rank) {
    std::vector<float> values(100'000, 1);
    std::atomic<bool> done = false;
    rank.engine->Start(AllReduce(values), kTimeout, [&](const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      done = true;
      done.notify_all();
    });
    done.wait(false);
    EXPECT_THAT(values, Each(2));
  });
}

TEST(CollectiveEngineTest, SeveralMayBeUnderWay) {
  RunRanks(3, [](Rank& rank) {
    std::vector<std::vector<float>> values(20, std::vector<float>(30'000, 1));
    std::atomic<int> done = 0;
    for (auto& one : values) {
      rank.engine->Start(AllReduce(one), kTimeout, [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok()) << status;
        ++done;
      });
    }
    EXPECT_TRUE(rank.engine->Drive([&] { return done == 20; }, MonotonicClock().Now() + kTimeout));
    for (const auto& one : values) EXPECT_THAT(one, Each(3));
  });
}

TEST(CollectiveEngineTest, DifferentCollectivesFailOnAllRanks) {
  RunRanks(3, [](Rank& rank) {
    std::vector<float> values(rank.member() == 1 ? 10 : 11);
    const absl::Status status = rank.Run(AllReduce(values));
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(absl::IsInvalidArgument(status) || absl::IsAborted(status)) << status;
  });
}

TEST(CollectiveEngineTest, ATimeoutNamesTheRankThatDidNotCome) {
  RunRanks(3, [](Rank& rank) {
    if (rank.member() == 1) return;
    std::vector<float> values(10);
    const absl::Status status = rank.Run(AllReduce(values), absl::Milliseconds(50));
    EXPECT_FALSE(status.ok());
    if (absl::IsDeadlineExceeded(status)) {
      EXPECT_THAT(status.message(), HasSubstr("rank 1"));
    }
  });
}

TEST(CollectiveEngineTest, ARankThatHasLeftIsNotWaitedFor) {
  FakeGroupStore store;
  RunThreads(3, [&](int member) {
    Rank rank(store, member, 3);
    std::vector<float> values(10);
    EXPECT_TRUE(rank.Run(AllReduce(values)).ok());
    if (member == 1) return;
    const absl::Status status = rank.Run(AllReduce(values));
    // The other rank may have seen it first, and aborted.
    EXPECT_TRUE(absl::IsUnavailable(status) || absl::IsAborted(status)) << status;
  });
}

TEST(CollectiveEngineTest, AForkedChildLeavesTheGroupAlone) {
  FakeGroupStore store;
  std::latch forked(2);
  RunThreads(2, [&](int member) {
    Rank rank(store, member, 2);
    std::vector<float> values(10, 1);
    if (member == 0) {
      // The child's destructors run while an operation of the parent is not complete.
      std::atomic<bool> done = false;
      rank.engine->Start(AllReduce(values), kTimeout, [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok()) << status;
        done = true;
      });
      const pid_t child = ::fork();
      if (child == 0) {
        rank.engine.reset();
        rank.group.reset();
        ::_exit(0);
      }
      int result = -1;
      EXPECT_EQ(::waitpid(child, &result, 0), child);
      EXPECT_EQ(result, 0);
      forked.count_down();
      rank.engine->Drive([&] { return done.load(); }, MonotonicClock().Now() + kTimeout);
      EXPECT_TRUE(done);
    } else {
      forked.count_down();
      forked.wait();
      EXPECT_TRUE(rank.Run(AllReduce(values)).ok());
    }
    EXPECT_THAT(values, Each(2));
    EXPECT_TRUE(rank.Run({.kind = Kind::kBarrier}).ok());
    EXPECT_FALSE(rank.group->ended());
  });
}

}  // namespace
}  // namespace ddp::internal
