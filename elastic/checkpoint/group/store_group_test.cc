// Tests StoreGroup with a c10d::Store in this process, whose calls may fail.
#include "elastic/checkpoint/group/store_group.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "elastic/checkpoint/group/faulty_store.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/fake_clock.h"

namespace ddp::elastic {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kShort = CheckpointGroup::Patience::kShort;

// Counts the round trips of some kinds.
class CountingStore final : public c10d::HashStore {
 public:
  std::vector<uint8_t> get(const std::string& key) override {
    ++gets;
    return HashStore::get(key);
  }
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    longest_wait_ms = std::max<int64_t>(longest_wait_ms, timeout.count());
    HashStore::wait(keys, timeout);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++adds;
    return HashStore::add(key, value);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    ++multi_gets;
    std::vector<std::vector<uint8_t>> values;  // HashStore::multiGet() would call get()
    for (const std::string& key : keys) values.push_back(HashStore::get(key));
    return values;
  }
  bool deleteKey(const std::string& key) override {
    ++deletes;
    return HashStore::deleteKey(key);
  }

  std::atomic<int> gets = 0;
  std::atomic<int> adds = 0;
  std::atomic<int64_t> longest_wait_ms = 0;
  std::atomic<int> multi_gets = 0;
  std::atomic<int> deletes = 0;
};

StoreGroup::Options GroupOptions(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                 int world_size, absl::Duration timeout,
                                 std::function<void()> on_progress = nullptr) {
  return {.store = store,
          .rank = rank,
          .world_size = world_size,
          .prefix = "group",
          .timeout = timeout,
          .on_progress = std::move(on_progress)};
}

StoreGroup MakeStoreGroup(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                          absl::Duration timeout, std::function<void()> on_progress = nullptr) {
  return StoreGroup(GroupOptions(store, rank, world_size, timeout, std::move(on_progress)));
}

std::string Joined(const std::vector<std::string>& values) { return absl::StrJoin(values, " "); }

TEST(StoreGroupTest, RankZeroReadsAllRanksInOneRoundTrip) {
  auto store = c10::make_intrusive<CountingStore>();
  constexpr int kRanks = 6;
  std::deque<StoreGroup> groups;
  for (int rank = 0; rank < kRanks; ++rank) {
    groups.emplace_back(GroupOptions(store, rank, kRanks, absl::Minutes(1)));
  }
  std::vector<std::thread> threads;
  for (int rank = 1; rank < kRanks; ++rank) {
    threads.emplace_back([&groups, rank] {
      const auto answer = groups[static_cast<size_t>(rank)].Decide(absl::StrCat(rank), Joined);
      EXPECT_EQ(*answer, "0 1 2 3 4 5");
    });
  }
  EXPECT_EQ(*groups[0].Decide("0", Joined), "0 1 2 3 4 5");
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(store->gets, 0);
  EXPECT_EQ(store->multi_gets, kRanks);   // one per rank
  EXPECT_EQ(store->deletes, kRanks - 1);  // each rank but rank 0 deletes its own key
}

TEST(StoreGroupTest, AfterATimeoutNothingOfTheFailedAttemptIsRead) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const absl::Duration timeout = absl::Milliseconds(400);
  StoreGroup zero = MakeStoreGroup(store, 0, 3, timeout);
  StoreGroup one = MakeStoreGroup(store, 1, 3, absl::Minutes(1));
  StoreGroup two = MakeStoreGroup(store, 2, 3, absl::Minutes(1));
  // Rank 2 does not call Decide(). Rank 0 times out and answers rank 1, whose timeout is longer.
  std::thread waiting([&one] {
    const auto answer = one.Decide("old-1", Joined);
    EXPECT_EQ(answer.status().code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(answer.status().message()),
                AllOf(HasSubstr("rank 1 has waited for rank 0"), HasSubstr("for rank 2")));
  });
  const auto missing = zero.Decide("old-0", Joined);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("for rank 2"));
  waiting.join();
  // Rank 2 calls Decide() late, for the failed attempt.
  EXPECT_THAT(std::string(two.Decide("old-2", Joined).status().message()), HasSubstr("gave up"));
  // In the next attempt rank 0 must not read values of the failed one.
  std::vector<std::thread> threads;
  for (StoreGroup* group : {&one, &two}) {
    threads.emplace_back([group] {
      EXPECT_EQ(*group->Decide(absl::StrCat("new-", group->rank()), Joined), "new-0 new-1 new-2");
    });
  }
  EXPECT_EQ(*zero.Decide("new-0", Joined), "new-0 new-1 new-2");
  for (std::thread& thread : threads) thread.join();
}

