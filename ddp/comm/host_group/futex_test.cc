#include "ddp/comm/host_group/futex.h"

#include <atomic>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "gtest/gtest.h"
#include "testing/backend/test_threads.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::RunThreads;

constexpr absl::Duration kDeadline = absl::Seconds(60);

// Waits for `word` to have another value than 0 in the way under test.
void Await(const std::atomic<uint32_t>& word) {
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  while (word == 0) {
    FutexWait(word, 0, kDeadline);
    ASSERT_LT(clock.Now() - start, kDeadline);
  }
}

TEST(FutexTest, AWakeEndsTheWaitsOfAllThreads) {
  std::atomic<uint32_t> word = 0;
  std::atomic<int> begun = 0;
  RunThreads(
      4,
      [&](int) {
        ++begun;
        Await(word);
      },
      [&] {
        while (begun < 4) FutexWait(word, 0, absl::Milliseconds(1));
        word = 1;
        FutexWake(word);
      });
}

TEST(FutexTest, AnotherValueEndsTheWaitAtOnce) {
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  std::atomic<uint32_t> word = 1;
  FutexWait(word, 0, absl::InfiniteDuration());
  std::atomic<uint32_t> other = 0;
  const std::vector<FutexWord> words = {{.word = &other, .expected = 0},
                                        {.word = &word, .expected = 0}};
  (void)FutexWaitAny(words, kDeadline);
  EXPECT_LT(clock.Now() - start, kDeadline);
}

TEST(FutexTest, TheTimeoutEndsTheWait) {
  std::atomic<uint32_t> word = 0;
  FutexWait(word, 0, absl::Milliseconds(1));
  FutexWait(word, 0, -absl::Seconds(1));
  const std::vector<FutexWord> words = {{.word = &word, .expected = 0}};
  (void)FutexWaitAny(words, absl::Milliseconds(1));
  (void)FutexWaitAny(words, -absl::InfiniteDuration());
  EXPECT_EQ(word, 0);
}

TEST(FutexTest, AnyWordOfManyEndsTheWait) {
  std::vector<std::atomic<uint32_t>> storage(kMaxFutexWords);
  std::vector<FutexWord> words;
  for (const auto& word : storage) words.push_back({.word = &word, .expected = 0});
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  std::atomic<bool> begun = false;
  RunThreads(
      1,
      [&](int) {
        begun = true;
        // An infinite time limit too: its sum with the clock must not overflow.
        while (storage.back() == 0) {
          if (!FutexWaitAny(words, absl::InfiniteDuration())) Await(storage.back());
          ASSERT_LT(clock.Now() - start, kDeadline);
        }
      },
      [&] {
        std::atomic<uint32_t> never = 0;
        while (!begun) FutexWait(never, 0, absl::Milliseconds(1));
        storage.back() = 1;
        FutexWake(storage.back());
      });
}

TEST(FutexTest, WordsBeyondTheLimitDoNotMakeTheCallFail) {
  std::vector<std::atomic<uint32_t>> storage(kMaxFutexWords + 10);
  std::vector<FutexWord> words;
  for (const auto& word : storage) words.push_back({.word = &word, .expected = 0});
  const bool few = FutexWaitAny(std::span(words).first(1), absl::Milliseconds(1));
  EXPECT_EQ(FutexWaitAny(words, absl::Milliseconds(1)), few);
}

}  // namespace
}  // namespace ddp::internal
