#ifndef DDP_TESTING_NETWORK_LOOPBACK_CLIENT_H_
#define DDP_TESTING_NETWORK_LOOPBACK_CLIENT_H_

#include <string>

#include "base/unique_fd.h"

namespace ddp::testing {

// A blocking TCP client of a server on this machine. No call blocks for longer than a minute. For
// tests only.

// Connects to `port` of 127.0.0.1. Returns an invalid descriptor when no server listens there.
UniqueFd DialLoopback(int port);

// Connects to `port` of ::1. Returns an invalid descriptor when no server listens there, or this
// machine has no IPv6.
UniqueFd DialLoopback6(int port);

// Returns true when this machine has IPv6.
bool HasLoopback6();

// Sends all of `text`, or fails the test.
void SendText(const UniqueFd& socket, const std::string& text);

// Blocks until the other side closes the connection. Returns all that it has sent.
std::string ReceiveText(const UniqueFd& socket);

}  // namespace ddp::testing

#endif  // DDP_TESTING_NETWORK_LOOPBACK_CLIENT_H_
