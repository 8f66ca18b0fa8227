#include "testing/ranks/rank_test.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"
#include "testing/ranks/rank_harness.h"

namespace ddp::testing {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

std::string Variable(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "unset" : value;
}

// Adds one to a number in the rank's store. Returns the sum.
int64_t CountInStore() {
  const auto address = store::ParseStoreAddress(Variable("DDP_STORE"));
  EXPECT_TRUE(address.ok()) << address.status();
  if (!address.ok()) return -1;
  const auto server = store::RedisConnection::Connect(address->endpoint, {});
  EXPECT_TRUE(server.ok()) << server.status();
  if (!server.ok()) return -1;
  const auto sum = (*server)->Command({"INCR", absl::StrCat(address->prefix, "count")});
  EXPECT_TRUE(sum.ok()) << sum.status();
  return sum.ok() ? sum->AsInteger().value_or(-1) : -1;
}

RANK_TEST(RankTestTest, RunsInEveryRank, 3) {
  EXPECT_EQ(Variable("WORLD_SIZE"), "3");
  EXPECT_EQ(Variable("OMP_NUM_THREADS"), "1");
}

// A second case in the same store would count beyond its own ranks.
RANK_TEST(RankTestTest, EveryCaseHasAStoreOfItsOwn, {1, 2}) {
  const int64_t sum = CountInStore();
  EXPECT_GE(sum, 1);
  EXPECT_LE(sum, std::stoi(Variable("WORLD_SIZE")));
}

RANK_TEST(RankTestTest, AStoreOfEachKind, .world_size = {1, 2},
          .stores = {RankStore::kRedis, RankStore::kTcpStore}) {
  EXPECT_TRUE(Variable("DDP_STORE") == "unset" || CountInStore() >= 1);
}

RANK_TEST(RankTestTest, RanksGetTheEnvironment, .environment = {{"FIRST", "1"}, {"SECOND", "2"}}) {
  EXPECT_EQ(Variable("FIRST") + Variable("SECOND"), "12");
}

RANK_TEST(RankTestTest, TheNamedRankIsKilled, .world_size = 2, .killed_rank = 1) {
  if (Variable("RANK") == "1") kill(getpid(), SIGKILL);
}

// Returns the names of the suite's cases.
std::vector<std::string> Cases(const std::string& suite_name) {
  std::vector<std::string> names;
  const ::testing::UnitTest& all = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const ::testing::TestSuite& suite = *all.GetTestSuite(i);
    if (suite.name() != suite_name) continue;
    for (int j = 0; j < suite.total_test_count(); ++j) {
      names.push_back(suite.GetTestInfo(j)->name());
    }
  }
  return names;
}

TEST(RankTestTest, ACaseHasASuffixWhereTheBodyHasSeveral) {
  const std::vector<std::string> cases = Cases("RankTestTest");
  for (const char* name :
       {"RunsInEveryRank", "EveryCaseHasAStoreOfItsOwnOn1", "EveryCaseHasAStoreOfItsOwnOn2",
        "AStoreOfEachKindOn1InRedis", "AStoreOfEachKindOn1OnTcpStore", "AStoreOfEachKindOn2InRedis",
        "AStoreOfEachKindOn2OnTcpStore"}) {
    EXPECT_THAT(cases, Contains(name));
  }
}

RANK_BODY(ExitsWithRank) { _exit(10 + std::stoi(Variable("RANK"))); }

TEST(RankTestTest, AnOrdinaryTestStartsABodyByName) {
  const RankRun run =
      RunRanks({.world_size = 2, .body = "ExitsWithRank", .store_url = NewStoreUrl()});
  ASSERT_EQ(run.ranks.size(), 2u);
  EXPECT_EQ(run.ranks[0].exit_code, 10);
  EXPECT_EQ(run.ranks[1].exit_code, 11);
  EXPECT_TRUE(RanksSucceed(
      {.body = "RankTestTest.EveryCaseHasAStoreOfItsOwn", .store_url = NewStoreUrl()}));
}

