#ifndef DDP_STORE_TCP_STORE_TCP_STORE_LISTENER_H_
#define DDP_STORE_TCP_STORE_TCP_STORE_LISTENER_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"

namespace ddp::store {

// The listening port of a TCPStore server. The event loop calls it when clients connect; it accepts
// them and passes each client's socket to a callback. When accepting fails, as it does when the
// process has no descriptor left, the event loop tries again after 100 ms. The clients wait in the
// kernel.
//
// Not thread-safe: everything is on the event loop's thread.
class TcpStoreListener {
 public:
  // Receives a client's socket, non-blocking and close-on-exec.
  using OnClient = std::function<void(UniqueFd socket)>;

  // This many calls of Accept() accept all clients that the kernel can hold.
  static constexpr int kMaxRounds = 65;

  // Listens on `bind_address`, a numeric IPv4 or IPv6 address or "" for all addresses of the
  // machine, at `port` (0: any free port). `event_loop` is not owned and must outlive the listener.
  // Errors: those of TcpStoreServer::Listen.
  static absl::StatusOr<std::unique_ptr<TcpStoreListener>> Listen(EventLoop* event_loop,
                                                                  const std::string& bind_address,
                                                                  int port);

  ~TcpStoreListener();
  TcpStoreListener(const TcpStoreListener&) = delete;
  TcpStoreListener& operator=(const TcpStoreListener&) = delete;

  int port() const { return port_; }

  // Calls `on_client` for each client while the event loop runs. Call it once. kInternal: epoll.
  absl::Status Start(OnClient on_client);

  // Accepts some of the waiting clients now, without the event loop. Only after Start(). Returns
  // true when more clients may be waiting.
  bool Accept();

 private:
  TcpStoreListener(EventLoop* event_loop, UniqueFd fd);
  absl::Status Watch();
  void Pause();

  EventLoop* const event_loop_;
  const UniqueFd fd_;
  const int port_;
  OnClient on_client_;
  std::optional<EventLoop::TimerId> pause_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_TCP_STORE_LISTENER_H_
