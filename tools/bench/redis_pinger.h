#ifndef DDP_TOOLS_BENCH_REDIS_PINGER_H_
#define DDP_TOOLS_BENCH_REDIS_PINGER_H_

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "elastic/rendezvous/heartbeat_plan.h"

namespace ddp::bench {

// The rhythm of heartbeats, which is that of the PINGs too: each connection says something once per
// interval, those of one slot together, as HeartbeatPlan has it. Slots are those of a clock of this
// machine, so all processes have the same.
struct BeatRhythm {
  static constexpr int kSlotsPerInterval = elastic::HeartbeatPlan::kSlotsPerInterval;

  absl::Duration interval = absl::Milliseconds(500);
  absl::Duration slot() const { return interval / kSlotsPerInterval; }
};

// Sends PINGs over connections of this process to a Redis server, and reads the answers, in the
// rhythm of heartbeats: the least that a server does for as many requests on as many connections.
//
// It borrows the sockets of others, who must do nothing with them from Create() until Run() is over
// and must have asked for nothing that is not answered within a moment. A socket in which an answer
// waits for its owner is left alone.
//
// Thread-compatible. Blocks its caller.
class RedisPinger {
 public:
  // Takes all TCP sockets of this process that are connected to `port`, but for those in use, for
  // which it waits a moment.
  static absl::StatusOr<RedisPinger> Create(int port, const BeatRhythm& rhythm);

  int connections() const { return static_cast<int>(sockets_.size()); }

  // Returns once `go_on` is false, it is asked once per slot, and all PINGs are answered: how many.
  // kInternal: something else came. kDeadlineExceeded: no answer.
  absl::StatusOr<int64_t> Run(const std::function<bool()>& go_on);

 private:
  struct Socket {
    int fd = -1;
    bool asked = false;
  };

  RedisPinger(std::vector<Socket> sockets, UniqueFd epoll, const BeatRhythm& rhythm)
      : sockets_(std::move(sockets)), epoll_(std::move(epoll)), rhythm_(rhythm) {}

  absl::Status AskSlot(int64_t slot);
  absl::Status ReadUntil(absl::Time deadline, bool until_answered);
  absl::Status Read(Socket& socket);

  std::vector<Socket> sockets_;
  UniqueFd epoll_;
  BeatRhythm rhythm_;
  MonotonicClock clock_;
  int64_t asked_ = 0;
  int64_t answered_ = 0;
};

}  // namespace ddp::bench

#endif  // DDP_TOOLS_BENCH_REDIS_PINGER_H_
