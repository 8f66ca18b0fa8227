// The costs of groups of many members, counted: system calls that wake threads, and lines of the
// shared table that a collective writes. The counts do not depend on the speed of the machine.

#include <dlfcn.h>
#include <linux/futex.h>
#include <sys/syscall.h>

#include <atomic>
#include <barrier>
#include <cstdarg>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/host_group/segment.h"
#include "ddp/comm/shared_memory/collective_engine.h"
#include "ddp/comm/shared_memory/in_place_channel.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace {

std::atomic<int> wakes = 0;

}  // namespace

// Takes the place of the C library's function, and counts.
extern "C" long syscall(long number, ...) noexcept {  // NOLINT(google-runtime-int): its type
  using Function = long(long, ...);                   // NOLINT(google-runtime-int)
  static auto* const next = reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, "syscall"));
  long arguments[6];  // NOLINT(google-runtime-int)
  va_list list;
  va_start(list, number);
  for (auto& argument : arguments) argument = va_arg(list, long);  // NOLINT(google-runtime-int)
  va_end(list);
  if (number == SYS_futex && (arguments[1] & FUTEX_CMD_MASK) == FUTEX_WAKE) wakes.fetch_add(1);
  return next(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
              arguments[5]);
}

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;
using Kind = CollectiveRequest::Kind;

constexpr absl::Duration kTimeout = absl::Minutes(2);
constexpr int kRounds = 5;

// One rank: a thread of the test.
struct Rank {
  std::shared_ptr<HostGroup> group;
  std::unique_ptr<CollectiveEngine> engine;

  // Waits for the operations that `start` starts.
  void Run(int count,
           const std::function<void(const std::function<CollectiveEngine::Done()>&)>& start) const {
    std::atomic<int> left = count;
    start([&left]() -> CollectiveEngine::Done {
      return [&left](const absl::Status& status) {
        EXPECT_TRUE(status.ok()) << status;
        left.fetch_sub(1);
      };
    });
    engine->Drive([&] { return left.load() == 0; }, MonotonicClock().Now() + kTimeout);
  }
  void Run(CollectiveRequest request) const {
    Run(1, [&](const auto& done) { engine->Start(std::move(request), kTimeout, done()); });
  }
};

class ManyMembersTest : public ::testing::TestWithParam<int> {
 protected:
  static Rank Enter(FakeGroupStore& store, int member) {
    auto entry =
        GroupEntry::Run(store, {.member = member, .size = GetParam(), .timeout = kTimeout});
    EXPECT_TRUE(entry.ok()) << entry.status();
    Rank rank{.group = *std::move(entry), .engine = nullptr};
    rank.engine = std::make_unique<CollectiveEngine>(rank.group.get());
    return rank;
  }

  // Runs `round` several times in each rank. Returns the wake-ups of one round.
  static double WakesOf(const std::function<void(Rank&)>& round) {
    FakeGroupStore store;
    std::barrier together(GetParam());
    int counted = 0;
    RunThreads(GetParam(), [&](int member) {
      Rank rank = Enter(store, member);
      round(rank);  // maps memory, and lets all members come
      together.arrive_and_wait();
      if (member == 0) wakes = 0;
      together.arrive_and_wait();
      for (int i = 0; i < kRounds; ++i) round(rank);
      together.arrive_and_wait();
      if (member == 0) counted = wakes;
      together.arrive_and_wait();
    });
    std::cout << GetParam() << " members: " << static_cast<double>(counted) / kRounds
              << " wake-ups in a round\n";
    return static_cast<double>(counted) / kRounds;
  }

  // Returns the cache lines of the shared table that members write in one round.
  static int LinesOf(const std::function<void(Rank&)>& round) {
    constexpr size_t kLine = 64;
    FakeGroupStore store;
    std::barrier together(GetParam());
    int written = 0;
    RunThreads(GetParam(), [&](int member) {
      Rank rank = Enter(store, member);
      const Segment& segment = rank.group->segment();
      const auto* const begin = reinterpret_cast<const std::byte*>(&segment.header());
      const auto* const end = reinterpret_cast<const std::byte*>(&segment.row(GetParam() - 1) + 1);
      round(rank);
      together.arrive_and_wait();
      const std::vector<std::byte> before(begin, end);
      together.arrive_and_wait();
      round(rank);
      together.arrive_and_wait();
      for (size_t at = 0; member == 0 && at < before.size(); at += kLine) {
        written += std::memcmp(before.data() + at, begin + at, kLine) == 0 ? 0 : 1;
      }
      together.arrive_and_wait();
    });
    std::cout << GetParam() << " members: " << written << " cache lines of the table\n";
    return written;
  }

