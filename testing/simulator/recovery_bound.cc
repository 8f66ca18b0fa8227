#include "testing/simulator/recovery_bound.h"

#include <algorithm>

namespace ddp::testing {
namespace {

// A request without an answer, and a leave request: their timeouts.
constexpr int64_t kRequestsUs = 2 * 2000000;
// Time for the kernel to end processes, and for their agent to see it.
constexpr int64_t kProcessesUs = 100000;
// Number of light heartbeats between two full ones of a node: three leases less one.
constexpr int kLightPerFullMax = 17;
// Nodes per turn with which at least one is practically always due within two turns.
constexpr int kMany = 8;
// Messages that follow one from another, for the slowest of a thousand nodes.
constexpr int kMessages = 100;

bool LosesMessages(const NetworkConditions& network) {
  return network.lose_request + network.lose_reply + network.swallow > 0;
}

}  // namespace

int64_t RecoveryBoundUs(const Story& story, int nodes, bool has_begun) {
  const int64_t lease_us = story.lease_us;
  const int64_t heartbeat_us = lease_us / 6 * 11 / 10;
  const int64_t pause_us = lease_us / 6;
  const int64_t tick_us = lease_us / 12;
  const bool some_are_light = story.hosts > story.full_heartbeats;

  // Time between two full heartbeats of a node. With many nodes, some are due in each interval.
  const int turns = 1 + std::min(kLightPerFullMax, (story.hosts - 1) / story.full_heartbeats);
  const int64_t full_us = std::min(nodes < kMany * turns ? turns : 2, turns) * heartbeat_us;
  const int64_t pace_us =
      some_are_light ? lease_us / 4 * 11 / 10 : heartbeat_us;  // of a waiting node
  const int64_t lost_us = lease_us + tick_us + full_us;
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
