#include "ddp/comm/shared_memory/in_place_channel.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <functional>
#include <latch>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include <glog/logging.h>

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
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr absl::Duration kTimeout = absl::Seconds(60);
constexpr size_t kCounts[] = {5'000, 100'003, 4'096, 300'000};
constexpr size_t kSmall = 1'001;

// One rank: a thread of the test, with a channel of four large arrays and some packed numbers.
struct Rank {
  std::shared_ptr<HostGroup> group;
  std::unique_ptr<InPlaceChannel> channel;
  std::vector<int64_t>* places = nullptr;  // of the channels of all ranks
  std::barrier<>* meet = nullptr;

  std::unique_ptr<InPlaceChannel> Make(const InPlaceChannel::Layout& layout) const {
    auto made = InPlaceChannel::Make(group, layout);
    CHECK(made.ok()) << made.status();
    (*places)[member()] = (*made)->place();
    meet->arrive_and_wait();
    EXPECT_TRUE((*made)->Connect(*places).ok());
    meet->arrive_and_wait();
    return *std::move(made);
  }

  int member() const { return group->member(); }
  int size() const { return group->size(); }

  // Waits until the pass is complete or the group has ended. Returns true when it is complete.
  bool Complete() const {
    channel->Finish();
    const int64_t deadline = MonotonicNanoseconds() + absl::ToInt64Nanoseconds(kTimeout);
    return group->Wait([&] { return channel->Advance(); }, [] { return false; }, deadline);
  }
};

class Blocks {
 public:
  Blocks() {
    for (const size_t count : kCounts) blocks_.push_back(New(count));
  }
  ~Blocks() {
    for (float* const block : blocks_) Arena::OfProcess().Free(block);
  }
  float* operator[](int array) const { return blocks_[array]; }
  uint64_t OffsetOf(int array) const {
    return static_cast<uint64_t>(reinterpret_cast<std::byte*>(blocks_[array]) -
                                 Arena::OfProcess().base());
  }

 private:
  static float* New(size_t count) {
    auto* const block = static_cast<float*>(Arena::OfProcess().Allocate(count * sizeof(float)));
    CHECK(block != nullptr);
    return block;
  }

  std::vector<float*> blocks_;
};

class InPlaceChannelTest : public ::testing::TestWithParam<int> {
 protected:
  InPlaceChannelTest() {
    Arena::DemandOptions wanted;
    for (const size_t count : kCounts) {
      for (int rank = 0; rank < GetParam(); ++rank) {
        wanted.gradient_bytes.push_back(count * sizeof(float));
      }
    }
    auto demand = Arena::OfProcess().AddDemand(wanted);
    EXPECT_TRUE(demand.ok()) << demand.status();
    demand_ = std::make_unique<ArenaDemand>(*std::move(demand));
  }

  // Runs `body` in each rank. No rank leaves before all bodies have returned.
  void RunRanks(const std::function<void(Rank&)>& body) const {
    FakeGroupStore store;
    std::latch done(GetParam());
    std::vector<int64_t> places(GetParam());
    std::barrier<> meet(GetParam());
    RunThreads(GetParam(), [&](int member) {
      auto entry =
          GroupEntry::Run(store, {.member = member, .size = GetParam(), .timeout = kTimeout});
      ASSERT_TRUE(entry.ok()) << entry.status();
      Rank rank{.group = *std::move(entry), .channel = nullptr, .places = &places, .meet = &meet};
      InPlaceChannel::Layout layout{.small_floats = kSmall, .small_doubles = kSmall};
      for (const size_t count : kCounts) layout.large.push_back({.count = count});
      rank.channel = rank.Make(layout);
      body(rank);
      done.arrive_and_wait();
    });
  }

  std::unique_ptr<ArenaDemand> demand_;
};

INSTANTIATE_TEST_SUITE_P(Sizes, InPlaceChannelTest, ::testing::Values(1, 2, 3, 4));

