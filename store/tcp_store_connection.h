#ifndef DDP_STORE_TCP_STORE_CONNECTION_H_
#define DDP_STORE_TCP_STORE_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/tcp_store_protocol.h"

namespace ddp::store {

// The server's end of one TCPStore client's connection: cuts what comes into requests, sends
// replies, and knows what the socket is watched for. It never blocks and decides nothing.
//
// One thing at a time, so that what a client makes us hold is bounded by what it has sent: while a
// reply waits to be sent, or a request is held back, nothing is read.
//
// Every error means that the connection is to be dropped. kUnavailable: the client has gone, which
// is nothing to tell. kInvalidArgument: what it sent is no request. Others: epoll's.
//
// Not thread-safe: on the event loop's thread.
class TcpStoreConnection {
 public:
  // Called with the epoll events each time the socket is ready; it is to call Advance(). It may
  // destroy the connection.
  using OnReady = std::function<void(uint32_t events)>;

  // `event_loop` and `limits` are not owned and must outlive the connection.
  TcpStoreConnection(EventLoop* event_loop, UniqueFd socket, const TcpStoreLimits* limits,
                     OnReady on_ready);
  ~TcpStoreConnection();
  TcpStoreConnection(const TcpStoreConnection&) = delete;
  TcpStoreConnection& operator=(const TcpStoreConnection&) = delete;

  // Begins to watch the socket.
  absl::Status Start();

  // Sends what waits to be sent, or else reads once what has come.
  absl::Status Advance();

  // The next request; nullopt: none is complete, or it is not its turn yet.
  absl::StatusOr<std::optional<TcpStoreRequest>> NextRequest();

  // Sends `bytes` after all that was sent before, as soon as the client takes them.
  absl::Status Send(const std::string& bytes);

  // Holds `request` back until Release(): until then only the client's going is looked for.
  absl::Status Hold(TcpStoreRequest request);
  bool is_holding() const { return held_.has_value(); }
  // The request that is held; CHECKs that one is. The connection goes on as before Hold().
  absl::StatusOr<TcpStoreRequest> Release();

  // What it holds of requests that are not finished and of replies that are not sent.
  size_t held_bytes() const;

  // Whether the client has closed its end, as far as the kernel knows.
  bool HasGone() const;

  // The client's address, for messages; "?" when it has none any more.
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
  size_t sent_ = 0;          // of `output_`
  bool is_writing_ = false;  // waits for EPOLLOUT
};

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_CONNECTION_H_
