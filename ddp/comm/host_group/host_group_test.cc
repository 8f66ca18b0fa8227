#include "ddp/comm/host_group/host_group.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <latch>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/under_sanitizer.h"
#include "ddp/comm/host_group/group_entry.h"
#include "ddp/comm/host_group/segment.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"
#include "testing/fake_group_store.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::FakeGroupStore;
using ::ddp::testing::RunThreads;

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr absl::Duration kTimeout = absl::Seconds(60);

bool Never() { return false; }

int64_t Deadline() { return MonotonicNanoseconds() + absl::ToInt64Nanoseconds(kTimeout); }

std::shared_ptr<HostGroup> Join(FakeGroupStore& store, int member, int size) {
  auto entry = GroupEntry::Run(store, {.member = member, .size = size, .timeout = kTimeout});
  EXPECT_TRUE(entry.ok()) << entry.status();
  return *std::move(entry);
}

// Runs `body` in each member, a thread. No member leaves before all bodies have returned.
void RunMembers(int size, const std::function<void(HostGroup&)>& body) {
  FakeGroupStore store;
  std::latch done(size);
  RunThreads(size, [&](int member) {
    const std::shared_ptr<HostGroup> group = Join(store, member, size);
    body(*group);
    done.arrive_and_wait();
  });
}

// Raises this member's counter, and waits for those of all members.
bool Meet(HostGroup& group, uint64_t number) {
  group.segment().row(group.member()).signals.store(number, std::memory_order_release);
  group.NotifyIf([] { return true; });
  return group.Wait(
      [&] {
        for (int member = 0; member < group.size(); ++member) {
          if (group.segment().row(member).signals.load(std::memory_order_acquire) < number) {
            return false;
          }
        }
        return true;
      },
      Never, Deadline());
}

