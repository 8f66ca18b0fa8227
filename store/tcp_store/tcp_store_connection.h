#ifndef DDP_STORE_TCP_STORE_TCP_STORE_CONNECTION_H_
#define DDP_STORE_TCP_STORE_TCP_STORE_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/tcp_store/tcp_store_protocol.h"

namespace ddp::store {

// The server's end of one TCPStore client's connection. TcpStoreServer owns it. The connection
// parses the client's bytes into requests, sends replies, and chooses the events for which the
// socket is watched. It never blocks and answers no request itself.
//
// The connection reads nothing while a reply waits to be sent or a request is held back. So replies
// do not pile up for a client that does not read them.
//
// After any error the owner must drop the connection. kUnavailable: the client has closed its end
// or the connection broke, which is not worth a log line. kInvalidArgument: the client's bytes are
// not a request, or the request exceeds the limits. Others: epoll's.
//
// Not thread-safe: on the event loop's thread.
class TcpStoreConnection {
 public:
  // Called with the epoll events each time the socket is ready. It must call Advance() and may
  // destroy the connection.
  using OnReady = std::function<void(uint32_t events)>;

  // `event_loop` and `limits` are not owned and must outlive the connection.
  TcpStoreConnection(EventLoop* event_loop, UniqueFd socket, const TcpStoreLimits* limits,
                     OnReady on_ready);
  ~TcpStoreConnection();
  TcpStoreConnection(const TcpStoreConnection&) = delete;
  TcpStoreConnection& operator=(const TcpStoreConnection&) = delete;

  // Starts to watch the socket.
  absl::Status Start();

  // Sends replies that wait to be sent. If there are none, reads once. kUnavailable while a request
  // is held: then the socket is ready only when the client has closed its end.
  absl::Status Advance();

  // Returns the next request. nullopt: no request is complete, a reply waits to be sent, or a
  // request is held.
  absl::StatusOr<std::optional<TcpStoreRequest>> NextRequest();

  // Sends `bytes` after all earlier bytes. Keeps what the client does not take at once.
  absl::Status Send(const std::string& bytes);

  // Holds `request` back until Release(), and reads nothing meanwhile. CHECKs that none is held.
  absl::Status Hold(TcpStoreRequest request);
  bool is_holding() const { return held_.has_value(); }
  // Returns the held request and reads again. CHECKs that one is held.
  absl::StatusOr<TcpStoreRequest> Release();

  // Returns the bytes of unfinished and held requests and of unsent replies.
  size_t held_bytes() const;

  // Returns true when the kernel knows that the client has closed its end.
  bool HasGone() const;

  // Returns the client's address for messages; "?" when the socket has none any more.
  std::string PeerAddress() const;

 private:
  absl::Status Read();
  absl::Status Flush();
  absl::Status WatchFor(uint32_t events);

  EventLoop* const event_loop_;
  const UniqueFd socket_;
  const OnReady on_ready_;
  TcpStoreParser parser_;
  std::optional<TcpStoreRequest> held_;
  std::string output_;
  size_t sent_ = 0;          // bytes of `output_`
  bool is_writing_ = false;  // waits for EPOLLOUT
};

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_TCP_STORE_CONNECTION_H_
