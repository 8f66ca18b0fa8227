#ifndef DDP_STORE_TCP_STORE_SERVER_H_
#define DDP_STORE_TCP_STORE_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "store/tcp_store_protocol.h"

namespace ddp::store {

// The server of c10d's TCPStore, without LibTorch: what a TCPStore client of LibTorch 2.11 speaks,
// Python's init_process_group("env://") included, served from an event loop. Beside it nothing
// runs: no thread, no timer, no polling; a wait is answered when its keys come.
//
// Like LibTorch's own it knows no passwords: whoever reaches the port reads and writes. Unlike it,
// what a client may make us hold is bounded (TcpStoreLimits), and a client that goes beyond, or
// sends what is no request, is dropped without harm to the others; so is one that does not read its
// replies. (Keys fill the same memory for all: once they reach the limit, whoever adds some is
// dropped.)
//
// Not thread-safe: everything is on the event loop's thread.
class TcpStoreServer {
 public:
  // Listens on `bind_address`, a numeric IPv4 or IPv6 address or "" for all of the machine's, at
  // `port` (0: one that is free). Clients are served while `event_loop` runs; those that connect
  // before wait. `event_loop` is not owned and must outlive the server.
  //
  // kAlreadyExists: the port is taken. kInvalidArgument: not an address of this form, not a port.
  // kFailedPrecondition: the address is none of this machine. kPermissionDenied: ports below 1024.
  // kInternal: another system call failed; it is named.
  static absl::StatusOr<std::unique_ptr<TcpStoreServer>> Listen(EventLoop* event_loop,
                                                                const std::string& bind_address,
                                                                int port,
                                                                const TcpStoreLimits& limits = {});

  // Drops all clients.
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  int port() const;

  // Sets a key of the owner's own, which Clear() leaves in place. TCPStore clients cannot name it
  // by accident: they put a '/' before every key of theirs.
  void Publish(const std::string& key, const std::string& value);

  // Makes the server one that was started anew: drops all clients and forgets all keys but the
  // published ones. The port stays.
  void Clear();

 private:
  class Shell;
  explicit TcpStoreServer(std::unique_ptr<Shell> shell);
  const std::unique_ptr<Shell> shell_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_SERVER_H_
