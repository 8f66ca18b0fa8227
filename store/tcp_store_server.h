#ifndef DDP_STORE_TCP_STORE_SERVER_H_
#define DDP_STORE_TCP_STORE_SERVER_H_

#include <functional>
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

  // Sets a key of the owner's own, which Renew() leaves in place. It must not begin with '/', as
  // all keys of TCPStore clients do: so they cannot name it by accident.
  void Publish(const std::string& key, const std::string& value);

  // From now on a client that gets `<prefix><question>` is given what `answer` returns for
  // `question`, at once and also between Hold() and Renew(); a wait for such a key ends at once.
  // Nothing is stored. `prefix` must not begin with '/'; a later call replaces an earlier one.
  // `answer` runs on the event loop's thread, must be quick and must not call the server.
  using Answer = std::function<std::string(const std::string& question)>;
  void AnswerTo(const std::string& prefix, Answer answer);

  // One port for the jobs of clients that follow each other, in two steps, since clients of the
  // earlier one may still be there, or even come, when those of the next one are expected.
  //
  // Hold(): whoever is connected goes on with the keys that there are. Whoever comes from now on
  // is greeted, may read the owner's keys, and waits with anything else, until
  // Renew(): makes the server one that was started anew: drops those who were connected before
  // Hold() and forgets all keys but the published ones. Those who came after it are served now; but
  // for those that have gone in the meantime, of which nothing is ever applied. (As far as the
  // kernel knows: of a client whose machine has lost its power it learns half a minute later.)
  //
  // A second Hold() before Renew() does nothing; Renew() without Hold() drops everybody.
  void Hold();
  void Renew();

 private:
  class Shell;
  explicit TcpStoreServer(std::unique_ptr<Shell> shell);
  const std::unique_ptr<Shell> shell_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_TCP_STORE_SERVER_H_