TEST(StoreGroupTest, AValueOfARankThatGaveUpIsNotReadInTheNextAttempt) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  StoreGroup zero = MakeStoreGroup(store, 0, 2, absl::Milliseconds(300));
  StoreGroup one = MakeStoreGroup(store, 1, 2, absl::Milliseconds(50));
  EXPECT_FALSE(one.Decide("old", Joined).ok());  // leaves its error in the store
  zero.StartAttempt(kShort);
  zero.StartAttempt(kShort);
  EXPECT_THAT(std::string(zero.Decide("mine", Joined).status().message()), HasSubstr("for rank 1"));
}

TEST(StoreGroupTest, ARankThatMakesProgressIsWaitedFor) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::atomic<int> seen = 0;
  const absl::Duration timeout = absl::Seconds(2);
  StoreGroup zero = MakeStoreGroup(store, 0, 2, timeout, [&seen] { ++seen; });
  StoreGroup one = MakeStoreGroup(store, 1, 2, timeout);
  std::thread working([&] {
    zero.StartAttempt(kShort);
    EXPECT_EQ(*zero.Decide("0", Joined), "0 0");
    EXPECT_EQ(*zero.Decide("0", Joined), "0 1");
  });
  EXPECT_TRUE(one.Decide("0", Joined).ok());
  // Rank 0 checks four times per timeout, so six checks take longer than its timeout.
  while (seen < 6) {
    one.Progress();
    (void)poll(nullptr, 0, 5);
  }
  EXPECT_TRUE(one.Decide("1", Joined).ok());
  working.join();
}

TEST(StoreGroupTest, ARankZeroThatIsLateFindsTheErrorOfARankThatGaveUp) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  StoreGroup zero = MakeStoreGroup(store, 0, 2, absl::Minutes(1));
  StoreGroup one = MakeStoreGroup(store, 1, 2, absl::Milliseconds(50));
  const absl::Status gave_up = one.Decide("1", Joined).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(gave_up)) << gave_up;
  EXPECT_EQ(zero.Decide("0", Joined).status(), gave_up);
}

// The next generation deletes the store of this one, in which nobody will answer.
TEST(StoreGroupTest, ARankWhoseStoreIsDeletedWaitsForNobody) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::thread next_generation([&] {
    store->wait({"group/instances/0"}, std::chrono::seconds(60));
    store->deleteKey("group/instances/0");
  });
  StoreGroup group(GroupOptions(store, 0, 2, absl::Seconds(8)));
  const absl::Status status =
      group.Decide("value", [](const std::vector<std::string>&) { return std::string(); }).status();
  next_generation.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("so a later one has begun"));
}

