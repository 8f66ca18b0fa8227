#ifndef DDP_LAUNCHER_WATCH_STATUS_COMMAND_H_
#define DDP_LAUNCHER_WATCH_STATUS_COMMAND_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/environment.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::launcher {

// `ddprun status`: reads a job from its store and shows it to a person or as JSON.

// Parsed arguments of `ddprun status`.
struct StatusRequest {
  bool help = false;
  bool json = false;
  bool all = false;                     // show every node and rank, however many
  std::optional<std::string> endpoint;  // nullopt: the jobs of this user on this host
  std::string endpoint_name;            // name of the flag or variable that has set `endpoint`
  // Port of an endpoint that names none.
  int default_port = store::RedisEndpoint::kDefaultPort;
  std::optional<std::string> run_id;  // nullopt: with an endpoint, ddprun's default
  int64_t instance = 0;  // instance of the run id; 0: the newest that runs, else the newest
};

// Parses the arguments behind `status`. The values of --rdzv-endpoint, --rdzv-backend and --rdzv-id
// may come from PET_RDZV_* too. Pure. Errors: kInvalidArgument, one line that names the flag or
// variable and the allowed values.
absl::StatusOr<StatusRequest> ParseStatusArguments(const std::vector<std::string>& arguments,
                                                   const VariableGetter& environment);

// Prints the report on stdout, and errors on stderr, a line each. `arguments` begin with `status`.
// Blocks on each store for at most 3 s to connect and 5 s per reply. Returns the exit code:
// - 0: a job was shown.
// - 1: no job was found, or none could be read.
// - 2: a mistake on the command line.
int RunStatusCommand(const std::vector<std::string>& arguments);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_WATCH_STATUS_COMMAND_H_
