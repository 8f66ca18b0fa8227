#ifndef DDP_STORE_TCP_STORE_LISTENER_H_
#define DDP_STORE_TCP_STORE_LISTENER_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"

namespace ddp::store {

// The port at which TCPStore clients come: hands each one's socket to its owner, from an event
// loop. Where the process has no descriptor left nobody is accepted for a moment, and the clients
// wait in the kernel.
//
// Not thread-safe: everything is on the event loop's thread.
class TcpStoreListener {
 public:
  // Gets a client's socket, non-blocking and close-on-exec.
  using OnClient = std::function<void(UniqueFd socket)>;

  // So many Accept()s take all that the kernel can have waiting.
  static constexpr int kMaxRounds = 65;

  // Listens on `bind_address`, a numeric IPv4 or IPv6 address or "" for all of the machine's, at
  // `port` (0: one that is free). `event_loop` is not owned and must outlive the listener.
  // Errors: those of TcpStoreServer::Listen.
  static absl::StatusOr<std::unique_ptr<TcpStoreListener>> Listen(EventLoop* event_loop,
                                                                  const std::string& bind_address,
                                                                  int port);

  ~TcpStoreListener();
  TcpStoreListener(const TcpStoreListener&) = delete;
  TcpStoreListener& operator=(const TcpStoreListener&) = delete;

  int port() const { return port_; }

  // From now on `on_client` is called while the event loop runs. Once; kInternal: epoll.
  absl::Status Start(OnClient on_client);

  // Takes some of those that wait now, without the event loop. Only after Start(). Returns whether
  // more may be waiting.
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

#endif  // DDP_STORE_TCP_STORE_LISTENER_H_
