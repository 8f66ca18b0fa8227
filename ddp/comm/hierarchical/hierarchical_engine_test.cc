#include "ddp/comm/hierarchical/hierarchical_engine.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/kernels/reduce.h"
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
using ::testing::HasSubstr;
using Kind = CollectiveRequest::Kind;

constexpr absl::Duration kTimeout = absl::Seconds(60);

struct Rank {
  HierarchicalEngine* engine = nullptr;
  CollectiveEngine* local = nullptr;
  HostGroup* group = nullptr;
  Wire* wire = nullptr;
  int rank = 0;

  absl::Status Run(const CollectiveRequest& request, absl::Duration timeout = kTimeout) const {
    return engine->Run(request, MonotonicClock().Now() + timeout);
  }
  absl::Status Sum(std::vector<float>& values) const {
    const auto bytes = std::as_writable_bytes(std::span(values));
    return Run({.kind = Kind::kAllReduce,
                .type = ElementType::kFloat,
                .elements = values.size(),
                .inputs = {bytes},
                .outputs = {bytes}});
  }
};

struct Settings {
  std::vector<RankRange> hosts;
  bool deterministic = true;
  size_t chunk_bytes = 1024;  // small, so that small arrays have many
};

// Runs `body` in each rank. No rank leaves before all bodies have returned.
void RunRanks(const Settings& settings, const std::function<void(Rank&)>& body) {
  const int size = settings.hosts.back().end;
  std::vector<FakeGroupStore> stores(settings.hosts.size());
  Wire wire;
  std::latch done(size);
  RunThreads(size, [&](int rank) {
    const HostLayout layout(settings.hosts, rank);
    auto entry = GroupEntry::Run(
        stores[layout.host()],
        {.member = layout.member(), .size = layout.local().size(), .timeout = kTimeout});
    ASSERT_TRUE(entry.ok()) << entry.status();
    HostGroup& group = **entry;
    CollectiveEngine local(&group);
    WireLink link(&wire, rank);
    HierarchicalEngine engine(
        layout, &local, &link,
        {.deterministic = settings.deterministic, .chunk_bytes = settings.chunk_bytes});
    Rank self{.engine = &engine, .local = &local, .group = &group, .wire = &wire, .rank = rank};
    body(self);
    done.arrive_and_wait();
  });
}

std::string Describe(const std::vector<RankRange>& hosts) {
  std::string text = "hosts of";
  for (const RankRange host : hosts) absl::StrAppend(&text, " ", host.size());
  return text;
}

std::vector<RankRange> HostsOfSizes(const std::vector<int>& sizes) {
  std::vector<RankRange> hosts;
  int next = 0;
  for (const int size : sizes) {
    hosts.push_back({next, next + size});
    next += size;
  }
  return hosts;
}

std::vector<float> InputOf(int rank, size_t count) {
  std::mt19937 random(100 + rank);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> values(count);
  for (float& x : values) x = normal(random) * std::ldexp(1.0F, static_cast<int>(random() % 12));
  return values;
}

std::span<std::byte> Bytes(std::vector<float>& values) {
  return std::as_writable_bytes(std::span(values));
}

std::vector<float> TreeSum(const std::vector<std::vector<float>>& inputs) {
  std::vector<float> sum(inputs.front().size());
  std::vector<const std::byte*> pointers;
  for (const auto& input : inputs) {
    pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
  }
  auto* const to = reinterpret_cast<std::byte*>(sum.data());
  ReduceTree(ReduceKind::kSum, ElementType::kFloat, pointers, std::span(&to, 1), sum.size());
  return sum;
}

const std::vector<std::vector<int>>& Layouts() {
  static const auto* const layouts = new std::vector<std::vector<int>>{
      {1, 1},    {2, 2},    {1, 2},    {2, 1},       {1, 3},    {3, 3},      {4, 4},
      {2, 2, 2}, {1, 2, 1}, {2, 3, 1}, {1, 1, 1, 1}, {3, 1, 4}, {2, 2, 2, 2}};
  return *layouts;
}

TEST(HierarchicalEngineTest, EveryLayoutGivesTheBitsOfOneTree) {
  for (const std::vector<int>& sizes : Layouts()) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    SCOPED_TRACE(Describe(hosts));
    RunRanks({.hosts = hosts}, [&](Rank& self) {
      for (const size_t count : {1, 17, 256, 2503}) {
        std::vector<std::vector<float>> inputs;
        for (int rank = 0; rank < hosts.back().end; ++rank) {
          inputs.push_back(InputOf(rank, count));
        }
        std::vector<float> mine = inputs[self.rank];
        ASSERT_TRUE(self.Sum(mine).ok());
        const std::vector<float> expected = TreeSum(inputs);
        ASSERT_EQ(std::memcmp(mine.data(), expected.data(), count * sizeof(float)), 0)
            << count << " elements on rank " << self.rank;
      }
    });
  }
}

