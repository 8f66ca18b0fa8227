#include "ddp/comm/hierarchical/hierarchical_engine.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/kernels/reduce.h"
#include "ddp/comm/shared_memory/collective_engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;
using ::testing::HasSubstr;

constexpr absl::Duration kTimeout = absl::Seconds(60);
constexpr size_t kChunkBytes = 1024;  // small, so that small arrays have many

// A stream of messages from one rank to another.
struct Route {
  int from = 0;
  int to = 0;
  HostLink::Stream stream = HostLink::Stream::kData;
  friend auto operator<=>(const Route&, const Route&) = default;
};

// The network between the ranks, which are threads of the test. Thread-safe.
class Wire {
 public:
  // Returns the number of the next message of a route, for its sender or its receiver.
  size_t Number(bool sends, const Route& route) {
    MutexLock lock(mutex_);
    return numbers_[{sends, route}]++;
  }

  void Put(const Route& route, size_t number, std::span<const std::byte> data) {
    MutexLock lock(mutex_);
    messages_[route][number].assign(data.begin(), data.end());
    sent_[route.from] += data.size();
    changed_.NotifyAll();
  }

  absl::Status Take(const Route& route, size_t number, std::span<std::byte> data) {
    MutexLock lock(mutex_);
    auto& messages = messages_[route];
    while (!messages.contains(number)) {
      if (closed_) return absl::UnavailableError("the wire is cut");
      (void)changed_.WaitFor(mutex_, kTimeout);
    }
    const std::vector<std::byte> message = std::move(messages[number]);
    messages.erase(number);
    EXPECT_EQ(message.size(), data.size()) << "from " << route.from << " to " << route.to;
    std::memcpy(data.data(), message.data(), std::min(message.size(), data.size()));
    return absl::OkStatus();
  }

  void Close() {
    MutexLock lock(mutex_);
    closed_ = true;
    changed_.NotifyAll();
  }

  // Returns the bytes that the ranks of `host` have sent so far.
  size_t SentBy(RankRange host) {
    MutexLock lock(mutex_);
    size_t bytes = 0;
    for (int rank = host.begin; rank < host.end; ++rank) bytes += sent_[rank];
    return bytes;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::pair<bool, Route>, size_t> numbers_ ABSL_GUARDED_BY(mutex_);
  std::map<Route, std::map<size_t, std::vector<std::byte>>> messages_ ABSL_GUARDED_BY(mutex_);
  std::map<int, size_t> sent_ ABSL_GUARDED_BY(mutex_);
};

// Sends at once, so that a Send() never waits for its Wait().
class WireLink : public HostLink {
 public:
  WireLink(Wire* wire, int rank) : wire_(wire), rank_(rank) {}

  std::unique_ptr<Transfer> Send(int rank, Stream stream,
                                 std::span<const std::byte> data) override {
    const Route route{.from = rank_, .to = rank, .stream = stream};
    wire_->Put(route, wire_->Number(true, route), data);
    return std::make_unique<Message>([] { return absl::OkStatus(); });
  }
  std::unique_ptr<Transfer> Receive(int rank, Stream stream, std::span<std::byte> data) override {
    const Route route{.from = rank, .to = rank_, .stream = stream};
    return std::make_unique<Message>(
        [wire = wire_, route, data, number = wire_->Number(false, route)] {
          return wire->Take(route, number, data);
        });
  }

 private:
  struct Message : Transfer {
    explicit Message(std::function<absl::Status()> wait) : wait(std::move(wait)) {}
    absl::Status Wait(absl::Duration /*timeout*/) override { return wait(); }
    std::function<absl::Status()> wait;
  };

  Wire* const wire_;
  const int rank_;
};

struct Rank {
  HierarchicalEngine* engine = nullptr;
  CollectiveEngine* local = nullptr;
  HostGroup* group = nullptr;
  Wire* wire = nullptr;
  int rank = 0;