// Every rank publishes in an order of its own.
TEST_P(InPlaceChannelTest, SumsArraysThatBecomeReadyInAnyOrder) {
  RunRanks([](Rank& rank) {
    const Blocks blocks;
    std::mt19937 random(static_cast<unsigned>(rank.member()));
    std::vector<int> order = {0, 1, 2, 3};
    std::vector<float> floats(kSmall);
    std::vector<double> doubles(kSmall);
    const auto size = static_cast<float>(rank.size());
    const float ranks = size * (size - 1) / 2;
    for (int pass = 0; pass < 20; ++pass) {
      rank.channel->Begin(0.5);
      std::shuffle(order.begin(), order.end(), random);
      for (const int array : order) {
        std::fill_n(blocks[array], kCounts[array],
                    static_cast<float>(100 * pass + 10 * array + rank.member()));
        rank.channel->Publish(array, blocks.OffsetOf(array));
      }
      std::fill_n(rank.channel->small_floats(), kSmall, static_cast<float>(pass + rank.member()));
      std::fill_n(rank.channel->small_doubles(), kSmall, 2.0 * rank.member());
      ASSERT_TRUE(rank.Complete());
      rank.channel->SumSmall(floats.data(), doubles.data());
      EXPECT_THAT(rank.channel->left_out(), IsEmpty());
      for (int array = 0; array < 4; ++array) {
        const float sum = size * static_cast<float>(100 * pass + 10 * array) + ranks;
        for (size_t i = 0; i < kCounts[array]; ++i) ASSERT_EQ(blocks[array][i], sum / 2) << i;
      }
      ASSERT_EQ(floats[kSmall - 1], (size * static_cast<float>(pass) + ranks) / 2);
      ASSERT_EQ(doubles[0], ranks);
    }
  });
}

// The ranks that are ahead sum the arrays that the slowest one publishes last.
TEST_P(InPlaceChannelTest, ARankThatIsAheadSumsWholeArrays) {
  if (GetParam() == 1) GTEST_SKIP() << "there is nobody to be ahead of";
  std::barrier<> meet(GetParam());
  RunRanks([&](Rank& rank) {
    const Blocks blocks;
    const auto size = static_cast<float>(rank.size());
    const auto summed = [&](int array) {
      const float* const begin = blocks[array];
      return std::all_of(begin, begin + kCounts[array], [&](float x) { return x == 3 * size; });
    };
    rank.channel->Begin(1);
    for (int array = 0; array < 4; ++array) std::fill_n(blocks[array], kCounts[array], 3.0F);
    const bool ahead = rank.member() == 0;
    if (ahead) rank.channel->Publish(3, blocks.OffsetOf(3));
    meet.arrive_and_wait();
    if (!ahead) rank.channel->Publish(3, blocks.OffsetOf(3));
    EXPECT_EQ(blocks[3][0], 3);
    meet.arrive_and_wait();
    if (ahead) rank.channel->PublishZeros(0);
    meet.arrive_and_wait();
    EXPECT_TRUE(summed(3));
    for (int array = ahead ? 1 : 0; array < 3; ++array) rank.channel->PublishZeros(array);
    ASSERT_TRUE(rank.Complete());
    EXPECT_TRUE(summed(3));
  });
}

TEST_P(InPlaceChannelTest, ZerosGetNoResultAndArraysElsewhereAreLeftOut) {
  RunRanks([](Rank& rank) {
    const Blocks blocks;
    const bool first = rank.member() == 0;
    rank.channel->Begin(1);
    for (int array = 0; array < 4; ++array) std::fill_n(blocks[array], kCounts[array], 3.0F);
    rank.channel->Publish(0, blocks.OffsetOf(0));
    if (first) {
      rank.channel->PublishZeros(1);
      rank.channel->PublishElsewhere(2);
    } else {
      rank.channel->Publish(1, blocks.OffsetOf(1));
      rank.channel->Publish(2, blocks.OffsetOf(2));
    }
    rank.channel->Publish(3, blocks.OffsetOf(3));
    ASSERT_TRUE(rank.Complete());
    EXPECT_THAT(rank.channel->left_out(), ElementsAre(2));
    const auto size = static_cast<float>(rank.size());
    EXPECT_EQ(blocks[0][0], 3 * size);
    EXPECT_EQ(blocks[1][0], first ? 3 : 3 * (size - 1));
    EXPECT_EQ(blocks[2][0], 3);
    EXPECT_EQ(blocks[3][kCounts[3] - 1], 3 * size);
  });
}

// Bits: the balanced tree over the ranks, whatever the slices.
TEST_P(InPlaceChannelTest, AddsInTheOrderOfTheTree) {
  RunRanks([](Rank& rank) {
    const Blocks blocks;
    constexpr int kArray = 1;
    const size_t count = kCounts[kArray];
    std::vector<std::vector<float>> inputs(rank.size(), std::vector<float>(count));
    for (int member = 0; member < rank.size(); ++member) {
      std::mt19937 random(static_cast<unsigned>(member));
      std::normal_distribution<float> normal;
      for (float& value : inputs[member]) value = normal(random);
    }
    std::vector<float> expected(count);
    std::vector<const std::byte*> from;
    for (const auto& input : inputs)
      from.push_back(reinterpret_cast<const std::byte*>(input.data()));
    auto* to = reinterpret_cast<std::byte*>(expected.data());
    ReduceTree(ReduceKind::kSum, ElementType::kFloat, from, {&to, 1}, count, 1.0 / 3);
    rank.channel->Begin(1.0 / 3);
    std::copy(inputs[rank.member()].begin(), inputs[rank.member()].end(), blocks[kArray]);
    for (const int array : {0, 2, 3}) rank.channel->PublishZeros(array);
    rank.channel->Publish(kArray, blocks.OffsetOf(kArray));
    ASSERT_TRUE(rank.Complete());
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), blocks[kArray]));
  });
}

