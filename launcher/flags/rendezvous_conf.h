#ifndef DDP_LAUNCHER_FLAGS_RENDEZVOUS_CONF_H_
#define DDP_LAUNCHER_FLAGS_RENDEZVOUS_CONF_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp::launcher {

// Values of --rdzv-conf: torchrun's keys, with their meaning in ddprun. A time is the longest wait,
// unless its comment says otherwise.
struct RendezvousConf {
  std::optional<absl::Duration> join_timeout;       // wait for enough nodes; also as `timeout`
  std::optional<absl::Duration> last_call_timeout;  // wait for more than MIN nodes in round one
  std::optional<absl::Duration> close_timeout;  // wait for the last requests of a node that leaves
  std::optional<absl::Duration> read_timeout;   // wait for the Redis server at the start
  std::optional<absl::Duration> keep_alive_interval;  // time between two heartbeats
  std::optional<int> keep_alive_max_attempt;          // heartbeats missed until a node is lost
  std::optional<absl::Duration> heartbeat_timeout;    // wait for the answer to one heartbeat
  // Longest random pause before a request that failed is sent again; zero: the default.
  std::optional<absl::Duration> cas_backoff_max;
  std::optional<bool> is_host;      // false: start no server at the endpoint
  std::optional<int> rank;          // node rank, as --node-rank
  std::optional<bool> any_program;  // true: nodes of one run id may run different programs
  // Files of a rediss:// endpoint: names and values, see store::SetTlsFile().
  std::vector<std::pair<std::string, std::string>> tls_files;
  std::vector<std::string> without_meaning;  // keys that were given and have no effect
};

// Parses KEY=VALUE pairs with commas between. Spaces around a pair are ignored; an empty text is
// valid. The last pair of a key counts. `join_timeout` overrides `timeout`.
//
// Pure. Errors: kInvalidArgument, one line that names the key, its value and the allowed values,
// not the flag.
absl::StatusOr<RendezvousConf> ParseRendezvousConf(const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_RENDEZVOUS_CONF_H_
