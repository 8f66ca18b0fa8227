// Sockets to a Redis server, with deadlines.
#ifndef DDP_STORE_REDIS_SOCKET_H_
#define DDP_STORE_REDIS_SOCKET_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "store/redis_endpoint.h"

namespace ddp::store {

// A connected, non-blocking, close-on-exec socket. Of a name with several addresses, the first that
// answers. A TCP socket sends small writes at once and finds a vanished peer within half a minute.
// `deadline` is a time of MonotonicClock.
//
// kUnavailable: not reachable, or not by `deadline`; the reason is in the message.
absl::StatusOr<UniqueFd> ConnectSocket(const RedisEndpoint& endpoint, absl::Time deadline);

// The same for who must not wait, in two steps: begins to connect to an address (`endpoint.host` is
// a number, or it is a unix socket); and, once that is writable, says what came of it.
absl::StatusOr<UniqueFd> BeginConnecting(const RedisEndpoint& endpoint);
absl::Status FinishConnecting(int fd, const RedisEndpoint& endpoint);

// The address at the other end of a TCP socket, as a number: "10.0.0.1", "fd00::1". Empty: a unix
// socket, or not connected.
std::string PeerAddress(int fd);

// Makes a non-blocking socket one whose recv() blocks, for at most `limit`, unless it is told
// MSG_DONTWAIT.
absl::Status LimitBlocking(int fd, absl::Duration limit);

// Waits until `fd` has one of the poll(2) events or an error, or until `deadline`. Returns false at
// the deadline.
bool AwaitSocket(int fd, short events, absl::Time deadline);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_SOCKET_H_
