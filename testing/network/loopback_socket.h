#ifndef DDP_TESTING_NETWORK_LOOPBACK_SOCKET_H_
#define DDP_TESTING_NETWORK_LOOPBACK_SOCKET_H_

#include "base/unique_fd.h"

namespace ddp::testing {

// LoopbackSocket is a TCP socket at a free port of 127.0.0.1. No other program gets the port while
// the socket is open. For tests only.
struct LoopbackSocket {
  UniqueFd fd;
  int port = 0;

  // Returns true when a client has connected to a socket that listens. Never blocks.
  bool HasClient() const;
};

// Returns a socket on which no process listens: connections are refused.
LoopbackSocket BindLoopback();

// Returns a socket that listens, so that the kernel accepts connections. No process answers them.
LoopbackSocket ListenOnLoopback();

}  // namespace ddp::testing

#endif  // DDP_TESTING_NETWORK_LOOPBACK_SOCKET_H_