TEST(HierarchicalEngineTest, AReduceScatterGivesTheBitsOfOneTree) {
  for (const std::vector<int>& sizes : Layouts()) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    const int size = hosts.back().end;
    SCOPED_TRACE(Describe(hosts));
    RunRanks({.hosts = hosts}, [&](Rank& self) {
      for (const size_t count : {1, 17, 256, 1003}) {
        std::vector<std::vector<float>> all;
        for (int rank = 0; rank < size; ++rank) all.push_back(InputOf(rank, size * count));
        std::vector<std::span<const std::byte>> inputs;
        for (int rank = 0; rank < size; ++rank) {
          inputs.push_back(Bytes(all[self.rank])
                               .subspan(rank * count * sizeof(float))
                               .first(count * sizeof(float)));
        }
        // The output is the rank's own input on odd ranks.
        std::vector<float> apart(count);
        const std::vector<float> expected = TreeSum(all);
        float* const output =
            self.rank % 2 == 0 ? apart.data() : all[self.rank].data() + self.rank * count;
        ASSERT_TRUE(self.Run({.kind = Kind::kReduceScatter,
                              .type = ElementType::kFloat,
                              .elements = count,
                              .inputs = {inputs.begin(), inputs.end()},
                              .outputs = {std::as_writable_bytes(std::span(output, count))}})
                        .ok());
        ASSERT_EQ(std::memcmp(output, expected.data() + self.rank * count, count * sizeof(float)),
                  0)
            << count << " elements on rank " << self.rank;
      }
    });
  }
}

TEST(HierarchicalEngineTest, AnAllGatherReachesEveryRank) {
  for (const std::vector<int>& sizes : Layouts()) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    const int size = hosts.back().end;
    SCOPED_TRACE(Describe(hosts));
    RunRanks({.hosts = hosts}, [&](Rank& self) {
      for (const size_t count : {0, 1, 17, 256, 1003}) {
        std::vector<std::vector<float>> outputs(size, std::vector<float>(count));
        std::vector<std::span<std::byte>> to;
        for (auto& output : outputs) to.push_back(Bytes(output));
        std::vector<float> mine = InputOf(self.rank, count);
        ASSERT_TRUE(self.Run({.kind = Kind::kAllGather,
                              .elements = count,
                              .inputs = {Bytes(mine)},
                              .outputs = {to.begin(), to.end()}})
                        .ok());
        for (int rank = 0; rank < size; ++rank) {
          ASSERT_EQ(outputs[rank], InputOf(rank, count)) << "on rank " << self.rank;
        }
      }
    });
  }
}

TEST(HierarchicalEngineTest, TheOrderOfHostsIsAnOption) {
  for (const std::vector<int>& sizes : {std::vector<int>{3, 3}, {1, 2, 4}}) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    SCOPED_TRACE(Describe(hosts));
    constexpr size_t kCount = 2000;
    std::vector<std::vector<float>> of_hosts;
    for (const RankRange host : hosts) {
      std::vector<std::vector<float>> inputs;
      for (int rank = host.begin; rank < host.end; ++rank) inputs.push_back(InputOf(rank, kCount));
      of_hosts.push_back(TreeSum(inputs));
    }
    const std::vector<float> expected = TreeSum(of_hosts);
    RunRanks({.hosts = hosts, .deterministic = false}, [&](Rank& self) {
      std::vector<float> mine = InputOf(self.rank, kCount);
      ASSERT_TRUE(self.Sum(mine).ok());
      EXPECT_EQ(std::memcmp(mine.data(), expected.data(), kCount * sizeof(float)), 0);
    });
  }
}

// 2 (H - 1) / H times the array for H equal hosts of 2^n ranks. A host whose ranks are two subtrees
// sends two partials.
TEST(HierarchicalEngineTest, AHostSendsNoMoreThanItMust) {
  struct Expected {
    std::vector<int> sizes;
    bool deterministic;
    double arrays;  // sent by the first host
  };
  constexpr size_t kCount = 3 * 4 * 1024;
  for (const Expected& expected :
       {Expected{{2, 2}, true, 1.0}, Expected{{4, 4}, true, 1.0}, Expected{{2, 2, 2, 2}, true, 1.5},
        Expected{{3, 3}, true, 0.5 * 2 + 0.5}, Expected{{3, 3}, false, 1.0}}) {
    const std::vector<RankRange> hosts = HostsOfSizes(expected.sizes);
    SCOPED_TRACE(Describe(hosts));
    std::latch reduced(hosts.back().end);
    RunRanks({.hosts = hosts, .deterministic = expected.deterministic}, [&](Rank& self) {
      std::vector<float> mine(kCount, 1);
      ASSERT_TRUE(self.Sum(mine).ok());
      reduced.arrive_and_wait();
      const double arrays =
          static_cast<double>(self.wire->SentBy(hosts[0])) / (kCount * sizeof(float));
      EXPECT_NEAR(arrays, expected.arrays, 0.1);
    });
  }
}