TEST(StoreGroupTest, ALongTimeoutMakesNoLongSilence) {
  auto store = c10::make_intrusive<CountingStore>();
  ddp::testing::FakeClock clock;
  const auto make = [&](int rank) {
    return StoreGroup({.store = store,
                       .rank = rank,
                       .world_size = 2,
                       .prefix = "group",
                       .timeout = absl::Hours(10),
                       .clock = &clock});
  };
  StoreGroup zero = make(0);
  StoreGroup one = make(1);
  std::thread leading([&] { EXPECT_TRUE(zero.Decide("0", Joined).ok()); });
  EXPECT_TRUE(one.Decide("1", Joined).ok());
  leading.join();
  EXPECT_LE(store->longest_wait_ms, 60'001);  // then a waiting rank looks for progress
  const int before = store->adds;
  one.Progress();
  EXPECT_EQ(store->adds, before + 1);
  clock.Advance(absl::Seconds(14));
  one.Progress();
  EXPECT_EQ(store->adds, before + 1);
  clock.Advance(absl::Seconds(1));
  one.Progress();
  EXPECT_EQ(store->adds, before + 2);
}

// Runs an attempt of two rounds on three ranks, and then another attempt. In the first, call number
// `call` of rank `culprit` to the store throws. Returns false when the rank makes fewer calls.
bool RunWithFault(int culprit, int call, FaultyStore::Throws throws) {
  constexpr int kRanks = 3;
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> reached = false;
  std::atomic<int> failed_in_first = 0;
  std::atomic<int> succeeded_in_second = 0;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::atomic<bool> armed = rank == culprit;
      std::atomic<int> calls = 0;
      const auto fails = [&](const std::string&, const std::string&) {
        return armed && ++calls == call;
      };
      StoreGroup group = MakeStoreGroup(c10::make_intrusive<FaultyStore>(shared, fails, throws),
                                        rank, kRanks, absl::Minutes(1));
      group.StartAttempt(kShort);
      absl::StatusOr<std::string> answer = group.Decide("first", Joined);
      failed_in_first += answer.ok() ? 0 : 1;
      if (answer.ok()) {
        answer = group.Decide("second", Joined);
        succeeded_in_second += answer.ok() ? 1 : 0;
      }
      // A rank that waited for one that had left would time out.
      EXPECT_TRUE(answer.ok() || absl::IsUnavailable(answer.status())) << answer.status();
      if (rank == culprit) reached = calls >= call;
      armed = false;
      group.StartAttempt(kShort);
      const absl::StatusOr<std::string> next = group.Decide(absl::StrCat(rank), Joined);
      EXPECT_TRUE(next.ok()) << next.status();
      EXPECT_EQ(next.value_or(""), "0 1 2");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(failed_in_first == 0 || succeeded_in_second == 0) << "call " << call;
  return reached;
}

TEST(StoreGroupTest, AnyCallOfAnyRankMayFailOnceAndNoRankWaitsForIt) {
  for (const int culprit : {0, 1}) {
    for (const auto throws : {FaultyStore::Throws::kBefore, FaultyStore::Throws::kAfter}) {
      int call = 1;
      while (RunWithFault(culprit, call, throws)) ++call;
      EXPECT_GT(call, 8) << "rank " << culprit;
    }
  }
}

TEST(StoreGroupTest, ARankSetsItsErrorAsSoonAsTheStoreTakesIt) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  const auto never = [](const std::string&, const std::string&) { return false; };
  std::atomic<int> refused = 0;
  const auto out_of_memory = [&refused](const std::string& call, const std::string& key) {
    return call == "set" && absl::StrContains(key, "/value/") && ++refused <= 3;
  };
  StoreGroup zero =
      MakeStoreGroup(c10::make_intrusive<FaultyStore>(shared, never), 0, 2, absl::Minutes(1));
  StoreGroup one = MakeStoreGroup(c10::make_intrusive<FaultyStore>(shared, out_of_memory), 1, 2,
                                  absl::Minutes(1));
  std::thread leading([&zero] {
    const absl::Status status = zero.Decide("0", Joined).status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("rank 1 cannot reach the others through the store: the store fails"));
  });
  EXPECT_TRUE(absl::IsUnavailable(one.Decide("1", Joined).status()));
  leading.join();
  EXPECT_GE(refused, 3);
}

TEST(StoreGroupTest, AKeyThatCannotBeDeletedIsDeletedLater) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::atomic<bool> fails = true;
  const auto make = [&](int rank) {
    const auto deletes_nothing = [&fails](const std::string& call, const std::string&) {
      return fails && call == "deleteKey";
    };
    return MakeStoreGroup(c10::make_intrusive<FaultyStore>(shared, deletes_nothing), rank, 2,
                          absl::Minutes(1));
  };
  StoreGroup zero = make(0);
  StoreGroup one = make(1);
  const std::string key = "view/group/1/1/0/value/1";
  for (const bool failing : {true, false}) {
    fails = failing;
    std::thread leading([&zero] {
      zero.StartAttempt(kShort);
      EXPECT_TRUE(zero.Decide("0", Joined).ok());
    });
    one.StartAttempt(kShort);
    EXPECT_TRUE(one.Decide("1", Joined).ok());
    leading.join();
    EXPECT_EQ(shared->check({key}), failing);
  }
}

}  // namespace
}  // namespace ddp::elastic
