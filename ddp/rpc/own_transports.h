#ifndef DDP_RPC_OWN_TRANSPORTS_H_
#define DDP_RPC_OWN_TRANSPORTS_H_

#include <optional>
#include <string>
#include <vector>

namespace ddp::rpc::internal {

// Returns the transports of TensorPipe that this worker offers; nullopt: all. Its shared memory is
// polled by a thread that never sleeps. Where a worker has no core for it besides its own, that
// thread takes the time of the program: three workers on two cores were nine times as slow. Two
// workers use the fastest transport that both offer, so each decides for itself. `world_size`: the
// workers, where the launcher does not say how many of them are on this host.
std::optional<std::vector<std::string>> OwnTransports(int world_size);

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_OWN_TRANSPORTS_H_
