#ifndef DDP_LAUNCHER_SERVER_FAREWELL_H_
#define DDP_LAUNCHER_SERVER_FAREWELL_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/job_reader.h"
#include "elastic/rendezvous/rendezvous.h"
#include "store/redis_endpoint.h"

namespace ddp::launcher {

// The last thing that a node does whose Redis server is the job's rendezvous: the server ends with
// it, and the other nodes must not be left to wait for what cannot come.
//
// It stays until none of them is left, or they are in a generation of their own, which goes on
// without a store. While they still stop their workers, or wait for a node that may be lost, it
// waits for them; when too few are left for a generation it closes the job, so that they end at
// once and say why.
enum class Farewell { kGo, kWait, kClose };

// Pure. `waited` is how long the node has been waiting; `lease` and `shutdown_timeout` are this
// node's, for want of the others' own. `job` is without this node, which has left.
Farewell DecideFarewell(const elastic::JobRecord& job, uint64_t own_generation,
                        absl::Duration waited, absl::Duration lease,
                        absl::Duration shutdown_timeout);

// Until the job is looked at again that has so many nodes. Each look costs the server a piece of
// work per node, and the nodes that still end want it, too.
absl::Duration PauseBetweenLooks(int64_t nodes);

struct FarewellOptions {
  store::RedisEndpoint endpoint;
  std::string run_id;
  int64_t instance = 0;
  uint64_t own_generation = 0;      // the last one that this node was in
  std::string host;                 // what other nodes call this one
  absl::Duration lease;             // this node's; that of others is not known
  absl::Duration shutdown_timeout;  // as well
  // Readable when the user wants the end now; -1: never.
  int hurry_fd = -1;
};

// Returns when this node may go. Runs `event_loop`, from which nothing else may end it meanwhile.
// `rendezvous` has left the job. A server that cannot be reached is no reason to stay.
void AwaitOthers(const FarewellOptions& options, EventLoop* event_loop,
                 elastic::Rendezvous* rendezvous, const Clock& clock);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_SERVER_FAREWELL_H_
