#ifndef DDP_LAUNCHER_RENDEZVOUS_CHOICE_H_
#define DDP_LAUNCHER_RENDEZVOUS_CHOICE_H_

#include <string>

#include "absl/status/statusor.h"

namespace ddp::launcher {

// Where the nodes of a job meet.
enum class RendezvousKind {
  kPrivate,  // one node: in a Redis server of its own, on a unix socket
  kRedis,    // in the Redis server at --rdzv-endpoint
  kStatic,   // at MASTER_ADDR:MASTER_PORT, where node 0 tells the others of its Redis server
};

// What the user said about it.
struct RendezvousRequest {
  int min_nodes = 1;
  int max_nodes = 1;
  bool standalone = false;
  std::string backend;                          // as given; empty: not given
  std::string backend_flag = "--rdzv-backend";  // how the user gave it, for messages
  bool has_endpoint = false;
  bool has_node_rank = false;
  bool has_master = false;  // --master-addr or --master-port
};

struct RendezvousChoice {
  RendezvousKind kind = RendezvousKind::kPrivate;
  int default_port = 0;     // of an endpoint that names none; kRedis only
  std::string notice = {};  // one line that the user should hear; may be empty
};

// Decides it:
//
//   --standalone                                          private (for one node; the rest is void)
//   --rdzv-backend=redis or c10d, with an endpoint        redis
//                                 without, --nnodes=1     private
//   --rdzv-backend=static                                 static
//   no backend, an endpoint                               redis
//   no backend, a node rank, master address or port       static
//   no backend, none of these, --nnodes=1                 private
//
// Pure. Errors: kInvalidArgument, one line that names the flags to give.
absl::StatusOr<RendezvousChoice> ChooseRendezvous(const RendezvousRequest& request);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_RENDEZVOUS_CHOICE_H_
