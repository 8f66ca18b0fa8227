#include "testing/oracle/scenario.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ScenarioTest, ReadsWhatTheTableSays) {
  const auto scenarios = ParseScenarios(R"([
      {"name": "a", "model": "mlp"},
      {"name": "b", "model": "conv", "options": {"static_graph": true, "bucket_cap_mb": 0.5},
       "batches": [2, 5, 5], "hook": "allreduce_hook"}])");
  ASSERT_TRUE(scenarios.ok()) << scenarios.status();
  ASSERT_EQ(scenarios->size(), 2u);
  const Scenario& plain = scenarios->at(0);
  EXPECT_EQ(plain.model, "mlp");
  EXPECT_FALSE(plain.static_graph);
  EXPECT_EQ(plain.StepsOf(2), kOracleSteps);
  EXPECT_EQ(plain.RecordedRank(3), 0);
  const Scenario& uneven = scenarios->at(1);
  EXPECT_TRUE(uneven.static_graph);
  EXPECT_EQ(uneven.bucket_cap_mb, 0.5);
  EXPECT_EQ(uneven.hook, "allreduce_hook");
  EXPECT_THAT(uneven.batches, ElementsAre(2, 5, 5));
  EXPECT_EQ(uneven.StepsOf(0), 2);
  EXPECT_EQ(uneven.RecordedRank(3), 1);
}

TEST(ScenarioTest, RefusesWhatItDoesNotKnow) {
  EXPECT_THAT(ParseScenarios("{").status().message(), HasSubstr("not a JSON list"));
  EXPECT_THAT(ParseScenarios(R"([{"nam": "a"}])").status().message(), HasSubstr("field nam"));
  EXPECT_THAT(ParseScenarios(R"([{"options": {"dim": 0}}])").status().message(),
              HasSubstr("field dim"));
  EXPECT_THAT(ParseScenarios(R"([{"accumulate": 3}])").status().message(), HasSubstr("accumulate"));
}

}  // namespace
}  // namespace ddp::testing
