#ifndef DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_
#define DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/rendezvous/rendezvous.h"

namespace ddp::elastic {

// When a member of a round is heard next, whether lightly or in full, and what it says then. Pure;
// a part of RendezvousCore.
//
// A light heartbeat costs the server a third of a full one, but only full ones say how far the node
// is, and it is their scripts that give up lost nodes. So the nodes of a job together send at least
// half of Rhythm::full_heartbeats full ones per interval, and each node at least one in three
// leases.
//
// Every `share`, drawn from [0, 1), spreads what all nodes would else do in the same moment. But
// not evenly: heartbeats are due at the beginning of one of the slots that the server's clock cuts
// an interval into. A server that is idle must be woken for a heartbeat, which costs it more than
// the heartbeat itself; so it is woken once for those of many nodes.
//
// Thread-compatible.
class HeartbeatPlan {
 public:
  // 20 ms each by default, so that of 10,000 nodes 400 share one, which keep a server busy for a
  // few milliseconds.
  static constexpr int kSlotsPerInterval = 25;

  struct Rhythm {
    absl::Duration interval = absl::Milliseconds(500);
    absl::Duration lease = absl::Seconds(3);
    int nodes = 1;  // in the round
    int full_heartbeats = 1;
  };

  // A round begins. What is said of steps is about this one from now on.
  void Start(const Rhythm& rhythm, absl::Time now, double row_share, double share);

  // What the next full heartbeats say; the row and the busy time only when they have changed, and
  // so seldom that the rows of all nodes do not flood the server.
  void SetReport(const NodeReport& report) { report_ = report; }

  // The server has forgotten what it was told.
  void ForgetWhatWasSaid();

  // When the next one is due; infinite: no round has begun.
  absl::Time due() const { return due_; }
  bool next_is_light() const { return light_left_ > 0; }

  // Whatever comes next is a full one; and is due at once.
  void BeInFull() {
    light_left_ = 0;
    out_of_turn_ = true;
  }
  void BeInFullAt(absl::Time now);

  // ARGV 10 to 14 of heartbeat.lua, for the full heartbeat that is sent now.
  std::vector<std::string> Compose(absl::Time now);

  // The one that was sent is answered: the next is due in about an interval. A full one may have
  // told the server's time.
  void OnLightAnswer(absl::Time now, double share);
  void OnFullAnswer(absl::Time now, std::optional<absl::Time> server_now, double share);

 private:
  int LightPerFull() const;
  void CompareClocks(absl::Time now, absl::Time server_now);
  absl::Time NextDue(absl::Time now, double share) const;

  Rhythm rhythm_;
  std::optional<absl::Duration> server_ahead_;  // of our clock
  absl::Time compared_at_ = absl::UnixEpoch();
  absl::Time due_ = absl::InfiniteFuture();
  int light_left_ = 0;        // that come before the next full one
  bool out_of_turn_ = false;  // the next full one was called for

  NodeReport report_;
  absl::Time row_at_ = absl::InfinitePast();  // not before
  std::string row_said_;
  int64_t busy_us_said_ = -1;

  // On its way; empty and -1: not said.
  std::string row_sent_;
  int64_t busy_us_sent_ = -1;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_HEARTBEAT_PLAN_H_
