// Sockets to a Redis server, with deadlines.
#ifndef DDP_STORE_REDIS_REDIS_SOCKET_H_
#define DDP_STORE_REDIS_REDIS_SOCKET_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/unique_fd.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::store {

// Starts to connect a non-blocking, close-on-exec socket. `endpoint.host` must be a numeric
// address, or the endpoint a unix socket. Once the socket is writable, FinishConnecting() returns
// the result. A TCP socket then sends small writes at once and detects a vanished peer within half
// a minute.
//
// kUnavailable: the server cannot be reached; the message has the reason.
// kInvalidArgument: the path of the unix socket is too long.
absl::StatusOr<UniqueFd> BeginConnecting(const RedisEndpoint& endpoint);
absl::Status FinishConnecting(int fd, const RedisEndpoint& endpoint);

// Returns the numeric address of a TCP socket's peer: "10.0.0.1", "fd00::1". Empty for a unix
// socket and for a socket that is not connected.
std::string PeerAddress(int fd);

// Makes a non-blocking socket blocking, with a limit: recv() blocks for at most `limit`, and not at
// all with MSG_DONTWAIT.
absl::Status LimitBlocking(int fd, absl::Duration limit);

// Sends as many of `bytes` as the socket takes at once and returns their number; 0: the socket
// takes none now. Does not block. Raises no SIGPIPE. kUnavailable: the connection broke; the
// message names the server.
absl::StatusOr<size_t> SendSome(int fd, absl::string_view bytes, const RedisEndpoint& endpoint);

// Receives bytes into `buffer` by recv(2) with `flags` and returns their number; 0: none have come.
// kUnavailable: the server closed the connection, or the connection broke; the message names the
// server.
absl::StatusOr<size_t> ReceiveSome(int fd, absl::Span<char> buffer, int flags,
                                   const RedisEndpoint& endpoint);

// Blocks until `fd` has one of the poll(2) `events` or an error, or until `deadline`. Returns false
// at the deadline.
bool AwaitSocket(int fd, short events, absl::Time deadline);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_SOCKET_H_
