#ifndef DDP_LAUNCHER_MEETING_SERVER_SHUTDOWN_H_
#define DDP_LAUNCHER_MEETING_SERVER_SHUTDOWN_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "elastic/job/job_spec.h"
#include "elastic/rendezvous/job_reader.h"
#include "elastic/rendezvous/rendezvous.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::launcher {

// End of a node whose Redis server is the job's rendezvous. The server ends with the node, so the
// node first waits: other nodes must not wait for a server that is gone.
// - kEnd: the node may end. No other node is left, or the others have a later generation, which
//   continues without a store. Or two leases have passed: the others know that the job has ended,
//   or they continue to work in this generation.
// - kWait: other nodes still stop their workers, or wait for a node that may be lost.
// - kClose: too few nodes are left for a generation, or they took too long. The node closes the
//   job, so that the others end at once and say why.
enum class ServerShutdown { kEnd, kWait, kClose };

// Decides the next step. `waited` is the time since the node began to wait. `lease` and
// `times` are this node's: those of others are unknown. `job` is without this node.
// Pure.
ServerShutdown DecideServerShutdown(const elastic::JobRecord& job, uint64_t own_generation,
                                    absl::Duration waited, absl::Duration lease,
                                    const elastic::AgentTimes& times);

// Returns the pause before the next look at a job of so many nodes. Each look costs the server work
// per node, and nodes that are still ending need the server too.
absl::Duration PauseBetweenLooks(int64_t nodes);

// Returns the time by which a node that was signalled then must not wait for others any more: the
// rest of
// --termination-grace is for its report. absl::InfiniteFuture(): the grace is not known, or no
// signal has come. Pure.
absl::Time ServerShutdownDeadline(absl::Time signalled_at, const elastic::AgentTimes& times);

struct ServerShutdownOptions {
  store::RedisEndpoint endpoint;
  elastic::JobSpec job;  // this node's: the lease and times of others are unknown
  int64_t instance = 0;
  uint64_t own_generation = 0;                 // last generation of this node
  std::string host;                            // name of this node in messages to others
  absl::Time end_by = absl::InfiniteFuture();  // then the node waits no longer for others
  // Descriptor that is readable when the user wants the end now; -1: none.
  int hurry_fd = -1;
};

// Blocks until this node may end, or until the server cannot be reached; the first connection may
// take a lease. Runs `event_loop`; no other code may stop the loop meanwhile. `rendezvous` must
// have left the job.
void AwaitOthers(const ServerShutdownOptions& options, EventLoop* event_loop,
                 elastic::Rendezvous* rendezvous, const Clock& clock);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_SERVER_SHUTDOWN_H_
