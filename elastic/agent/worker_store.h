#ifndef DDP_ELASTIC_AGENT_WORKER_STORE_H_
#define DDP_ELASTIC_AGENT_WORKER_STORE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "elastic/agent/launch_config.h"
#include "store/tcp_store_server.h"

namespace ddp::elastic {

// The TCPStore at MASTER_ADDR:MASTER_PORT, which the agent of rank 0's node serves for programs
// that know no other store: a fresh one in every generation, so that no key of an earlier one is
// ever seen. Its port is bound before this node offers it to the others, so nobody can take it in
// between.
//
// With a port of the user's own the same server is emptied for each generation; else each
// generation has a server of its own, at a port that the kernel chose. Either way workers of the
// ending generation keep their store until the next one is complete: on other nodes some may still
// be saving a checkpoint together. What such workers, just starting maybe, say to the new one
// before that is forgotten when they end.
//
// On the event loop's thread.
class WorkerStore {
 public:
  // `given`: the server to use, of a static rendezvous; null: one of our own. Nothing is owned;
  // `config`, `event_loop` and `given` must outlive the store.
  WorkerStore(const LaunchConfig& config, EventLoop* event_loop, store::TcpStoreServer* given)
      : config_(config), event_loop_(event_loop), given_(given) {}

  // Before a round: the port of the store that workers of the next generation will find. Errors:
  // those of TcpStoreServer::Listen, naming the flag where the port was the user's.
  absl::StatusOr<int> Prepare();

  // When the round is complete, and so no worker of an earlier generation is left: whether this
  // node holds rank 0. If so, an empty store is served now, and the last one ends; if not, nothing
  // needs to be served.
  void Settle(bool serves);

 private:
  const LaunchConfig& config_;
  EventLoop* const event_loop_;
  store::TcpStoreServer* const given_;
  std::unique_ptr<store::TcpStoreServer> own_;
  std::unique_ptr<store::TcpStoreServer> next_;  // from Prepare() to Settle()
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_WORKER_STORE_H_
