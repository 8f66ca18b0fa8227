#include "testing/simulator/simulation.h"
#include "testing/simulator/bugs/core_tamper.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "testing/simulator/bugs/planted_bugs.h"
#include "testing/simulator/run_seeds.h"
#include "testing/simulator/story.h"

namespace ddp::testing {
namespace {

constexpr uint64_t kSeedsAtOnce = 6;
constexpr uint64_t kSeedsMax = 600;

std::string Failures(const SeedSummary& summary) {
  std::string text;
  for (const auto& [seed, what] : summary.failures) {
    absl::StrAppend(&text, "seed ", seed, ": ", what, "\n  replay: bazel run --config=opt ",
                    "//testing/simulator:simulate -- --trace --seed=", seed, "\n");
  }
  return text;
}

TEST(SimulationTest, NoSeedShowsWhatMustNeverBeSeen) {
  const AgentCode code;
  const SeedSummary summary = RunSeeds({.first = 301, .count = 120, .threads = 2}, code);
  EXPECT_TRUE(summary.failures.empty()) << Failures(summary);
  // The seeds must cover every kind of event.
  EXPECT_GT(summary.total.generations, 120);
  EXPECT_GT(summary.total.charged, 5);
  EXPECT_GT(summary.total.ends.at("succeeded"), 120);
  for (const int count : summary.total.faults) EXPECT_GT(count, 0);
}

TEST(SimulationTest, ASeedIsTheSameStoryEachTime) {
  const AgentCode code;
  for (const uint64_t seed : {3, 17, 29}) {
    std::vector<std::string> first, second;
    const SimulationResult a = Simulate(
        MakeStory(seed), code, [&first](const std::string& line) { first.push_back(line); });
    const SimulationResult b = Simulate(
        MakeStory(seed), code, [&second](const std::string& line) { second.push_back(line); });
    EXPECT_EQ(a.fingerprint, b.fingerprint);
    EXPECT_EQ(first, second);
    EXPECT_EQ(a.fingerprint, Simulate(MakeStory(seed), code).fingerprint) << "without a trace";
    EXPECT_GT(first.size(), 10);
  }
}

class PlantedBugTest : public ::testing::TestWithParam<PlantedBug> {};

TEST_P(PlantedBugTest, IsFound) {
  const PlantedBug& bug = GetParam();
  const AgentCode code = Plant(bug);
  std::string failures;
  for (uint64_t seeds = 0; seeds < kSeedsMax && !absl::StrContains(failures, bug.symptom);
       seeds += kSeedsAtOnce) {
    const SeedRange range = {
        .first = bug.first_seed + seeds, .count = kSeedsAtOnce, .threads = 2, .failures_max = 2};
    absl::StrAppend(&failures, Failures(RunSeeds(range, code)));
  }
  EXPECT_TRUE(absl::StrContains(failures, bug.symptom)) << bug.what << "\n" << failures;
}

INSTANTIATE_TEST_SUITE_P(AllBugs, PlantedBugTest, ::testing::ValuesIn(PlantedBugs()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace ddp::testing