// The ranks of the other host need or give half of the tensor, each way. With tags nothing else
// goes over the link.
TEST(HierarchicalEngineTest, PartsGoOverTheLinkOnce) {
  const std::vector<RankRange> hosts = HostsOfSizes({2, 2});
  constexpr size_t kCount = 4 * 1024;  // of a part
  std::latch reduced(4);
  std::latch read(4);
  std::latch gathered(4);
  RunRanks({.hosts = hosts}, [&](Rank& self) {
    constexpr size_t kBytes = kCount * sizeof(float);
    std::vector<float> tensor(4 * kCount, 1);
    std::vector<std::span<const std::byte>> inputs;
    std::vector<std::span<std::byte>> outputs;
    for (int rank = 0; rank < 4; ++rank) {
      outputs.push_back(Bytes(tensor).subspan(rank * kBytes, kBytes));
      inputs.push_back(outputs.back());
    }
    ASSERT_TRUE(self.Run({.kind = Kind::kReduceScatter,
                          .type = ElementType::kFloat,
                          .elements = kCount,
                          .tag = 1U,
                          .inputs = {inputs.begin(), inputs.end()},
                          .outputs = {outputs[self.rank]}})
                    .ok());
    reduced.arrive_and_wait();
    EXPECT_EQ(self.wire->SentBy(hosts[0]), 2 * kBytes);
    read.arrive_and_wait();
    ASSERT_TRUE(self.Run({.kind = Kind::kAllGather,
                          .elements = kBytes,
                          .tag = 2U,
                          .inputs = {outputs[self.rank]},
                          .outputs = {outputs.begin(), outputs.end()}})
                    .ok());
    EXPECT_EQ(tensor, std::vector<float>(4 * kCount, 4));
    gathered.arrive_and_wait();
    EXPECT_EQ(self.wire->SentBy(hosts[0]), 4 * kBytes);
  });
}

TEST(HierarchicalEngineTest, ABroadcastReachesEveryRank) {
  for (const std::vector<int>& sizes : Layouts()) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    SCOPED_TRACE(Describe(hosts));
    RunRanks({.hosts = hosts}, [&](Rank& self) {
      for (const int root : {0, hosts.back().end - 1}) {
        for (const size_t count : {1, 1501}) {
          std::vector<float> mine = InputOf(self.rank, count);
          CollectiveRequest request{.kind = Kind::kBroadcast, .root = root, .elements = count};
          if (self.rank == root) {
            request.inputs = {Bytes(mine)};
          } else {
            request.outputs = {Bytes(mine)};
          }
          ASSERT_TRUE(self.Run(request).ok());
          ASSERT_EQ(mine, InputOf(root, count)) << root;
        }
      }
    });
  }
}

// Rank r gives rank n 10 r + n elements.
TEST(HierarchicalEngineTest, AnAllToAllMovesPartsOfAnySize) {
  for (const std::vector<int>& sizes : Layouts()) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    const int size = hosts.back().end;
    SCOPED_TRACE(Describe(hosts));
    RunRanks({.hosts = hosts}, [&](Rank& self) {
      std::vector<std::vector<float>> given, taken;
      for (int other = 0; other < size; ++other) {
        given.emplace_back(10 * self.rank + other, static_cast<float>(100 * self.rank + other));
        taken.emplace_back(10 * other + self.rank);
      }
      CollectiveRequest request{.kind = Kind::kAllToAll};
      for (auto& part : given) request.inputs.push_back(Bytes(part));
      for (auto& part : taken) request.outputs.push_back(Bytes(part));
      ASSERT_TRUE(self.Run(request).ok());
      for (int other = 0; other < size; ++other) {
        EXPECT_EQ(taken[other], std::vector<float>(10 * other + self.rank,
                                                   static_cast<float>(100 * other + self.rank)));
      }
    });
  }
}

