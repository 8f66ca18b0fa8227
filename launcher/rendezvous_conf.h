#ifndef DDP_LAUNCHER_RENDEZVOUS_CONF_H_
#define DDP_LAUNCHER_RENDEZVOUS_CONF_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp::launcher {

// What --rdzv-conf says: torchrun's keys, with the meaning that they have here.
struct RendezvousConf {
  std::optional<absl::Duration> join_timeout;         // for enough nodes to come; also as `timeout`
  std::optional<absl::Duration> last_call_timeout;    // for more than MIN in a first round
  std::optional<absl::Duration> close_timeout;        // for the last requests of a node that leaves
  std::optional<absl::Duration> read_timeout;         // for the store to be reached at the start
  std::optional<absl::Duration> keep_alive_interval;  // between two heartbeats
  std::optional<int> keep_alive_max_attempt;          // heartbeats missed until a node is lost
  std::optional<absl::Duration> heartbeat_timeout;    // for the answer to one heartbeat
  std::optional<bool> is_host;                        // whether this node serves the endpoint
  std::optional<int> rank;                            // the same as --node-rank
  std::vector<std::string> without_meaning;           // keys that were given and have none here
};

// Reads KEY=VALUE pairs with commas between. Spaces around a pair do not count, nor does an empty
// text. Later pairs of one key count; `join_timeout` counts over `timeout`.
//
// Pure. Errors: kInvalidArgument, one line; names the key, its value and what is allowed, not the
// flag.
absl::StatusOr<RendezvousConf> ParseRendezvousConf(const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_RENDEZVOUS_CONF_H_
