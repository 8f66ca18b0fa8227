#ifndef DDP_ELASTIC_AGENT_WORKER_STORE_H_
#define DDP_ELASTIC_AGENT_WORKER_STORE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "elastic/agent/launch_config.h"
#include "store/tcp_store/tcp_store_server.h"

namespace ddp::elastic {

// Serves the TCPStore at MASTER_ADDR:MASTER_PORT to programs that cannot use Redis. Each Agent owns
// a WorkerStore; only the one of rank 0's node serves. Every generation gets an empty store, so no
// key of an earlier one is ever seen. The port is bound before this node offers it, so no other
// process can take it.
//
// With a user's own port, or a `given` server, one server is emptied for each generation. Else each
// generation has a server of its own, at a port that the kernel chose. Workers of the ending
// generation keep their store until the next round is complete: on other nodes they may still be
// saving a checkpoint together. The one server holds the requests of clients that connect between
// Prepare() and Serve(). It never applies requests of clients that have ended before Serve().
//
// Thread: the event loop's.
class WorkerStore {
 public:
  // `given`: the server of a static rendezvous; null: makes its own. Owns none of the arguments;
  // `config`, `event_loop` and `given` must outlive the store.
  WorkerStore(const LaunchConfig& config, EventLoop* event_loop, store::TcpStoreServer* given)
      : config_(config), event_loop_(event_loop), given_(given) {}

  // Call before a round. Returns the port of the next generation's store. Errors: those of
  // TcpStoreServer::Listen, naming the flag if the port was the user's.
  absl::StatusOr<int> Prepare();

  // Call when the round is complete, so no worker of an earlier generation is left. `serves`: this
  // node holds rank 0. If so, an empty store replaces the last generation's.
  void Serve(bool serves);

 private:
  const LaunchConfig& config_;
  EventLoop* const event_loop_;
  store::TcpStoreServer* const given_;
  std::unique_ptr<store::TcpStoreServer> own_;
  std::unique_ptr<store::TcpStoreServer> next_;  // from Prepare() to Serve()
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_STORE_H_
