#include "launcher/meeting/server_shutdown.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/time/time.h"
#include "elastic/rendezvous/job_reader.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kLease = absl::Seconds(3);
constexpr absl::Duration kShutdownTimeout = absl::Seconds(30);
constexpr uint64_t kOurs = 4;

// A job of at least two nodes, of which `live` are left without this one.
elastic::JobRecord Job(const std::string& state, int live, uint64_t generation = kOurs) {
  elastic::JobRecord job;
  job.state = state;
  job.generation = generation;
  job.min_nodes = 2;
  for (int i = 0; i < live; ++i) job.nodes.emplace_back().lease_left_s = 2;
  job.nodes.emplace_back().lease_left_s = -1;
  job.nodes_total = static_cast<int64_t>(job.nodes.size());
  return job;
}

ServerShutdown Decide(const elastic::JobRecord& job, absl::Duration waited = absl::ZeroDuration()) {
  return DecideServerShutdown(job, kOurs, waited, kLease, {.shutdown_timeout = kShutdownTimeout});
}

TEST(ServerShutdownTest, NobodyIsLeft) {
  for (const char* state : {"forming", "running", "draining", "succeeded", "closed"}) {
    EXPECT_EQ(Decide(Job(state, 0)), ServerShutdown::kEnd) << state;
  }
}

TEST(ServerShutdownTest, OthersInAGenerationOfTheirOwnNeedNoStore) {
  EXPECT_EQ(Decide(Job("running", 2, kOurs + 1)), ServerShutdown::kEnd);
  EXPECT_EQ(Decide(Job("draining", 2, kOurs + 1)), ServerShutdown::kEnd);
}

TEST(ServerShutdownTest, WhoeverDrainsIsWaitedForAsLongAsItMayTake) {
  EXPECT_EQ(Decide(Job("draining", 1)), ServerShutdown::kWait);
  EXPECT_EQ(Decide(Job("draining", 1), kShutdownTimeout), ServerShutdown::kWait);
  EXPECT_EQ(Decide(Job("draining", 1), 10 * kShutdownTimeout),
            ServerShutdown::kWait);  // a long save
  EXPECT_EQ(Decide(Job("draining", 1), 10 * kShutdownTimeout + 2 * kLease), ServerShutdown::kClose);
}

TEST(ServerShutdownTest, TooFewForAGenerationAreToldAtOnce) {
  EXPECT_EQ(Decide(Job("forming", 1)), ServerShutdown::kClose);
}

TEST(ServerShutdownTest, EnoughForAGenerationGetTheTimeToFormIt) {
  EXPECT_EQ(Decide(Job("forming", 2)), ServerShutdown::kWait);
  EXPECT_EQ(Decide(Job("forming", 2), kShutdownTimeout + 2 * kLease), ServerShutdown::kClose);
}

TEST(ServerShutdownTest, AnEndIsHeardWithinTwoLeases) {
  EXPECT_EQ(Decide(Job("succeeded", 3)), ServerShutdown::kWait);
  EXPECT_EQ(Decide(Job("succeeded", 3), 2 * kLease), ServerShutdown::kEnd);
}

// This node has ended its work, and its user wants it to end while others still work.
TEST(ServerShutdownTest, OthersThatWorkOnInOurGenerationAreNotHeldUp) {
  EXPECT_EQ(Decide(Job("running", 3)), ServerShutdown::kWait);
  EXPECT_EQ(Decide(Job("running", 3), 2 * kLease), ServerShutdown::kEnd);
}

TEST(ServerShutdownTest, NodesThatWereNotLookedAtCount) {
  elastic::JobRecord job = Job("forming", 1);
  job.nodes_total += 1;
  EXPECT_EQ(Decide(job), ServerShutdown::kWait);
}

TEST(ServerShutdownTest, OfAKnownGraceTheReportKeepsItsShare) {
  const absl::Time signalled_at = absl::FromUnixSeconds(1'000);
  EXPECT_EQ(ServerShutdownDeadline(signalled_at, {}), absl::InfiniteFuture());
  const elastic::AgentTimes times = {.termination_grace = absl::Seconds(60)};
  EXPECT_EQ(ServerShutdownDeadline(signalled_at, times), signalled_at + absl::Seconds(58));
  EXPECT_EQ(ServerShutdownDeadline(absl::InfiniteFuture(), times), absl::InfiniteFuture());
}

TEST(ServerShutdownTest, ManyNodesAreLookedAtSeldom) {
  EXPECT_EQ(PauseBetweenLooks(0), absl::Milliseconds(20));
  EXPECT_EQ(PauseBetweenLooks(8), absl::Milliseconds(20));
  EXPECT_EQ(PauseBetweenLooks(1000), absl::Seconds(1));
}

}  // namespace
}  // namespace ddp::launcher
