#include "elastic/checkpoint/retention/select_expired.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint64_t kBytes = 10;

FinishedCheckpoint At(int64_t step, std::optional<double> metric = std::nullopt,
                      uint64_t generation = 1) {
  return {.id = {step, generation}, .bytes = kBytes, .metric = metric};
}

// Returns the steps that go; `newest` is the greatest of `finished`.
std::vector<int64_t> Expired(const RetentionPolicy& policy,
                             const std::vector<FinishedCheckpoint>& finished) {
  CheckpointId newest;
  for (const FinishedCheckpoint& checkpoint : finished) newest = std::max(newest, checkpoint.id);
  std::vector<int64_t> steps;
  for (const ExpiredCheckpoint& expired : SelectExpired(policy, finished, newest)) {
    steps.push_back(expired.id.step);
  }
  return steps;
}

TEST(SelectExpiredTest, TheDefaultKeepsTheLastThreeAndNamesTheOption) {
  const std::vector<FinishedCheckpoint> four = {At(30), At(10), At(40), At(20)};
  EXPECT_THAT(SelectExpired({}, four, {40, 1}),
              ElementsAre(ExpiredCheckpoint{{10, 1}, "keep_last is 3"}));
  EXPECT_THAT(Expired({}, {At(10), At(20), At(30)}), IsEmpty());
  EXPECT_THAT(Expired({.keep_last = RetentionPolicy::kAll}, four), IsEmpty());
}

TEST(SelectExpiredTest, EveryMthStepStaysAndOfItsGenerationsTheLatest) {
  const std::vector<FinishedCheckpoint> finished = {
      At(100, std::nullopt, 1), At(100, std::nullopt, 2), At(150), At(200), At(210)};
  std::vector<ExpiredCheckpoint> expired =
      SelectExpired({.keep_last = 1, .keep_every = 100}, finished, {210, 1});
  EXPECT_THAT(expired,
              ElementsAre(ExpiredCheckpoint{{100, 1}, "keep_last is 1, keep_every is 100"},
                          ExpiredCheckpoint{{150, 1}, "keep_last is 1, keep_every is 100"}));
}

TEST(SelectExpiredTest, TheBestStayAndNaNIsNotAmongThem) {
  const std::vector<FinishedCheckpoint> finished = {At(1, 0.5), At(2, 0.1), At(3, std::nan("")),
                                                    At(4),      At(5, 0.5), At(6, 0.9)};
  EXPECT_THAT(Expired({.keep_last = 1, .keep_best = 2}, finished), ElementsAre(1, 3, 4));
  EXPECT_THAT(Expired({.keep_last = 1, .keep_best = 2, .best_is = RetentionPolicy::Best::kHighest},
                      finished),
              ElementsAre(1, 2, 3, 4));
}

TEST(SelectExpiredTest, TheBudgetTakesTheOldestFirstThenTheBestAndNeverTheNewest) {
  const std::vector<FinishedCheckpoint> finished = {At(1, 0.1), At(2), At(3), At(4)};
  RetentionPolicy policy{.keep_last = 4, .keep_best = 1, .max_bytes = 3 * kBytes};
  EXPECT_THAT(SelectExpired(policy, finished, {4, 1}),
              ElementsAre(ExpiredCheckpoint{{2, 1}, "max_bytes is 30"}));
  policy.max_bytes = 2 * kBytes;
  EXPECT_THAT(Expired(policy, finished), ElementsAre(2, 3));
  policy.max_bytes = 1;
  EXPECT_THAT(Expired(policy, finished), ElementsAre(1, 2, 3));
}

// An older run has left higher steps in the folder, or the newest was damaged and the run went on
// from an older one. Neither may take the place of the checkpoint that was just saved.
TEST(SelectExpiredTest, HigherStepsNeitherGoNorCount) {
  const std::vector<FinishedCheckpoint> finished = {At(10), At(20), At(30), At(900), At(901)};
  EXPECT_THAT(SelectExpired({.keep_last = 2}, finished, {30, 1}),
              ElementsAre(ExpiredCheckpoint{{10, 1}, "keep_last is 2"}));
  EXPECT_THAT(SelectExpired({.keep_last = 1}, finished, {40, 1}), IsEmpty())
      << "the commit is not among the finished ones";
}

TEST(SelectExpiredTest, RandomPoliciesKeepWhatTheyPromise) {
  for (uint32_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937 random(seed);
    const auto below = [&random](int64_t bound) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(bound));
    };
    std::vector<FinishedCheckpoint> finished;
    std::set<CheckpointId> ids;
    for (int64_t i = below(12); i-- > 0;) {
      const CheckpointId id = {below(15), static_cast<uint64_t>(1 + below(2))};
      if (!ids.insert(id).second) continue;
      std::optional<double> metric;
      if (below(3) > 0) metric = static_cast<double>(below(5));
      finished.push_back({.id = id, .bytes = static_cast<uint64_t>(below(20)), .metric = metric});
    }
    if (finished.empty()) continue;
    const CheckpointId newest =
        finished[static_cast<size_t>(below(static_cast<int64_t>(finished.size())))].id;
    const RetentionPolicy policy = {
        .keep_last = 1 + below(4),
        .keep_every = below(2) * below(5),
        .keep_best = below(3),
        .best_is = below(2) == 0 ? RetentionPolicy::Best::kLowest : RetentionPolicy::Best::kHighest,
        .max_bytes = static_cast<uint64_t>(below(2) * below(60))};
    const std::vector<ExpiredCheckpoint> expired = SelectExpired(policy, finished, newest);
    std::set<CheckpointId> gone;
    for (const ExpiredCheckpoint& one : expired) {
      EXPECT_TRUE(ids.contains(one.id));
      EXPECT_LT(one.id, newest);
      EXPECT_TRUE(gone.insert(one.id).second);
    }
    std::shuffle(finished.begin(), finished.end(), random);
    EXPECT_EQ(SelectExpired(policy, finished, newest), expired) << "the order decides";
    uint64_t left = 0;
    int64_t newer = 0;  // than the checkpoint, up to `newest`
    for (const FinishedCheckpoint& one : finished) {
      if (one.id > newest || gone.contains(one.id)) continue;
      left += one.bytes;
      newer += one.id < newest ? 1 : 0;
    }
    if (policy.max_bytes > 0) {
      EXPECT_TRUE(left <= policy.max_bytes || newer == 0);
    } else {
      EXPECT_GE(newer + 1,
                std::min<int64_t>(policy.keep_last, std::count_if(ids.begin(), ids.end(),
                                                                  [&](const CheckpointId& id) {
                                                                    return id <= newest;
                                                                  })));
    }
    // What has gone stays gone, and a second decision removes no more.
    std::erase_if(finished, [&](const FinishedCheckpoint& one) { return gone.contains(one.id); });
    EXPECT_THAT(SelectExpired(policy, finished, newest), IsEmpty());
  }
}

}  // namespace
}  // namespace ddp::elastic
