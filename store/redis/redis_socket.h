#ifndef DDP_STORE_REDIS_REDIS_SOCKET_H_
#define DDP_STORE_REDIS_REDIS_SOCKET_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/unique_fd.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/tls_session.h"

namespace ddp::store {

// A socket to a Redis server: TCP, TLS or unix. It is close-on-exec, and raises no SIGPIPE. A TCP
// socket sends small writes at once and detects a vanished peer within half a minute.
//
// Each method's `endpoint` is the server's, with the host that the user named. The messages of
// errors name it. kUnavailable: the server cannot be reached, or the connection broke.
//
// Thread-compatible; but one thread may receive while another sends.
class RedisSocket {
 public:
  RedisSocket() = default;

  // Takes a connected socket without TLS.
  explicit RedisSocket(UniqueFd fd) : fd_(std::move(fd)) {}

  // Starts to connect, without blocking, to `endpoint.host`, a numeric address here, or to the unix
  // socket. Once the socket is writable, call FinishConnecting(). kInvalidArgument: the path of the
  // unix socket is too long.
  static absl::StatusOr<RedisSocket> BeginConnecting(const RedisEndpoint& endpoint);

  // Returns 0 when the connection stands, or else POLLIN or POLLOUT: what the socket must be ready
  // for before the next call. Other errors: those of TlsSession.
  absl::StatusOr<short> FinishConnecting(const RedisEndpoint& endpoint);

  // -1: none.
  int fd() const { return fd_.get(); }
  bool valid() const { return fd_.valid(); }

  // Closes it.
  void reset();

  // Makes it blocking, with a limit: Receive(kMayBlock) blocks for at most `limit`.
  absl::Status LimitBlocking(absl::Duration limit);

  // Sends as many of `bytes` as the socket takes at once and returns their number; 0: the socket
  // takes none now, and the next call must begin with the same bytes. Does not block.
  absl::StatusOr<size_t> Send(absl::string_view bytes, const RedisEndpoint& endpoint);

  // Receives bytes into `buffer`, at least kReceiveBytes, and returns their number; 0: none have
  // come. kUnavailable also when the server closed the connection.
  static constexpr size_t kReceiveBytes = 32 * 1024;
  enum class Blocking { kNever, kMayBlock };
  absl::StatusOr<size_t> Receive(absl::Span<char> buffer, Blocking blocking,
                                 const RedisEndpoint& endpoint);

  // Returns true when bytes have come. Errors: those of Receive(). No other thread may be
  // receiving.
  absl::StatusOr<bool> HasInput(const RedisEndpoint& endpoint);

  // Returns true when the connection is closed or broken, and all that came before is read. Another
  // thread may be receiving.
  bool IsBroken() const;

 private:
  UniqueFd fd_;
  absl::Duration blocking_limit_;
  std::unique_ptr<TlsSession> tls_;  // null: no TLS, or not connected yet
};

// Returns the numeric address of a TCP socket's peer: "10.0.0.1", "fd00::1"; `with_port`:
// "10.0.0.1:6379", "[fd00::1]:6379". Empty for a unix socket and for one that is not connected.
std::string PeerAddress(int fd, bool with_port = false);

// Blocks until `fd` has one of the poll(2) `events` or an error, or until `deadline`. Returns false
// at the deadline.
bool AwaitSocket(int fd, short events, absl::Time deadline);

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_SOCKET_H_
