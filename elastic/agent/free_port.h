#ifndef DDP_ELASTIC_AGENT_FREE_PORT_H_
#define DDP_ELASTIC_AGENT_FREE_PORT_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::elastic {

// A TCP port that nothing on this host listens on now, for a program that will listen on it soon.
//
// Another program could take it in between. To make that unlikely the port is drawn at random from
// below the range out of which the kernel serves outgoing connections and listeners on port 0, so
// only a program that names this very port can be in the way. Errors: kResourceExhausted (none
// free).
absl::StatusOr<int> FindFreePort();

// OK when a program that reuses addresses, as c10d's TCPStore does, could listen on `port` now;
// else kUnavailable, with a line for the user of --master-port.
absl::Status CheckPortIsFree(int port);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_FREE_PORT_H_
