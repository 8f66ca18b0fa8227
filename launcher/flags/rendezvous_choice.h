#ifndef DDP_LAUNCHER_FLAGS_RENDEZVOUS_CHOICE_H_
#define DDP_LAUNCHER_FLAGS_RENDEZVOUS_CHOICE_H_

#include <string>

#include "absl/status/statusor.h"

namespace ddp::launcher {

// Ports where nodes meet when the user names none: with --rdzv-backend=c10d, and at the master of a
// static rendezvous. They are torchrun's.
inline constexpr int kC10dPort = 29400;
inline constexpr int kStaticPort = 29500;

// Kind of rendezvous of a job's nodes.
enum class RendezvousKind {
  // A single node runs its own Redis server, on a unix socket.
  kPrivate,
  // The nodes meet at --rdzv-endpoint. The node with this address starts a Redis server there when
  // none runs.
  kRedis,
  // Node 0 runs a Redis server. The other nodes ask for its address at MASTER_ADDR:MASTER_PORT.
  kStatic,
};

// The user's flags about the rendezvous. A name ending in `_flag` is what the user wrote, a flag or
// a variable, for messages.
struct RendezvousRequest {
  int min_nodes = 1;
  int max_nodes = 1;
  std::string nodes_flag = "--nnodes";
  bool standalone = false;
  std::string standalone_flag = "--standalone";
  std::string backend;  // value of the flag; empty: not given
  std::string backend_flag = "--rdzv-backend";
  bool has_endpoint = false;
  bool has_node_rank = false;
  bool has_master = false;  // --master-addr or --master-port is given
};

struct RendezvousChoice {
  RendezvousKind kind = RendezvousKind::kPrivate;
  int default_port = 0;     // kRedis only: port of an endpoint that names none
  std::string notice = {};  // line to print for the user; may be empty
};

// Chooses the rendezvous:
//
//   --standalone                                          private (one node; overrides the rest)
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

#endif  // DDP_LAUNCHER_FLAGS_RENDEZVOUS_CHOICE_H_