  absl::Time Deadline() const { return MonotonicClock().Now() + kTimeout; }
};

struct Settings {
  std::vector<RankRange> hosts;
  bool deterministic = true;
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
    HostGroup group(*std::move(entry));
    CollectiveEngine local(&group);
    WireLink link(&wire, rank);
    HierarchicalEngine engine(
        layout, &local, layout.host_count() > 1 ? &link : nullptr,
        {.deterministic = settings.deterministic, .chunk_bytes = kChunkBytes});
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

std::vector<float> TreeSum(const std::vector<std::vector<float>>& inputs, double factor) {
  std::vector<float> sum(inputs.front().size());
  std::vector<const std::byte*> pointers;
  for (const auto& input : inputs) {
    pointers.push_back(reinterpret_cast<const std::byte*>(input.data()));
  }
  auto* const to = reinterpret_cast<std::byte*>(sum.data());
  ReduceTree(ReduceKind::kSum, ElementType::kFloat, pointers, std::span(&to, 1), sum.size(),
             factor);
  return sum;
}

const std::vector<std::vector<int>>& Layouts() {
  static const auto* const layouts = new std::vector<std::vector<int>>{
      {1},    {3},       {1, 1},    {2, 2},    {1, 2},       {2, 1},    {1, 3},      {3, 3},
      {4, 4}, {2, 2, 2}, {1, 2, 1}, {2, 3, 1}, {1, 1, 1, 1}, {3, 1, 4}, {2, 2, 2, 2}};
  return *layouts;
}

TEST(HierarchicalEngineTest, EveryLayoutGivesTheBitsOfOneTree) {
  for (const std::vector<int>& sizes : Layouts()) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    SCOPED_TRACE(Describe(hosts));
    RunRanks({.hosts = hosts}, [&](Rank& self) {
      for (const size_t count : {1, 17, 256, 5003}) {
        for (const double factor : {1.0, 0.3}) {
          std::vector<std::vector<float>> inputs;
          for (int rank = 0; rank < hosts.back().end; ++rank) {
            inputs.push_back(InputOf(rank, count));
          }
          std::vector<float> mine = inputs[self.rank];
          ASSERT_TRUE(self.engine
                          ->AllReduce(Bytes(mine), ReduceKind::kSum, ElementType::kFloat, factor,
                                      self.Deadline())
                          .ok());
          const std::vector<float> expected = TreeSum(inputs, factor);
          ASSERT_EQ(std::memcmp(mine.data(), expected.data(), count * sizeof(float)), 0)
              << count << " elements on rank " << self.rank;
        }
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
        for (const double factor : {1.0, 0.3}) {
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
          const std::vector<float> expected = TreeSum(all, factor);
          float* const output =
              self.rank % 2 == 0 ? apart.data() : all[self.rank].data() + self.rank * count;
          ASSERT_TRUE(self.engine
                          ->ReduceScatter(inputs, std::as_writable_bytes(std::span(output, count)),
                                          ReduceKind::kSum, ElementType::kFloat, factor,
                                          self.Deadline())
                          .ok());
          ASSERT_EQ(std::memcmp(output, expected.data() + self.rank * count, count * sizeof(float)),
                    0)
              << count << " elements on rank " << self.rank;
        }
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
        ASSERT_TRUE(self.engine->AllGather(Bytes(mine), to, self.Deadline()).ok());
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
      of_hosts.push_back(TreeSum(inputs, 1));
    }
    const std::vector<float> expected = TreeSum(of_hosts, 1);
    RunRanks({.hosts = hosts, .deterministic = false}, [&](Rank& self) {
      std::vector<float> mine = InputOf(self.rank, kCount);
      ASSERT_TRUE(
          self.engine
              ->AllReduce(Bytes(mine), ReduceKind::kSum, ElementType::kFloat, 1, self.Deadline())
              .ok());
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
  constexpr size_t kCount = 3 * 4 * 4 * 1024;
  for (const Expected& expected :
       {Expected{{2, 2}, true, 1.0}, Expected{{4, 4}, true, 1.0}, Expected{{2, 2, 2, 2}, true, 1.5},
        Expected{{3, 3}, true, 0.5 * 2 + 0.5}, Expected{{3, 3}, false, 1.0}}) {
    const std::vector<RankRange> hosts = HostsOfSizes(expected.sizes);
    SCOPED_TRACE(Describe(hosts));
    std::latch reduced(hosts.back().end);
    RunRanks({.hosts = hosts, .deterministic = expected.deterministic}, [&](Rank& self) {
      std::vector<float> mine(kCount, 1);
      ASSERT_TRUE(
          self.engine
              ->AllReduce(Bytes(mine), ReduceKind::kSum, ElementType::kFloat, 1, self.Deadline())
              .ok());
      reduced.arrive_and_wait();
      const double arrays =
          static_cast<double>(self.wire->SentBy(hosts[0])) / (kCount * sizeof(float));
      EXPECT_NEAR(arrays, expected.arrays, 0.1);
    });
  }
}

// The ranks of the other host need or give half of the tensor, each way.
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
    ASSERT_TRUE(self.engine
                    ->ReduceScatter(inputs, outputs[self.rank], ReduceKind::kSum,
                                    ElementType::kFloat, 1, self.Deadline())
                    .ok());
    reduced.arrive_and_wait();
    EXPECT_EQ(self.wire->SentBy(hosts[0]), 2 * kBytes);
    read.arrive_and_wait();
    ASSERT_TRUE(self.engine->AllGather(outputs[self.rank], outputs, self.Deadline()).ok());
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
      for (int root = 0; root < hosts.back().end; ++root) {
        for (const size_t count : {1, 256, 3001}) {
          std::vector<float> mine = InputOf(self.rank, count);
          ASSERT_TRUE(self.engine->Broadcast(Bytes(mine), root, self.Deadline()).ok());
          ASSERT_EQ(mine, InputOf(root, count)) << root;
        }
      }
    });
  }
}

TEST(HierarchicalEngineTest, RanksThatDifferAreNamedEverywhere) {
  for (const std::vector<int>& sizes : {std::vector<int>{3}, {2, 2}, {1, 2, 1}}) {
    const std::vector<RankRange> hosts = HostsOfSizes(sizes);
    const int size = hosts.back().end;
    SCOPED_TRACE(Describe(hosts));
    for (int differs = 1; differs < size; ++differs) {
      RunRanks({.hosts = hosts}, [&](Rank& self) {
        CollectiveHeader header{.elements = 4, .operation = 1};
        EXPECT_TRUE(self.engine->Agree(header, self.Deadline()).ok());
        if (self.rank == differs) header.elements = 5;
        const absl::Status status = self.engine->Agree(header, self.Deadline());
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(absl::StrCat("rank ", differs, " has started another")));
      });
    }
  }
}

// With a tag, a difference ends only with the group.
TEST(HierarchicalEngineTest, RanksThatDifferByTheirTagsWait) {
  const std::vector<RankRange> hosts = HostsOfSizes({2, 2});
  RunRanks({.hosts = hosts}, [&](Rank& self) {
    const CollectiveHeader header{.tag = self.rank == 3 ? 2U : 1U, .tagged = 1};
    const absl::Status in_time =
        self.engine->Agree(header, MonotonicClock().Now() + absl::Milliseconds(300));
    EXPECT_FALSE(in_time.ok());
    EXPECT_NE(in_time.code(), absl::StatusCode::kInvalidArgument);
  });
}

TEST(HierarchicalEngineTest, TheEndOfTheLinkIsAnError) {
  const std::vector<RankRange> hosts = HostsOfSizes({1, 1});
  RunRanks({.hosts = hosts}, [&](Rank& self) {
    if (self.rank == 1) return self.wire->Close();
    std::vector<float> mine(1000);
    EXPECT_EQ(
        self.engine
            ->AllReduce(Bytes(mine), ReduceKind::kSum, ElementType::kFloat, 1, self.Deadline())
            .code(),
        absl::StatusCode::kUnavailable);
  });
}

TEST(HierarchicalEngineTest, TheEndOfTheHostsGroupIsAnError) {
  const std::vector<RankRange> hosts = HostsOfSizes({2, 1});
  RunRanks({.hosts = hosts}, [&](Rank& self) {
    if (self.rank == 1) return self.group->Abort();
    if (self.rank == 2) return;
    std::vector<float> mine(1000);
    EXPECT_EQ(
        self.engine
            ->AllReduce(Bytes(mine), ReduceKind::kSum, ElementType::kFloat, 1, self.Deadline())
            .code(),
        absl::StatusCode::kUnavailable);
  });
}

}  // namespace
}  // namespace ddp::internal
