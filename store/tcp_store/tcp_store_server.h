#ifndef DDP_STORE_TCP_STORE_TCP_STORE_SERVER_H_
#define DDP_STORE_TCP_STORE_TCP_STORE_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "store/tcp_store/tcp_store_protocol.h"

namespace ddp::store {

// A server of c10d's TCPStore protocol, without LibTorch, run from an event loop. It serves the
// TCPStore clients of LibTorch 2.11, Python's init_process_group("env://") included. It has no
// thread and does not poll: a wait is answered when its keys appear.
//
// Like LibTorch's server it knows no passwords: every client that reaches the port can read and
// write. Unlike LibTorch's server it bounds the memory that clients use (TcpStoreLimits). A client
// that sends a request beyond the limits, or bytes that are not a request, is dropped without harm
// to the others. When unfinished requests and unread replies exceed their limit, the client that
// holds most is dropped. (All clients' keys share one limit: once it is reached, a client that adds
// a key is dropped.)
//
// Not thread-safe: everything is on the event loop's thread.
class TcpStoreServer {
 public:
  // Listens on `bind_address`, a numeric IPv4 or IPv6 address or "" for all addresses of the
  // machine, at `port` (0: any free port). Clients are served while `event_loop` runs; clients that
  // connect earlier wait. `event_loop` is not owned and must outlive the server.
  //
  // kAlreadyExists: the port is taken. kInvalidArgument: not such an address, or not a port.
  // kFailedPrecondition: the machine does not have the address. kPermissionDenied: ports below
  // 1024. kInternal: another system call failed; the message names it.
  static absl::StatusOr<std::unique_ptr<TcpStoreServer>> Listen(EventLoop* event_loop,
                                                                const std::string& bind_address,
                                                                int port,
                                                                const TcpStoreLimits& limits = {});

  // Drops all clients.
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  int port() const;

  // Sets a key of the owner, which Renew() keeps. The key must not begin with '/'. All keys that
  // LibTorch's TCPStore sends do, so a client cannot name the owner's key by accident.
  void Publish(const std::string& key, const std::string& value);

  // Answers each later get of `<prefix><question>` with what `answer` returns for `question`, at
  // once and also between Hold() and Renew(). A wait for such a key alone ends at once. Nothing is
  // stored. `prefix` must not begin with '/'. A later call replaces an earlier one. `answer` runs
  // on the event loop's thread, must be quick and must not call the server.
  using Answer = std::function<std::string(const std::string& question)>;
  void AnswerTo(const std::string& prefix, Answer answer);

  // Hold() and Renew() let one port serve successive groups of clients. Two steps are needed:
  // clients of the old group may still be connected, or may even connect, when the next group is
  // expected.
  //
  // Hold(): connected clients keep the present keys. A client that connects later is greeted and
  // may read the owner's keys. Its other requests wait for Renew().
  // Renew(): makes the server as if started anew. Drops the clients that connected before Hold(),
  // and forgets all keys but the published ones. Then serves the clients that connected later. A
  // client that has closed its end is dropped, and its waiting requests are never applied. (Only
  // what the kernel knows counts: the loss of a client's machine is known half a minute later.)
  //
  // A second Hold() before Renew() does nothing. Renew() without Hold() drops all clients.
  void Hold();
  void Renew();

 private:
  class Shell;
  explicit TcpStoreServer(std::unique_ptr<Shell> shell);
  const std::unique_ptr<Shell> shell_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_TCP_STORE_SERVER_H_
