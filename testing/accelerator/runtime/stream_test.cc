#include "testing/accelerator/runtime/stream.h"

#include <atomic>
#include <future>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "testing/accelerator/runtime/lateness.h"

namespace ddp::testing {
namespace {

absl::Duration NeverLate(int64_t) { return absl::ZeroDuration(); }
// Longer than a test may take: a task that is not hurried fails the test by its time limit.
absl::Duration VeryLate(int64_t) { return absl::Hours(24); }

TEST(LatenessTest, FollowsFromItsArguments) {
  constexpr absl::Duration kLongest = absl::Milliseconds(2);
  int prompt = 0;
  int differing = 0;
  for (int64_t number = 0; number < 1000; ++number) {
    const absl::Duration late = Lateness(1, {.stream = 2}, number, kLongest);
    EXPECT_EQ(late, Lateness(1, {.stream = 2}, number, kLongest));
    EXPECT_LT(late, kLongest);
    prompt += late == absl::ZeroDuration();
    differing += late != Lateness(2, {.stream = 2}, number, kLongest);
  }
  EXPECT_GT(prompt, 400);
  EXPECT_LT(prompt, 600);
  EXPECT_GT(differing, 600);
  EXPECT_EQ(Lateness(1, {}, 1, absl::ZeroDuration()), absl::ZeroDuration());
}

TEST(StreamTest, TasksRunInOrder) {
  std::vector<int> order;
  Stream stream({}, NeverLate);
  for (int i = 0; i < 100; ++i) stream.Launch([&order, i] { order.push_back(i); });
  stream.Synchronize();
  ASSERT_EQ(order.size(), 100);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
}

TEST(StreamTest, LatenessEndsWhenTheHostWaits) {
  int runs = 0;
  Stream stream({}, VeryLate);
  for (int i = 0; i < 10; ++i) stream.Launch([&runs] { ++runs; });
  EXPECT_FALSE(stream.idle());
  stream.Synchronize();
  EXPECT_EQ(runs, 10);
}

TEST(StreamTest, HurryPassesOnThroughWaits) {
  int runs = 0;
  Stream first({}, VeryLate);
  Stream second({.stream = 1}, VeryLate);
  Stream third({.stream = 2}, VeryLate);
  first.Launch([&runs] { ++runs; });
  second.WaitFor(first.Record());
  second.Launch([&runs] { ++runs; });
  third.WaitFor(second.Record());
  third.Launch([&runs] { ++runs; });
  third.Synchronize();
  EXPECT_EQ(runs, 3);
}

TEST(StreamTest, HurryReachesNoFurtherThanTheWait) {
  Stream stream({}, VeryLate);
  stream.Launch([] {});
  const std::shared_ptr<Completion> completion = stream.Record();
  stream.Launch([] {});
  completion->Hurry();
  completion->Wait();
  EXPECT_FALSE(stream.idle());
}

TEST(StreamTest, ACompletionKeepsTasksOfAnotherStreamBack) {
  std::promise<void> released;
  std::atomic<bool> ran = false;
  Stream first({}, NeverLate);
  Stream second({.stream = 1}, NeverLate);
  first.Launch([&released] { released.get_future().wait(); });
  const std::shared_ptr<Completion> completion = first.Record();
  second.WaitFor(completion);
  second.Launch([&] {
    EXPECT_TRUE(completion->done());
    ran = true;
  });
  EXPECT_FALSE(completion->done());
  EXPECT_FALSE(ran);
  released.set_value();
  second.Synchronize();
  EXPECT_TRUE(ran);
}

TEST(StreamTest, ATaskMayLaunchWhenItIsDestroyed) {
  int runs = 0;
  Stream stream({}, NeverLate);
  std::shared_ptr<void> owned(nullptr, [&](void*) { stream.LaunchPrompt([&runs] { ++runs; }); });
  stream.Launch([owned = std::move(owned)] {});
  stream.Synchronize();
  stream.Synchronize();
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace ddp::testing
