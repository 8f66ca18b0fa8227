#ifndef DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_
#define DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/rendezvous_scripts.h"

namespace ddp::elastic {

// Schedules the heartbeats of one member of a round: when the next is due, and its arguments. Pure;
// owned by RendezvousCore.
//
// Each `share` argument is a random number in [0, 1); it spreads the nodes' heartbeats over time.
//
// Thread-compatible.
class HeartbeatPlan {
 public:
  struct Rhythm {
    absl::Duration interval = absl::Milliseconds(500);
    absl::Duration lease = absl::Seconds(3);
    int nodes = 1;  // number of nodes in the round
  };

  // Begins a round: clears the reported step and schedules the first heartbeat.
  void Start(const Rhythm& rhythm, absl::Time now, double row_share, double share);

  // Sets the content of the next heartbeats. The row and the busy time are sent only when they have
  // changed, and at limited intervals: the rows of all nodes must not flood the server.
  void SetReport(const NodeReport& report) { report_ = report; }

  // Makes the next heartbeats send the row and the busy time again: the server lost them.
  void ForgetWhatWasSaid();

  // When the next heartbeat is due; infinite: no round has begun.
  absl::Time due() const { return due_; }
  // Makes the next heartbeat due at `now`.
  void BeDueAt(absl::Time now) { due_ = now; }

  // Returns the report's arguments of heartbeat.lua, for a heartbeat that is sent at `now`.
  std::vector<ScriptArgument> Compose(absl::Time now);

  // Records the answer to the last heartbeat; the next one is due in about an interval.
  void OnAnswer(absl::Time now, double share);

 private:
  Rhythm rhythm_;
  absl::Time due_ = absl::InfiniteFuture();

  NodeReport report_;
  absl::Time row_at_ = absl::InfinitePast();  // earliest time to send the row and the busy time
  std::string row_said_;
  int64_t busy_us_said_ = -1;
  int64_t max_world_said_ = 0;
  bool at_work_said_ = false;

  // Sent and not answered yet; empty and -1: not sent.
  std::string row_sent_;
  int64_t busy_us_sent_ = -1;
  int64_t max_world_sent_ = 0;
  std::string at_work_sent_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_
