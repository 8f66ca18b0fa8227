#include "ddp/optim/peer_memory.h"

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;
using ::testing::Each;

constexpr int64_t kFloats = 300'000;  // more than one piece
constexpr int64_t kBytes = kFloats * sizeof(float);
constexpr auto kFew = absl::Milliseconds(5);

// The state that the ranks of a case share. They are threads of the test.
struct Meeting {
  explicit Meeting(int size) : places(size), barrier(size) {}

  FakeGroupStore store;
  std::vector<PeerMemory::Places> places;
  std::barrier<> barrier;
};

// A rank with one parameter in the arena.
struct Rank {
  Rank(Meeting& meeting, int member, int size) : meeting(meeting) {
    auto entry = GroupEntry::Run(meeting.store,
                                 {.member = member, .size = size, .timeout = absl::Minutes(1)});
    EXPECT_TRUE(entry.ok()) << entry.status();
    group = *std::move(entry);
    Arena& arena = Arena::OfProcess();
    auto added = arena.AddDemand({.gradient_bytes = {Arena::kSmallestBlock, kBytes}});
    EXPECT_TRUE(added.ok()) << added.status();
    demand.emplace(*std::move(added));
    auto* const mark = static_cast<std::byte*>(arena.Allocate(Arena::kSmallestBlock));
    values = static_cast<float*>(arena.Allocate(kBytes));
    std::memset(mark, 0, sizeof(uint64_t));
    std::fill_n(values, kFloats, -1.0F);
    meeting.places[member] = {.mark = mark - arena.base(),
                              .parameters = {reinterpret_cast<std::byte*>(values) - arena.base()}};
  }
  // All ranks have finished with the memory.
  ~Rank() {
    Arena& arena = Arena::OfProcess();
    arena.Free(arena.base() + meeting.places[group->member()].mark);
    arena.Free(values);
  }

  PeerMemory Publish() {
    PeerMemory memory(group, meeting.places[group->member()].mark);
    Meet();
    memory.Connect(meeting.places, {kBytes});
    return memory;
  }
  void Meet() { meeting.barrier.arrive_and_wait(); }
  std::vector<float> Values() const { return {values, values + kFloats}; }

  Meeting& meeting;
  std::shared_ptr<HostGroup> group;
  std::optional<ArenaDemand> demand;
  float* values = nullptr;
};

void RunRanks(int size, const std::function<void(Rank&, int member)>& body) {
  Meeting meeting(size);
  RunThreads(size, [&](int member) {
    Rank rank(meeting, member, size);
    body(rank, member);
    rank.Meet();
  });
}

TEST(PeerMemoryTest, EveryRankGetsThePartsOfAllOthers) {
  for (const int size : {2, 3}) {
    RunRanks(size, [size](Rank& rank, int member) {
      PeerMemory memory = rank.Publish();
      ASSERT_TRUE(memory.Reaches(0));
      const int64_t part = kFloats / size;
      for (const int step : {1, 2}) {
        EXPECT_FALSE(memory.written());
        rank.Meet();
        memory.Begin();
        float* const mine = rank.values + member * part;
        std::fill_n(mine, part, static_cast<float>(10 * step + member));
        EXPECT_TRUE(memory.Write(0, member * part * 4, std::as_bytes(std::span(mine, part))));
        rank.Meet();
        EXPECT_TRUE(memory.written());
        memory.Complete();
        for (int owner = 0; owner < size; ++owner) {
          const float* const begin = rank.values + owner * part;
          EXPECT_THAT(std::vector<float>(begin, begin + part), Each(10 * step + owner));
        }
        rank.Meet();
      }
    });
  }
}

TEST(PeerMemoryTest, AParameterElsewhereIsReachedByNoRank) {
  RunRanks(3, [](Rank& rank, int member) {
    if (member == 1) rank.meeting.places[1].parameters[0] = PeerMemory::kElsewhere;
    EXPECT_FALSE(rank.Publish().Reaches(0));
  });
}

TEST(PeerMemoryTest, NothingIsReachedWithoutAMark) {
  RunRanks(2, [](Rank& rank, int member) {
    const int64_t mark = rank.meeting.places[member].mark;
    if (member == 1) rank.meeting.places[1].mark = PeerMemory::kElsewhere;
    PeerMemory memory = rank.Publish();
    EXPECT_FALSE(memory.Reaches(0));
    EXPECT_FALSE(memory.written());
    rank.Meet();
    rank.meeting.places[member].mark = mark;
  });
}

TEST(PeerMemoryTest, AnEndedGroupWritesNothing) {
  RunRanks(2, [](Rank& rank, int member) {
    PeerMemory memory = rank.Publish();
    memory.Begin();
    if (member == 1) {
      EXPECT_TRUE(memory.Abandon(kFew));
    }
    rank.Meet();
    if (member == 0) {
      const std::vector<float> ones(kFloats, 1);
      EXPECT_FALSE(memory.Write(0, 0, std::as_bytes(std::span(ones))));
    }
    rank.Meet();
    EXPECT_THAT(rank.Values(), Each(-1));
    EXPECT_FALSE(memory.written());
  });
}

// A rank whose own step has not begun knows that a peer has changed its parameters.
TEST(PeerMemoryTest, ARankKnowsOfAWriteBeforeItsOwnStep) {
  RunRanks(2, [](Rank& rank, int member) {
    PeerMemory memory = rank.Publish();
    if (member == 0) {
      memory.Begin();
      const float one = 1;
      EXPECT_TRUE(memory.Write(0, 0, std::as_bytes(std::span(&one, 1))));
    }
    rank.Meet();
    EXPECT_EQ(memory.written(), member == 1);
    EXPECT_EQ(rank.values[0], member == 1 ? 1 : -1);
  });
}

// A rank whose exchange of the places has failed, while a peer's has not.
TEST(PeerMemoryTest, ARankKnowsOfAWriteBeforeItIsConnected) {
  RunRanks(2, [](Rank& rank, int member) {
    PeerMemory memory(rank.group, rank.meeting.places[member].mark);
    EXPECT_FALSE(memory.Reaches(0));
    rank.Meet();
    if (member == 0) {
      memory.Connect(rank.meeting.places, {kBytes});
      memory.Begin();
      const float one = 1;
      EXPECT_TRUE(memory.Write(0, 0, std::as_bytes(std::span(&one, 1))));
    }
    rank.Meet();
    EXPECT_EQ(memory.written(), member == 1);
    if (member == 1) {
      EXPECT_TRUE(memory.Abandon(kFew));
    }
    rank.Meet();
    // A new exchange begins with a clear mark.
    EXPECT_FALSE(PeerMemory(rank.group, rank.meeting.places[member].mark).written());
  });
}

TEST(PeerMemoryTest, APeerThatStopsInAPieceIsWaitedFor) {
  RunRanks(2, [](Rank& rank, int member) {
    PeerMemory memory = rank.Publish();
    if (member == 1) {
      EXPECT_TRUE(rank.group->BeginTouch());
    }
    rank.Meet();
    if (member == 0) {
      EXPECT_FALSE(memory.Abandon(kFew));
    }
    rank.Meet();
    if (member == 1) rank.group->EndTouch();
    rank.Meet();
    EXPECT_TRUE(memory.Abandon(kFew));
  });
}

}  // namespace
}  // namespace ddp::internal