TEST(HierarchicalEngineTest, AnAllToAllWhoseSizesDoNotFitFailsEverywhere) {
  RunRanks({.hosts = HostsOfSizes({2, 1})}, [&](Rank& self) {
    std::vector<float> given(self.rank == 1 ? 3 : 2), taken(6);
    CollectiveRequest request{.kind = Kind::kAllToAll};
    for (size_t i = 0; i < 3; ++i) {
      request.inputs.push_back(Bytes(given));
      request.outputs.push_back(Bytes(taken).subspan(i * 8, 8));
    }
    const absl::Status status = self.Run(request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 gives rank 0 12 bytes"));
  });
}

// Long arrays go in chunks that grow with the ranks: messages are as long as between two hosts of
// two ranks.
TEST(HierarchicalEngineTest, MoreHostsDoNotMakeMessagesShort) {
  const auto bytes_of_a_message = [](const std::vector<int>& sizes) {
    constexpr size_t kCount = size_t{4} << 20;
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    std::latch reduced(hosts.back().end);
    std::atomic<size_t> messages = 0;
    RunRanks({.hosts = hosts, .chunk_bytes = 0}, [&](Rank& self) {
      std::vector<float> mine(kCount, 1);
      ASSERT_TRUE(self.Sum(mine).ok());
      reduced.arrive_and_wait();
      messages = self.wire->messages_sent();
    });
    const auto size = static_cast<size_t>(sizes.size());
    return 2 * (size - 1) * kCount * sizeof(float) / messages;
  };
  EXPECT_GT(bytes_of_a_message({2, 2, 2, 2}), bytes_of_a_message({2, 2}) * 9 / 10);
}

TEST(HierarchicalEngineTest, RanksThatDifferAreNamedEverywhere) {
  for (const std::vector<int>& sizes : {std::vector<int>{2, 2}, {1, 2, 1}}) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    const int size = hosts.back().end;
    SCOPED_TRACE(Describe(hosts));
    for (int differs = 1; differs < size; ++differs) {
      RunRanks({.hosts = hosts}, [&](Rank& self) {
        EXPECT_TRUE(self.Run({.kind = Kind::kBarrier}).ok());
        std::vector<float> mine(self.rank == differs ? 5 : 4);
        const absl::Status status = self.Sum(mine);
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(absl::StrCat("rank ", differs, " has started another")));
      });
    }
  }
}

// With a tag, a difference ends only with the time or the group.
TEST(HierarchicalEngineTest, RanksThatDifferByTheirTagsWait) {
  for (const Kind kind : {Kind::kBarrier, Kind::kAllReduce}) {
    RunRanks({.hosts = HostsOfSizes({2, 2})}, [&](Rank& self) {
      std::vector<float> mine(1000);
      const absl::Status in_time = self.Run({.kind = kind,
                                             .type = ElementType::kFloat,
                                             .elements = mine.size(),
                                             .tag = self.rank == 3 ? 2U : 1U,
                                             .inputs = {Bytes(mine)},
                                             .outputs = {Bytes(mine)}},
                                            absl::Milliseconds(300));
      EXPECT_FALSE(in_time.ok());
      EXPECT_NE(in_time.code(), absl::StatusCode::kInvalidArgument);
    });
  }
}

// A collective with a tag sends its data alone.
TEST(HierarchicalEngineTest, ATaggedSumComparesNothingBefore) {
  RunRanks({.hosts = HostsOfSizes({1, 1})}, [&](Rank& self) {
    std::vector<float> mine(4, 1);
    ASSERT_TRUE(self.Run({.kind = Kind::kAllReduce,
                          .type = ElementType::kFloat,
                          .elements = mine.size(),
                          .tag = 7U,
                          .inputs = {Bytes(mine)},
                          .outputs = {Bytes(mine)}})
                    .ok());
    EXPECT_EQ(mine, std::vector<float>(4, 2));
    EXPECT_LE(self.wire->messages_sent(), 2);
  });
}

TEST(HierarchicalEngineTest, TheEndOfTheLinkIsAnError) {
  const std::vector<RankRange> hosts = HostsOfSizes({1, 1});
  RunRanks({.hosts = hosts}, [&](Rank& self) {
    if (self.rank == 1) return self.wire->Close();
    std::vector<float> mine(1000);
    EXPECT_EQ(self.Sum(mine).code(), absl::StatusCode::kUnavailable);
  });
}

TEST(HierarchicalEngineTest, TheEndOfTheHostsGroupIsAnError) {
  const std::vector<RankRange> hosts = HostsOfSizes({2, 1});
  RunRanks({.hosts = hosts}, [&](Rank& self) {
    if (self.rank == 1) return self.group->Abort();
    if (self.rank == 2) return;
    std::vector<float> mine(1000);
    // With a tag: without one, the rank would wait at the link first, which a RankEngine ends.
    const absl::Status status = self.Run({.kind = Kind::kAllReduce,
                                          .type = ElementType::kFloat,
                                          .elements = mine.size(),
                                          .tag = 7U,
                                          .inputs = {Bytes(mine)},
                                          .outputs = {Bytes(mine)}});
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  });
}

}  // namespace
}  // namespace ddp::internal