  // A signal wakes each member once. The start and the completion of an operation wake the other
  // thread of the same member.
  static double Bound(int signals) { return (signals + 2) * GetParam(); }
};

INSTANTIATE_TEST_SUITE_P(Sizes, ManyMembersTest, ::testing::Values(2, 8, 32, 128));

TEST_P(ManyMembersTest, ABarrierWakesEachMemberOnce) {
  EXPECT_LE(WakesOf([](Rank& rank) { rank.Run({.kind = Kind::kBarrier}); }), Bound(1));
}

// Of each member: the count of its signals, its announcement, and its bell. A counter of all
// arrivals, for the signals that announce nothing.
TEST_P(ManyMembersTest, ACollectiveWritesThreeLinesForEachMember) {
  EXPECT_LE(LinesOf([](Rank& rank) { rank.Run({.kind = Kind::kBarrier}); }), 3 * GetParam());
  EXPECT_LE(LinesOf([](Rank& rank) {
              std::vector<float> values(16'000, 1);
              rank.Run({.kind = Kind::kAllReduce,
                        .type = ElementType::kFloat,
                        .elements = values.size(),
                        .inputs = {std::as_bytes(std::span(values))},
                        .outputs = {std::as_writable_bytes(std::span(values))}});
            }),
            3 * GetParam() + 1);
}

TEST_P(ManyMembersTest, ASlicedAllReduceWakesEachMemberTwice) {
  EXPECT_LE(WakesOf([](Rank& rank) {
              std::vector<float> values(16'000, 1);
              rank.Run({.kind = Kind::kAllReduce,
                        .type = ElementType::kFloat,
                        .elements = values.size(),
                        .inputs = {std::as_bytes(std::span(values))},
                        .outputs = {std::as_writable_bytes(std::span(values))}});
              EXPECT_EQ(values.back(), GetParam());
            }),
            Bound(2));
}

TEST_P(ManyMembersTest, AMessageWakesItsReceiverAndItsSenderAlone) {
  EXPECT_LE(WakesOf([](Rank& rank) {
              const int size = rank.group->size();
              const int member = rank.group->member();
              std::vector<std::byte> sent(1'000);
              std::vector<std::byte> got(1'000);
              rank.Run(2, [&](const auto& done) {
                rank.engine->Send((member + 1) % size, 7, sent, kTimeout, done());
                rank.engine->Receive((member + size - 1) % size, 7, got, kTimeout, done());
              });
            }),
            Bound(6));
}

TEST_P(ManyMembersTest, AnArrayOfAPassWakesEachMemberOnce) {
  constexpr int kArrays = 8;
  std::vector<std::unique_ptr<InPlaceChannel>> channels(GetParam());
  std::vector<int64_t> places(GetParam());
  std::barrier<> connecting(GetParam());
  EXPECT_LE(WakesOf([&](Rank& rank) {
              std::unique_ptr<InPlaceChannel>& channel = channels[rank.group->member()];
              if (channel == nullptr) {
                auto made = InPlaceChannel::Make(
                    rank.group, {.large = std::vector<InPlaceChannel::Layout::Large>(
                                     kArrays, {.type = ElementType::kFloat, .count = 5'000})});
                ASSERT_TRUE(made.ok()) << made.status();
                channel = *std::move(made);
                places[rank.group->member()] = channel->place();
                connecting.arrive_and_wait();
                ASSERT_TRUE(channel->Connect(places).ok());
              }
              channel->Begin(1);
              for (int array = 0; array < kArrays; ++array) channel->PublishZeros(array);
              channel->Finish();
              rank.Run(1, [&](const auto& done) {
                rank.engine->StartOwn({.advance = [&] { return channel->Advance(); },
                                       .may_advance = [&] { return channel->MayAdvance(); }},
                                      kTimeout, done());
              });
            }),
            Bound(kArrays + 1));
}

}  // namespace
}  // namespace ddp::internal