// A rank that gives up in a pass ends the group, and nobody writes into its arrays afterwards.
TEST_P(InPlaceChannelTest, ARankThatGivesUpEndsThePass) {
  if (GetParam() == 1) GTEST_SKIP() << "there is nobody to wait for";
  RunRanks([](Rank& rank) {
    const Blocks blocks;
    for (int array = 0; array < 4; ++array) std::fill_n(blocks[array], kCounts[array], 3.0F);
    rank.channel->Begin(1);
    rank.channel->Publish(0, blocks.OffsetOf(0));
    if (rank.member() == 0) {
      EXPECT_TRUE(rank.channel->Abandon());
      EXPECT_TRUE(rank.group->ended());
      return;
    }
    for (int array = 1; array < 4; ++array) rank.channel->Publish(array, blocks.OffsetOf(array));
    EXPECT_FALSE(rank.Complete());
    EXPECT_EQ(rank.group->end().kind, GroupEnd::kAborted);
  });
}

// Channels with a pass and channels without one give their blocks back, whoever is first.
TEST_P(InPlaceChannelTest, DestroyedChannelsKeepNoMemory) {
  std::barrier<> meet(GetParam());
  RunRanks([&](Rank& rank) {
    meet.arrive_and_wait();
    const size_t before = Arena::OfProcess().statistics().bytes_touched;
    meet.arrive_and_wait();
    constexpr size_t kNumbers = 10'007;  // blocks of a size that nothing else has
    std::vector<float> floats(kNumbers);
    for (int round = 0; round < 200; ++round) {
      rank.channel = rank.Make({.small_floats = kNumbers});
      if (round % 2 == 0) continue;
      rank.channel->Begin(1);
      std::fill_n(rank.channel->small_floats(), kNumbers, 1.0F);
      ASSERT_TRUE(rank.Complete());
      rank.channel->SumSmall(floats.data(), nullptr);
    }
    EXPECT_FALSE(rank.group->ended());
    // All have finished the last pass, so that the last channel gives back what was left.
    meet.arrive_and_wait();
    rank.channel.reset();
    meet.arrive_and_wait();
    EXPECT_LE(Arena::OfProcess().statistics().bytes_touched, before);
  });
}

// One channel that lives long, beside many that do not.
TEST_P(InPlaceChannelTest, ALongLivedChannelIsInNoOthersWay) {
  RunRanks([](Rank& rank) {
    for (int round = 0; round < 200; ++round) (void)rank.Make({.small_floats = kSmall});
  });
}

TEST_P(InPlaceChannelTest, AForkedChildEndsNothing) {
  RunRanks([](Rank& rank) {
    rank.channel->Begin(1);
    rank.channel->PublishZeros(0);
    if (rank.member() == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        rank.channel.reset();
        rank.group.reset();
        ::_exit(0);
      }
      int result = -1;
      EXPECT_EQ(::waitpid(child, &result, 0), child);
      EXPECT_EQ(result, 0);
    }
    for (int array = 1; array < 4; ++array) rank.channel->PublishZeros(array);
    EXPECT_TRUE(rank.Complete());
    EXPECT_FALSE(rank.group->ended());
  });
}

// A channel may be replaced while slower ranks still read its block.
TEST_P(InPlaceChannelTest, ChannelsFollowEachOther) {
  RunRanks([](Rank& rank) {
    std::vector<float> floats(kSmall);
    std::vector<double> doubles(kSmall);
    for (int round = 0; round < 50; ++round) {
      rank.channel->Begin(1);
      for (int array = 0; array < 4; ++array) rank.channel->PublishZeros(array);
      std::fill_n(rank.channel->small_floats(), kSmall, static_cast<float>(round));
      std::fill_n(rank.channel->small_doubles(), kSmall, 1.0);
      ASSERT_TRUE(rank.Complete());
      rank.channel->SumSmall(floats.data(), doubles.data());
      ASSERT_EQ(floats[kSmall / 2], static_cast<float>(round * rank.size()));
      InPlaceChannel::Layout layout{.small_floats = kSmall, .small_doubles = kSmall};
      for (const size_t count : kCounts) layout.large.push_back({.count = count});
      rank.channel = rank.Make(layout);
    }
  });
}

}  // namespace
}  // namespace ddp::internal
