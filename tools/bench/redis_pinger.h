#ifndef DDP_TOOLS_BENCH_REDIS_PINGER_H_
#define DDP_TOOLS_BENCH_REDIS_PINGER_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp::bench {

// Sends PINGs over connections of this process to a Redis server, and reads the replies. Each
// connection sends once per interval, unless its last PING is not answered yet. The times of the
// connections are spread evenly over the interval, about as those of heartbeats are. The cost of
// the PINGs is the least that a server can spend on as many requests over as many connections.
//
// The pinger borrows the sockets of other objects. Their owners must not use them from the
// constructor until Run() returns, and every request that they sent before must be answered within
// 300 ms. A socket with an unread reply for its owner is left alone.
//
// Thread-compatible. Blocks its caller.
class RedisPinger {
 public:
  // Waits 300 ms, and then takes all IPv4 TCP sockets of this process that are connected to `port`
  // and have nothing to read.
  RedisPinger(int port, absl::Duration interval);

  int connections() const { return static_cast<int>(sockets_.size()); }

  // Sends PINGs until `go_on`, which is called before each PING, returns false and all PINGs are
  // answered. Returns the number of answered PINGs. kFailedPrecondition: there is no connection.
  // kInternal: a system call failed, or the received bytes are not the reply to a PING.
  // kDeadlineExceeded: a PING was not answered within 10 s of the last one.
  absl::StatusOr<int64_t> Run(const std::function<bool()>& go_on);

 private:
  struct Socket {
    int fd = -1;
    bool is_asked = false;
  };

  // Reads the reply to the last PING, if it has come.
  absl::Status Read(Socket& socket);

  std::vector<Socket> sockets_;
  absl::Duration interval_;
  int64_t answered_ = 0;
};

}  // namespace ddp::bench

#endif  // DDP_TOOLS_BENCH_REDIS_PINGER_H_
