#ifndef DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_
#define DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/rendezvous/rendezvous.h"

namespace ddp::elastic {

// Schedules the heartbeats of one member of a round: when the next is due, whether it is light or
// full, and its arguments. Pure; owned by RendezvousCore.
//
// A light heartbeat costs the server a third of a full one. Only full heartbeats carry a node's
// progress, and only their scripts evict lost nodes. So the nodes of a job together send at least
// half of Rhythm::full_heartbeats full ones per interval. Each node sends at least one in three
// leases.
//
// Each `share` argument is a random number in [0, 1); it spreads the nodes' heartbeats over time.
// The spread is in slots: an interval has kSlotsPerInterval slots by the server's clock, and a
// heartbeat is due at the start of one. Waking an idle server costs it more than a heartbeat does,
// so one wake-up serves the heartbeats of many nodes.
//
// Thread-compatible.
class HeartbeatPlan {
 public:
  // A slot is 20 ms by default. With 10,000 nodes, 400 share a slot and keep a server busy for a
  // few milliseconds.
  static constexpr int kSlotsPerInterval = 25;

  struct Rhythm {
    absl::Duration interval = absl::Milliseconds(500);
    absl::Duration lease = absl::Seconds(3);
    int nodes = 1;  // number of nodes in the round
    int full_heartbeats = 1;
  };

  // Begins a round: clears the reported step and schedules the first heartbeat.
  void Start(const Rhythm& rhythm, absl::Time now, double row_share, double share);

  // Sets the content of the next full heartbeats. The row and the busy time are sent only when they
  // have changed, and at limited intervals: the rows of all nodes must not flood the server.
  void SetReport(const NodeReport& report) { report_ = report; }

  // Makes the next full heartbeats send the row and the busy time again: the server lost them.
  void ForgetWhatWasSaid();

  // When the next heartbeat is due; infinite: no round has begun.
  absl::Time due() const { return due_; }
  bool next_is_light() const { return light_left_ > 0; }

  // Makes the next heartbeat a full one. BeInFullAt also makes it due at `now`.
  void BeInFull() {
    light_left_ = 0;
    out_of_turn_ = true;
  }
  void BeInFullAt(absl::Time now);

  // Returns ARGV 10 to 14 of heartbeat.lua, for a full heartbeat that is sent at `now`.
  std::vector<std::string> Compose(absl::Time now);

  // Records the answer to the last heartbeat; the next one is due in about an interval.
  // `server_now` is the server's time, if the answer to a full heartbeat told it.
  void OnLightAnswer(absl::Time now, double share);
  void OnFullAnswer(absl::Time now, std::optional<absl::Time> server_now, double share);

 private:
  int LightPerFull() const;
  void CompareClocks(absl::Time now, absl::Time server_now);
  absl::Time NextDue(absl::Time now, double share) const;

  Rhythm rhythm_;
  std::optional<absl::Duration> server_ahead_;  // server's clock minus this node's
  absl::Time compared_at_ = absl::UnixEpoch();
  absl::Time due_ = absl::InfiniteFuture();
  int light_left_ = 0;        // light heartbeats before the next full one
  bool out_of_turn_ = false;  // the next full heartbeat was requested by BeInFull

  NodeReport report_;
  absl::Time row_at_ = absl::InfinitePast();  // earliest time to send the row and the busy time
  std::string row_said_;
  int64_t busy_us_said_ = -1;

  // Sent and not answered yet; empty and -1: not sent.
  std::string row_sent_;
  int64_t busy_us_sent_ = -1;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_