TEST(RankTestTest, StoresHaveDifferentNamesInOneServer) {
  const auto first = store::ParseStoreAddress(NewStoreUrl());
  const auto second = store::ParseStoreAddress(NewStoreUrl());
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first->prefix, second->prefix);
  EXPECT_EQ(first->endpoint.unix_path, second->endpoint.unix_path);
}

// ---- Cases that fail. They are disabled; the tests below run them in a process of their own.

RANK_TEST(DISABLED_FailingTest, Check, 2) {
  EXPECT_EQ(Variable("RANK"), "0") << "only rank 0 is content";
}

RANK_TEST(DISABLED_FailingTest, NobodyIsKilled, .world_size = 2, .killed_rank = 1) {
  printf("rank %s is alive\n", Variable("RANK").c_str());
}

RANK_TEST(DISABLED_FailingTest, AnotherIsKilled, .world_size = 2, .killed_rank = 1) {
  if (Variable("RANK") == "0") kill(getpid(), SIGKILL);
  if (Variable("RANK") == "1") kill(getpid(), SIGKILL);
}

RANK_TEST(DISABLED_FailingTest, CheckBeforeAnExit, 2) {
  EXPECT_EQ(Variable("RANK"), "0") << "rank 1 leaves all the same";
  _exit(0);
}

RANK_TEST(DISABLED_FailingTest, CheckBeforeAKill, .world_size = 2, .killed_rank = 1) {
  EXPECT_EQ(Variable("RANK"), "0") << "rank 1 dies all the same";
  if (Variable("RANK") == "1") kill(getpid(), SIGKILL);
}

RANK_TEST(DISABLED_FailingTest, Skip, 2) { GTEST_SKIP() << "nobody would see it"; }

// Runs one of the cases above.
RankResult RunCase(const std::string& name) {
  const RankRun run = RunRanks({.argv = {"/proc/self/exe", "--gtest_also_run_disabled_tests",
                                         absl::StrCat("--gtest_filter=*FailingTest.", name)},
                                .environment = {{"XML_OUTPUT_FILE", ""},
                                                {"TEST_PREMATURE_EXIT_FILE", ""},
                                                {"TEST_TOTAL_SHARDS", ""},
                                                {"TEST_SHARD_INDEX", ""},
                                                {"TEST_SHARD_STATUS_FILE", ""}}});
  return run.ranks.at(0);
}

TEST(RankTestTest, AFailedCheckFailsTheCaseAndShowsTheOutputOfEveryRank) {
  const RankResult result = RunCase("Check");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output,
              AllOf(HasSubstr("rank_test_test.cc:"), HasSubstr("only rank 0 is content"),
                    HasSubstr("---- rank 0 (pid "), HasSubstr("---- rank 1 (pid "),
                    HasSubstr("exited with code 1"), HasSubstr("1 FAILED TEST")));
}

TEST(RankTestTest, ARankThatOughtToBeKilledMustBe) {
  const RankResult result = RunCase("NobodyIsKilled");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("rank 1 is alive"));
}

TEST(RankTestTest, AFailedCheckCountsHoweverTheRankEnds) {
  for (const char* name : {"CheckBeforeAnExit", "CheckBeforeAKill"}) {
    const RankResult result = RunCase(name);
    EXPECT_EQ(result.exit_code, 1) << name;
    EXPECT_THAT(result.output, HasSubstr("all the same")) << name;
  }
}

TEST(RankTestTest, ABodyMayNotSkipItself) {
  const RankResult result = RunCase("Skip");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("skipped itself; skip in a TEST that starts it"));
}

TEST(RankTestTest, NoOtherRankMayBeKilled) {
  const RankResult result = RunCase("AnotherIsKilled");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("was killed by SIGKILL"));
}

}  // namespace
}  // namespace ddp::testing
