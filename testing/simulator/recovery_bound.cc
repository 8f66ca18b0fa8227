#include "testing/simulator/recovery_bound.h"

#include <algorithm>

namespace ddp::testing {
namespace {

// A request without an answer, and a leave request: their timeouts.
constexpr int64_t kRequestsUs = 2 * 2000000;
// Time for the kernel to end processes, and for their agent to see it.
constexpr int64_t kProcessesUs = 100000;
// With more waiting nodes, each repeats its join once per quarter of the lease.
constexpr int kWaitingAtFullPaceMax = 32;
// Messages that follow one from another, for the slowest of a thousand nodes.
constexpr int kMessages = 100;

bool LosesMessages(const NetworkConditions& network) {
  return network.lose_request + network.lose_reply + network.swallow > 0;
}

}  // namespace

int64_t RecoveryBoundUs(const Story& story, bool has_begun) {
  const int64_t lease_us = story.lease_us;
  const int64_t heartbeat_us = lease_us / 6 * 11 / 10;
  const int64_t pause_us = lease_us / 6;
  const int64_t tick_us = lease_us / 12;
  const int64_t pace_us =  // of a waiting node
      story.hosts > kWaitingAtFullPaceMax ? lease_us / 4 * 11 / 10 : heartbeat_us;
  const int64_t lost_us = lease_us + tick_us + heartbeat_us;
  const int64_t told_us = heartbeat_us + pause_us;
  const int64_t ended_us = story.shutdown_timeout_us + story.fault_grace_us + kProcessesUs;
  const int64_t back_us = 2 * pause_us + 2 * pace_us;
  int64_t bound_us = lost_us + told_us + ended_us + kRequestsUs + back_us;
  bound_us += kMessages * static_cast<int64_t>(story.network.delay_mean_us);
  // Room for a dozen tries in a row, or for a silence that looks like an outage of the store.
  if (LosesMessages(story.network)) bound_us += 2 * lease_us;
  bound_us += HangLimitUs(story) + story.hang_floor_us / 2;
  if (story.slow_stray_chance > 0) {
    bound_us += std::min(story.slow_stray_us, story.kill_timeout_us);
  }
  if (story.slow_exec_chance > 0) bound_us += story.nproc_max * story.slow_exec_us;
  if (!has_begun) bound_us += story.last_call_us;
  return bound_us;
}

}  // namespace ddp::testing
