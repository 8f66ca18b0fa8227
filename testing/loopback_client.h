#ifndef DDP_TESTING_LOOPBACK_CLIENT_H_
#define DDP_TESTING_LOOPBACK_CLIENT_H_

#include <string>

#include "base/unique_fd.h"

namespace ddp::testing {

// A client of a TCP server on this machine, as tests need one: blocking, but no call waits for
// longer than a minute. For tests only.

// Connects to `port` of 127.0.0.1. Not valid: nobody listens there.
UniqueFd DialLoopback(int port);

// The same for ::1. Not valid: nobody listens there, or this machine has no IPv6.
UniqueFd DialLoopback6(int port);

// Whether this machine has IPv6.
bool HasLoopback6();

// Sends all of `text`, or fails the test.
void SendText(const UniqueFd& socket, const std::string& text);

// All that comes until the other side closes.
std::string ReceiveText(const UniqueFd& socket);

}  // namespace ddp::testing

#endif  // DDP_TESTING_LOOPBACK_CLIENT_H_