TEST(HostGroupTest, MembersMeet) {
  for (const int size : {1, 2, 5}) {
    RunMembers(size, [](HostGroup& group) {
      for (uint64_t number = 1; number <= 2'000; ++number) ASSERT_TRUE(Meet(group, number));
      EXPECT_EQ(group.end().kind, GroupEnd::kNone);
    });
  }
}

TEST(HostGroupTest, AbortEndsEveryWait) {
  RunMembers(3, [](HostGroup& group) {
    if (group.member() == 1) {
      group.Abort();
      group.Abort();
    } else {
      EXPECT_FALSE(group.Wait(Never, Never, Deadline()));
    }
    EXPECT_TRUE(group.ended());
    EXPECT_EQ(group.end().kind, GroupEnd::kAborted);
    EXPECT_EQ(group.end().member, 1);
    EXPECT_FALSE(group.BeginTouch());
    EXPECT_FALSE(group.Wait(Never, Never, kNever));
    EXPECT_TRUE(group.Wait([] { return true; }, Never, kNever));
  });
}

TEST(HostGroupTest, TheFirstEndIsFinal) {
  std::latch all(4);
  RunMembers(4, [&](HostGroup& group) {
    group.Abort();
    const HostGroup::End end = group.end();
    all.arrive_and_wait();
    EXPECT_EQ(group.end().member, end.member);
    EXPECT_EQ(group.end().kind, GroupEnd::kAborted);
  });
}

TEST(HostGroupTest, StopAndTheDeadlineEndAWait) {
  RunMembers(2, [](HostGroup& group) {
    const absl::Time start = MonotonicClock().Now();
    EXPECT_FALSE(group.Wait(Never, Never, MonotonicNanoseconds() + 3'000'000));
    EXPECT_GE(MonotonicClock().Now() - start, absl::Milliseconds(3));
    EXPECT_FALSE(group.Wait(
        Never, [] { return true; }, Deadline()));
    EXPECT_FALSE(group.Wait(Never, Never, 0));
    EXPECT_LT(MonotonicClock().Now() - start, kTimeout);
    EXPECT_FALSE(group.ended());
  });
}

TEST(HostGroupTest, AMemberThatLeavesInOrderEndsNothing) {
  FakeGroupStore store;
  std::latch others(2);
  RunThreads(3, [&](int member) {
    std::shared_ptr<HostGroup> group = Join(store, member, 3);
    ASSERT_TRUE(Meet(*group, 1));
    if (member == 1) return;
    EXPECT_TRUE(group->Wait([&] { return group->has_left(1); }, Never, Deadline()));
    EXPECT_FALSE(group->ended());
    EXPECT_FALSE(group->has_left(member));
    EXPECT_EQ(group->segment().row(1).signals, 1);
    // Its place is not taken for a dead one.
    EXPECT_FALSE(group->Wait(Never, Never, MonotonicNanoseconds() + 30'000'000));
    EXPECT_FALSE(group->ended());
    others.arrive_and_wait();
  });
}

TEST(HostGroupTest, QuiesceWaitsForWriters) {
  std::atomic<bool> touching = false;
  std::atomic<bool> may_end = false;
  RunMembers(2, [&](HostGroup& group) {
    if (group.member() == 1) {
      ASSERT_TRUE(group.BeginTouch());
      touching = true;
      while (!may_end) ::sched_yield();
      group.EndTouch();
      EXPECT_FALSE(group.BeginTouch());
      return;
    }
    while (!touching) ::sched_yield();
    group.Abort();
    EXPECT_FALSE(group.Quiesce(absl::ZeroDuration()));
    EXPECT_FALSE(group.Quiesce(absl::Milliseconds(2)));
    may_end = true;
    EXPECT_TRUE(group.Quiesce(kTimeout));
  });
}

TEST(HostGroupTest, TheBackgroundFunctionIsCalledWhenItIsKickedOrNotified) {
  RunMembers(2, [](HostGroup& group) {
    std::atomic<int> calls = 0;
    std::atomic<bool> wake_on_notify = false;
    group.SetBackground([&] {
      ++calls;
      calls.notify_all();
      return HostGroup::Nap{.wake_on_notify = wake_on_notify};
    });
    const auto await_more_than = [&](int seen) {
      while (calls.load() <= seen) calls.wait(seen);
    };
    await_more_than(0);
    for (int i = 0; i < 100; ++i) {
      const int seen = calls;
      group.Kick();
      await_more_than(seen);
    }
    // Each member notifies the other.
    wake_on_notify = true;
    const int seen = calls;
    group.Kick();
    await_more_than(seen);
    for (uint64_t number = 1; number <= 100; ++number) ASSERT_TRUE(Meet(group, number));
    group.SetBackground(nullptr);
    const int last = calls;
    group.Kick();
    group.NotifyIf([] { return true; });
    ASSERT_TRUE(Meet(group, 101));
    EXPECT_EQ(calls, last);
  });
}

// An exception in the thread does not end the process: the group ends for all.
TEST(HostGroupTest, AnExceptionInTheBackgroundEndsTheGroup) {
  RunMembers(2, [](HostGroup& group) {
    if (group.member() == 1) {
      group.SetBackground([]() -> HostGroup::Nap { throw std::runtime_error("no memory"); });
    }
    const auto ended = [&] { return group.ended(); };
    EXPECT_TRUE(group.Wait(
        ended, [] { return false; },
        MonotonicNanoseconds() + absl::ToInt64Nanoseconds(absl::Seconds(60))));
    EXPECT_EQ(group.end().kind, GroupEnd::kAborted);
    EXPECT_EQ(group.end().member, 1);
    group.SetBackground(nullptr);
  });
}

TEST(HostGroupTest, AddressesInArenasAreChecked) {
  RunMembers(2, [](HostGroup& group) {
    EXPECT_NE(group.InArena(1, 0, 1), nullptr);
    EXPECT_EQ(group.InArena(1, 0, ~uint64_t{0}), nullptr);
    EXPECT_EQ(group.InArena(0, ~uint64_t{0}, 1), nullptr);
  });
}

// A destructor that comes between two looks of the thread must wake it all the same.
TEST(HostGroupTest, ManyGroupsComeAndGoAtOnce) {
  const absl::Time start = MonotonicClock().Now();
  for (int i = 0; i < 300; ++i) {
    FakeGroupStore store;
    const auto one = Join(store, 0, 1);
    if (i % 2 == 0) one->SetBackground([] { return HostGroup::Nap{}; });
  }
  EXPECT_LT(MonotonicClock().Now() - start, absl::Seconds(50));
}

// Two jobs on one host: a member of each in every thread, in turns.
TEST(HostGroupTest, TwoGroupsDoNotMeetEachOther) {
  FakeGroupStore stores[2];
  std::latch done(3);
  RunThreads(3, [&](int rank) {
    // The second group has the ranks in another order.
    const auto one = Join(stores[0], rank, 3);
    const auto other = Join(stores[1], (rank + 1) % 3, 3);
    for (uint64_t number = 1; number <= 300; ++number) {
      ASSERT_TRUE(Meet(*one, number));
      if (number % 3 == 0) {
        ASSERT_TRUE(Meet(*other, number));
      }
    }
    if (rank == 2) one->Abort();
    EXPECT_FALSE(one->Wait(Never, Never, Deadline()));
    for (uint64_t number = 301; number <= 350; ++number) ASSERT_TRUE(Meet(*other, number));
    EXPECT_FALSE(other->ended());
    done.arrive_and_wait();
  });
}

int Count(const char* folder) {
  const std::filesystem::directory_iterator entries(folder);
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

int Mappings() {
  std::ifstream maps("/proc/self/maps");
  return static_cast<int>(
      std::count(std::istreambuf_iterator<char>(maps), std::istreambuf_iterator<char>(), '\n'));
}

int64_t ResidentPages() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  statm >> size >> resident;
  return resident;
}

TEST(HostGroupTest, NothingGrowsOverManyGroups) {
  const char* const text = std::getenv("DDP_GROUPS");
  int groups = kUnderSanitizer ? 100 : 2'000;
  if (text != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(text, &groups));
  }
  FakeGroupStore store;
  const auto build_one = [&] {
    RunMembers(2, [](HostGroup& group) { ASSERT_TRUE(Meet(group, 1)); });
  };
  for (int i = 0; i < 50; ++i) build_one();
  const int descriptors = Count("/proc/self/fd");
  const int threads = Count("/proc/self/task");
  const int mappings = Mappings();
  const int64_t pages = ResidentPages();
  const absl::Time start = MonotonicClock().Now();
  for (int i = 0; i < groups; ++i) build_one();
  const absl::Duration each = (MonotonicClock().Now() - start) / groups;
  std::printf(
      "%d groups, %s each: descriptors %d -> %d, threads %d -> %d, mappings %d -> %d, "
      "resident %ld -> %ld pages\n",
      groups, absl::FormatDuration(each).c_str(), descriptors, Count("/proc/self/fd"), threads,
      Count("/proc/self/task"), mappings, Mappings(), pages, ResidentPages());
  EXPECT_EQ(Count("/proc/self/fd"), descriptors);
  EXPECT_EQ(Count("/proc/self/task"), threads);
  EXPECT_LE(Mappings(), mappings + 20);
  if (kUnderSanitizer) return;                // a sanitizer keeps freed memory
  EXPECT_LE(ResidentPages(), pages + 2'000);  // 8 MiB: less than 16 groups hold
}

}  // namespace
}  // namespace ddp::internal
