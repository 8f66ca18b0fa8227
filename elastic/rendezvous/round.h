#ifndef DDP_ELASTIC_RENDEZVOUS_ROUND_H_
#define DDP_ELASTIC_RENDEZVOUS_ROUND_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::elastic {

// Which generation a message belongs to. Both parts are compared: after a fail-over that lost
// writes two generations may carry the same number, never the same nonce.
struct GenerationId {
  uint64_t number = 0;  // counts from 1; 0: none yet
  std::string nonce;    // 16 hexadecimal digits
  bool operator==(const GenerationId&) const = default;
};

// What a node brings into a round.
struct NodeOffer {
  int nproc = 1;            // workers that it runs
  std::string role;         // of its workers
  std::string master_addr;  // where the others reach this node, should it hold rank 0
  int master_port = 0;      // a port found free there
  bool operator==(const NodeOffer&) const = default;
};

// A node in a complete round.
struct RoundMember {
  std::string node;    // unique per agent process
  int group_rank = 0;  // 0 .. members - 1; a survivor keeps its own when that is in range
  NodeOffer offer;
  bool operator==(const RoundMember&) const = default;
};

// A complete round: the same for every member, but for `self`.
struct Round {
  GenerationId generation;
  int restarts = 0;                  // charged to the whole job so far
  std::vector<RoundMember> members;  // by group rank
  int self = 0;                      // this node's index in `members`
  std::string store_url;             // of the workers' store in this generation; no secrets
};

// Where a node's workers stand among all. Ranks are contiguous per node, in the order of the nodes;
// nodes may run different numbers of workers. Role ranks count the workers of one role only.
struct NodePlacement {
  int group_rank = 0;
  int group_world_size = 0;
  int local_world_size = 0;
  int first_rank = 0;
  int world_size = 0;
  int first_role_rank = 0;
  int role_world_size = 0;
  std::string master_addr;  // of the node that holds rank 0
  int master_port = 0;
};

// The placement of `round.self`. `round` must be valid.
NodePlacement PlaceNode(const Round& round);

// kInternal, naming what is wrong, unless the members are ordered by group ranks 0, 1, 2, ..., each
// has a sensible offer and `self` is one of them. For rounds that came over a wire.
absl::Status ValidateRound(const Round& round);

// An offer as text and back. Parsing refuses what FormatOffer cannot have written: kInternal.
std::string FormatOffer(const NodeOffer& offer);
absl::StatusOr<NodeOffer> ParseOffer(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_ROUND_H_
