#include "launcher/flags/rendezvous_choice.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "launcher/flags/flag_reader.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::launcher {
namespace {

absl::StatusOr<RendezvousChoice> Standalone(const RendezvousRequest& request) {
  if (request.min_nodes == 1) return RendezvousChoice{.kind = RendezvousKind::kPrivate};
  return absl::InvalidArgumentError(absl::StrCat(request.standalone_flag, " runs one node, and ",
                                                 request.nodes_flag, " needs ", request.min_nodes,
                                                 ": give --rdzv-endpoint=HOST[:PORT] instead of ",
                                                 request.standalone_flag));
}

absl::Status NobodySaidWhere(const RendezvousRequest& request) {
  return absl::InvalidArgumentError(absl::StrCat(
      "where do the ", request.max_nodes,
      " nodes meet? Give all of them --rdzv-endpoint=HOST[:PORT] (a Redis server, or a node that"
      " is to run one), or each --node-rank=N and --master-addr=ADDRESS (of node 0)"));
}

absl::StatusOr<RendezvousChoice> InRedis(const RendezvousRequest& request) {
  const bool is_c10d = request.backend == "c10d";
  RendezvousChoice choice;
  if (is_c10d) {
    choice.notice = absl::StrCat(
        request.backend_flag, "=c10d: the nodes meet in a Redis server at --rdzv-endpoint (port ",
        kC10dPort,
        " unless it names one); the node that has this address starts it where none runs");
  }
  if (!request.has_endpoint) {
    if (request.max_nodes > 1) return NobodySaidWhere(request);
    if (is_c10d) {
      choice.notice =
          absl::StrCat(request.backend_flag,
                       "=c10d: this node is the only one and meets itself, as with --standalone");
    }
    return choice;
  }
  choice.kind = RendezvousKind::kRedis;
  choice.default_port = is_c10d ? kC10dPort : store::RedisEndpoint::kDefaultPort;
  return choice;
}

}  // namespace

absl::StatusOr<RendezvousChoice> ChooseRendezvous(const RendezvousRequest& request) {
  if (request.standalone) return Standalone(request);
  if (absl::StartsWith(request.backend, "etcd")) {
    return absl::InvalidArgumentError(
        absl::StrCat(request.backend_flag, "=", Shown(request.backend),
                     ": ddprun does not speak to etcd: its nodes meet in a Redis server; give"
                     " --rdzv-backend=redis --rdzv-endpoint=HOST[:PORT]"));
  }
  if (request.backend == "redis" || request.backend == "c10d") return InRedis(request);
  if (request.backend == "static") return RendezvousChoice{.kind = RendezvousKind::kStatic};
  if (!request.backend.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        request.backend_flag, "=", Shown(request.backend), ": expected redis, c10d or static"));
  }
  if (request.has_endpoint) return InRedis(request);
  if (request.has_node_rank || request.has_master) {
    return RendezvousChoice{.kind = RendezvousKind::kStatic};
  }
  if (request.max_nodes == 1) return RendezvousChoice{.kind = RendezvousKind::kPrivate};
  return NobodySaidWhere(request);
}

}  // namespace ddp::launcher
