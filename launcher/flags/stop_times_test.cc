#include "launcher/flags/stop_times.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "absl/time/time.h"
#include "elastic/job/job_spec.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/host_resources.h"

namespace ddp::launcher {
namespace {

elastic::AgentTimes Read(const std::map<std::string, std::string>& values,
                         const HostResources& host) {
  GivenFlags given;
  for (const auto& [name, value] : values) given[name] = {.value = value, .spelled = name};
  elastic::AgentTimes times;
  const absl::Status status = ReadStopTimes(FlagReader(given), host, times);
  EXPECT_TRUE(status.ok()) << status;
  return times;
}

TEST(StopTimesTest, OfAKnownGraceTheAgentKeepsTwoSeconds) {
  const std::map<std::string, std::string> grace = {{"termination-grace", "120"}};
  for (const bool is_pod : {false, true}) {
    const elastic::AgentTimes times = Read(grace, {.is_kubernetes_pod = is_pod});
    EXPECT_EQ(times.WorkersShareOfGrace(), absl::Seconds(118));
    EXPECT_EQ(times.shutdown_timeout, absl::Seconds(30));  // when nodes come or go
  }
  EXPECT_EQ(Read({{"termination-grace", "3"}}, {}).WorkersShareOfGrace(), absl::Seconds(1.5));
}

// The grace of a pod is likely the default. It may be longer, so progress extends the timeout all
// the same.
TEST(StopTimesTest, InAPodTheTimeoutIsShorterThanTheDefaultGrace) {
  const HostResources pod = {.is_kubernetes_pod = true};
  EXPECT_EQ(Read({}, pod).shutdown_timeout, absl::Seconds(28));
  EXPECT_EQ(Read({}, pod).termination_grace, absl::ZeroDuration());
  EXPECT_EQ(Read({{"shutdown-timeout", "30"}}, pod).shutdown_timeout, absl::Seconds(30));
}

TEST(StopTimesTest, AnUninterruptibleSleepMayBeEndless) {
  EXPECT_EQ(Read({}, {}).uninterruptible_timeout, absl::ZeroDuration());
  EXPECT_EQ(Read({{"uninterruptible-timeout", "-1"}}, {}).uninterruptible_timeout,
            absl::ZeroDuration());
  EXPECT_EQ(Read({{"uninterruptible-timeout", "1.5"}}, {}).uninterruptible_timeout,
            absl::Seconds(1.5));
}

}  // namespace
}  // namespace ddp::launcher
