#ifndef DDP_RPC_WORKERS_H_
#define DDP_RPC_WORKERS_H_

#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "base/mutex.h"
#include "ddp/rpc/options.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace ddp::rpc {

namespace internal {
class Transport;
}  // namespace internal

// This process as one of the workers of a generation, which call each other's functions (call.h)
// and use each other's objects (remote.h). Made by init(); a process has one in its life.
//
// A lost worker. Worker 0 keeps a call in progress to each other worker, and each of them one to
// worker 0. So the end of a worker's process is noticed although nobody calls it. The worker that
// notices tells all others through the store. Every wait of every worker for a call or a backward
// then throws PeerFailedError, with the lost worker's name, and so does every later call. There is
// no reconnection: let the exception end the process; under ddprun the job continues in a new
// generation.
//
// Thread-compatible, report_failure() excepted; the free functions of call.h and remote.h are
// thread-safe.
class Workers {
 public:
  explicit Workers(std::shared_ptr<internal::Transport> transport);
  // Without shutdown() before: reports to the other workers that this one has left, and ends at
  // once.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int id() const;
  const std::string& name() const;
  const std::vector<std::string>& names() const;  // of all workers, by id

  // Blocks until all workers have called it. Throws PeerFailedError when a worker fails, and
  // TimeoutError after a day. When a worker has called shutdown() instead, all workers throw an
  // error with both names: a ConfigurationError, or, where the report of a worker that has thrown
  // it comes first, a PeerFailedError. A worker that only serves others has to call barrier() as
  // often as they do, and then waits in shutdown().
  //
  // A rank of a process group on Gloo may wait meanwhile in a collective for the thread that is
  // here. When it is one of the workers too, the group fails after about a second, with an error
  // that names both places.
  void barrier();

  // Ends the work together: all workers call it, after their last call. Blocks until all have, and
  // serves calls until then. Throws as barrier().
  void shutdown();

  // Reports to all workers that this one cannot continue. Their waits throw PeerFailedError within
  // a second. Does nothing after shutdown(). Never throws. Thread: any, also during shutdown().
  void report_failure(const std::string& reason);

 private:
  std::shared_ptr<internal::Transport> transport() const;
  std::shared_ptr<internal::Transport> TakeTransport();

  mutable Mutex mutex_;
  std::shared_ptr<internal::Transport> transport_ ABSL_GUARDED_BY(mutex_);  // null at the end
  const std::string name_;
  const int id_;
  const std::vector<std::string> names_;
  const int exceptions_at_start_;
};

// Connects this process, under a name of its own, to the other workers. Collective: blocks until
// all have come.
//
// `store`: any c10d store, fresh for this generation, such as ProcessGroup::store(); keys begin
// with "rpc/". The network interface is that of TP_SOCKET_IFNAME, or that of the host's name.
// Throws ConfigurationError for unusable arguments, for a second call in this process, and at once
// when two workers have different sizes; CommunicationError, with the missing ranks, when the
// others do not come within options.timeout.
std::unique_ptr<Workers> init(std::string name, const c10::intrusive_ptr<c10d::Store>& store,
                              Options options);

}  // namespace ddp::rpc

#endif  // DDP_RPC_WORKERS_H_
