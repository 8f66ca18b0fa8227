#include "elastic/timers/worker_timers.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace ddp::elastic {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1000);

std::string Line(const std::string& pid, const std::string& scope, const std::string& expiration,
                 const std::string& signal) {
  return absl::StrCat("{\"version\": 1, \"pid\": ", pid, ", \"scope_id\": ", scope,
                      ", \"expiration_time\": ", expiration, ", \"signal\": ", signal, "}");
}

TimerRequest Request(int64_t pid, const std::string& scope, int signal = SIGKILL) {
  return {.pid = pid, .scope = scope, .expiration_unix_s = 1, .signal = signal};
}

TimerRequest Release(int64_t pid, const std::string& scope) {
  return {.pid = pid, .scope = scope, .expiration_unix_s = -1};
}

TEST(TimerRequestTest, WhatTorchWrites) {
  const auto set = ParseTimerRequest(Line("4711", "\"train.py#3\"", "1763722800.25", "9"));
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->pid, 4711);
  EXPECT_EQ(set->scope, "train.py#3");
  EXPECT_EQ(set->expiration_unix_s, 1763722800.25);
  EXPECT_EQ(set->signal, SIGKILL);
  EXPECT_FALSE(set->is_release());
  const auto release = ParseTimerRequest(Line("4711", "\"train.py#3\"", "-1", "0"));
  ASSERT_TRUE(release.ok()) << release.status();
  EXPECT_TRUE(release->is_release());
  EXPECT_EQ(ParseTimerRequest(Line("1", "\"\"", "2", "-5"))->signal, 0) << "none is sent";
}

TEST(TimerRequestTest, AnythingElseIsRefused) {
  for (const std::string& line :
       {std::string(), std::string("null"), std::string("[]"), std::string("{}"),
        std::string("{\"version\": 1"), Line("0", "\"a\"", "1", "9"), Line("-7", "\"a\"", "1", "9"),
        Line("1e3", "\"a\"", "1", "9"), Line("99999999999", "\"a\"", "1", "9"),
        Line("1", "7", "1", "9"), Line("1", "\"a\"", "\"soon\"", "9"),
        Line("1", "\"a\"", "1e999", "9"), Line("1", "\"a\"", "1", "65"),
        Line("1", "\"a\"", "1", "9.5"),
        Line("1", "\"" + std::string(TimerRequest::kMaxBytes, 'a') + "\"", "1", "9"),
        std::string(R"({"version": 2, "pid": 1, "scope_id": "a", "expiration_time": 1, )"
                    R"("signal": 9})"),
        std::string(200'000, '[')}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseTimerRequest(line).status())) << line.substr(0, 80);
  }
}

TEST(WorkerTimersTest, OneThatRunsOutIsToldOnce) {
  WorkerTimers timers;
  EXPECT_EQ(timers.next_deadline(), absl::InfiniteFuture());
  ASSERT_TRUE(timers.Apply(1, Request(70, "a"), kNow + absl::Seconds(5)).ok());
  ASSERT_TRUE(timers.Apply(0, Request(60, "a"), kNow + absl::Seconds(9)).ok());
  EXPECT_EQ(timers.next_deadline(), kNow + absl::Seconds(5));
  EXPECT_TRUE(timers.TakeExpired(kNow + absl::Seconds(4)).empty());
  const std::vector<WorkerTimers::Expired> expired = timers.TakeExpired(kNow + absl::Seconds(5));
  ASSERT_EQ(expired.size(), 1U);
  EXPECT_EQ(expired[0].local_rank, 1);
  EXPECT_EQ(expired[0].scope, "a");
  EXPECT_EQ(expired[0].signal, SIGKILL);
  EXPECT_TRUE(timers.TakeExpired(kNow + absl::Seconds(6)).empty());
  EXPECT_EQ(timers.next_deadline(), kNow + absl::Seconds(9));
}

TEST(WorkerTimersTest, ReleasedOrSetAnewItDoesNotRunOut) {
  WorkerTimers timers;
  ASSERT_TRUE(timers.Apply(0, Request(60, "a"), kNow).ok());
  ASSERT_TRUE(timers.Apply(0, Request(60, "b"), kNow).ok());
  ASSERT_TRUE(timers.Apply(0, Release(60, "a"), kNow).ok());
  ASSERT_TRUE(timers.Apply(0, Release(61, "b"), kNow).ok()) << "of another process";
  ASSERT_TRUE(timers.Apply(0, Request(60, "b"), kNow + absl::Seconds(9)).ok());
  EXPECT_TRUE(timers.TakeExpired(kNow + absl::Seconds(8)).empty());
}

TEST(WorkerTimersTest, TheFirstWithASignalCountsAndTheProcessHasNoTimerAnyMore) {
  WorkerTimers timers;
  ASSERT_TRUE(timers.Apply(0, Request(60, "no signal", 0), kNow).ok());
  ASSERT_TRUE(timers.Apply(0, Request(60, "later"), kNow + absl::Seconds(2)).ok());
  ASSERT_TRUE(timers.Apply(0, Request(60, "first", SIGTERM), kNow + absl::Seconds(1)).ok());
  ASSERT_TRUE(timers.Apply(0, Request(60, "runs"), kNow + absl::Seconds(60)).ok());
  const std::vector<WorkerTimers::Expired> expired = timers.TakeExpired(kNow + absl::Seconds(2));
  ASSERT_EQ(expired.size(), 1U);
  EXPECT_EQ(expired[0].scope, "first");
  EXPECT_EQ(expired[0].signal, SIGTERM);
  EXPECT_EQ(timers.next_deadline(), absl::InfiniteFuture());
}

TEST(WorkerTimersTest, AWorkersTimersEndWithIt) {
  WorkerTimers timers;
  ASSERT_TRUE(timers.Apply(0, Request(60, "a"), kNow).ok());
  ASSERT_TRUE(timers.Apply(0, Request(61, "of its child"), kNow).ok());
  ASSERT_TRUE(timers.Apply(1, Request(70, "a"), kNow).ok());
  timers.Forget(0);
  const std::vector<WorkerTimers::Expired> expired = timers.TakeExpired(kNow);
  ASSERT_EQ(expired.size(), 1U);
  EXPECT_EQ(expired[0].local_rank, 1);
}

TEST(WorkerTimersTest, TheirNumberIsBounded) {
  WorkerTimers timers;
  for (size_t i = 0; i < WorkerTimers::kMaxTimers; ++i) {
    ASSERT_TRUE(timers.Apply(0, Request(60, absl::StrCat(i)), kNow).ok());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(timers.Apply(0, Request(60, "more"), kNow)));
  EXPECT_TRUE(timers.Apply(0, Request(60, "7"), kNow).ok()) << "it is there";
}

}  // namespace
}  // namespace ddp::elastic
