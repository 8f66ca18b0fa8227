#include "elastic/agent/failed_workers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "absl/time/time.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::elastic {
namespace {

using ::testing::ElementsAre;

const std::set<int> kNobody;

// The ranks of this node begin at 4.
WorkerFailure Failure(int local_rank) {
  WorkerFailure failure;
  failure.rank = 4 + local_rank;
  failure.local_rank = local_rank;
  failure.status = {.exit_code = 1};
  return failure;
}

WorkerFailure Victim(int local_rank) {
  WorkerFailure failure = Failure(local_rank);
  failure.is_victim = true;
  return failure;
}

WorkerFailure Late(int local_rank) {
  WorkerFailure failure = Failure(local_rank);
  failure.was_stopped = true;
  return failure;
}

// Returns the local rank; -1 for null.
int RankOf(const WorkerFailure* failure) { return failure == nullptr ? -1 : failure->local_rank; }

std::vector<int> RanksOf(const std::vector<WorkerFailure>& failures) {
  std::vector<int> ranks;
  for (const WorkerFailure& failure : failures) ranks.push_back(failure.local_rank);
  return ranks;
}

TEST(FailedWorkersTest, TheFirstIsReportedAndNoOther) {
  FailedWorkers failures;
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), -1);
  failures.Add(Failure(2));
  failures.Add(Failure(0));
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), 2);
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), -1);
}

TEST(FailedWorkersTest, BehindAVictimTheFirstThatIsNoneIsReportedToo) {
  FailedWorkers failures;
  failures.Add(Victim(0));
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), 0);
  failures.Add(Victim(1));
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), -1) << "one victim is enough";
  failures.Add(Failure(2));
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), 2);
  failures.Add(Failure(3));
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), -1);
}

TEST(FailedWorkersTest, OneThatHangsIsWaitedForByThoseBehindIt) {
  FailedWorkers failures;
  failures.Add(Failure(1));
  failures.Add(Failure(0));
  EXPECT_EQ(RankOf(failures.TakeNextReport({1, 3}).failure), -1);
  EXPECT_FALSE(failures.Complete(3, {.signal = 9}));
  EXPECT_TRUE(failures.Complete(1, {.signal = 9, .error_file = "error.json"}));
  const WorkerFailure* const told = failures.TakeNextReport({3}).failure;
  ASSERT_EQ(RankOf(told), 1);
  EXPECT_EQ(told->status.signal, 9);
  EXPECT_EQ(told->error_file, "error.json");
}

TEST(FailedWorkersTest, AVictimIsReportedBeforeOneThatStillHangs) {
  FailedWorkers failures;
  failures.Add(Victim(0));
  failures.Add(Failure(1));
  EXPECT_EQ(RankOf(failures.TakeNextReport({1}).failure), 0);
  EXPECT_EQ(RankOf(failures.TakeNextReport({1}).failure), -1);
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), 1);
}

TEST(FailedWorkersTest, NobodyIsReportedWhereNoneIsWantedAnyMore) {
  FailedWorkers failures;
  failures.Add(Failure(0));
  failures.StopReports();
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), -1);
}

TEST(FailedWorkersTest, TheRootCauseByNameAndByOrder) {
  FailedWorkers failures;
  EXPECT_EQ(failures.First(), nullptr);
  EXPECT_EQ(failures.FirstOwn(), nullptr);
  failures.Add(Victim(0));
  failures.Add(Late(1));
  EXPECT_EQ(failures.FirstOwn(), nullptr);
  failures.Add(Failure(2));
  EXPECT_EQ(RankOf(failures.First()), 0);
  EXPECT_EQ(RankOf(failures.FirstOwn()), 2);
  EXPECT_EQ(RankOf(failures.CalledBy("rank 5 exited with code 1")), 1);
  EXPECT_EQ(RankOf(failures.CalledBy("rank 54 exited with code 1")), -1);
  EXPECT_EQ(RankOf(failures.CalledBy("node a was lost")), -1);
}

WorkerFailure Said(WorkerFailure failure, int second) {
  failure.said_at = absl::FromUnixSeconds(second);
  return failure;
}

TEST(FailedWorkersTest, TheEarliestErrorFileNamesTheRootCause) {
  FailedWorkers failures;
  EXPECT_FALSE(failures.CameFirst(Said(Failure(0), 1))) << "nothing came after it";
  failures.Add(Said(Failure(1), 200));
  const FailedWorkers::Report first = failures.TakeNextReport(kNobody);
  EXPECT_EQ(RankOf(first.failure), 1);
  EXPECT_EQ(first.instead_of, -1);
  EXPECT_FALSE(failures.CameFirst(Failure(0))) << "no file says so";
  EXPECT_FALSE(failures.CameFirst(Said(Failure(0), 200))) << "the same second";
  EXPECT_FALSE(failures.CameFirst(Said(Victim(0), 100))) << "a peer failed before it";
  EXPECT_TRUE(failures.CameFirst(Said(Failure(0), 199)));
  failures.Add(Said(Failure(3), 201));
  failures.Add(Said(Victim(2), 50));
  EXPECT_EQ(RankOf(failures.FirstOwn()), 1);
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), -1);
  failures.Add(Said(Failure(0), 100));
  EXPECT_EQ(RankOf(failures.FirstOwn()), 0);
  const FailedWorkers::Report earlier = failures.TakeNextReport(kNobody);
  EXPECT_EQ(RankOf(earlier.failure), 0);
  EXPECT_EQ(earlier.instead_of, 5);
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), -1);
  EXPECT_THAT(RanksOf(failures.InOrder(failures.FirstOwn())), ElementsAre(0, 1, 3, 2));
}

TEST(FailedWorkersTest, WithoutAFileTheTimeIsTheOneAtWhichTheAgentSawTheEnd) {
  FailedWorkers failures;
  WorkerFailure killed = Failure(0);
  killed.wall_time = absl::FromUnixSeconds(100) + absl::Milliseconds(900);
  failures.Add(killed);
  EXPECT_FALSE(failures.CameFirst(Said(Failure(1), 100))) << "files have whole seconds";
  EXPECT_TRUE(failures.CameFirst(Said(Failure(1), 99)));
}

TEST(FailedWorkersTest, AnEarlierFailureThanAVictimsIsItsCause) {
  FailedWorkers failures;
  failures.Add(Said(Victim(1), 200));
  EXPECT_TRUE(failures.CameFirst(Said(Failure(0), 199)));
  failures.Add(Said(Failure(0), 199));
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), 1);
  EXPECT_EQ(RankOf(failures.TakeNextReport(kNobody).failure), 0);
}

TEST(FailedWorkersTest, PeopleReadOfTheRootCauseFirstAndOfWhoWasStoppedLast) {
  FailedWorkers failures;
  EXPECT_TRUE(failures.empty());
  failures.AddStopped(Late(5));
  EXPECT_FALSE(failures.empty());
  failures.Add(Late(4));
  failures.Add(Victim(3));
  failures.Add(Failure(2));
  failures.Add(Late(1));
  failures.Add(Failure(0));
  EXPECT_THAT(RanksOf(failures.InOrder(nullptr)), ElementsAre(2, 0, 3, 4, 1, 5));
  const std::vector<WorkerFailure> ordered =
      failures.InOrder(failures.CalledBy("rank 5 exited with code 1"));
  EXPECT_THAT(RanksOf(ordered), ElementsAre(1, 2, 0, 3, 4, 5));
  EXPECT_FALSE(ordered[0].was_stopped) << "nobody's but its own doing, after all";
}

}  // namespace
}  // namespace ddp::elastic
