// Private Redis server that other machines reach: the addresses of a name that are this machine's,
// and the server's configuration. For StartServerIfOurs() and MeetStatically().
#ifndef DDP_LAUNCHER_MEETING_NETWORK_SERVER_H_
#define DDP_LAUNCHER_MEETING_NETWORK_SERVER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis_server/private_redis_server.h"

namespace ddp::launcher {

// Result of binding a port on each address of a name.
struct BindProbe {
  std::vector<std::string> ours;  // numeric addresses of this host that could be bound
  bool in_use = false;            // port is taken on another address of the name
  bool is_loopback = false;       // all of `ours` are loopback addresses, or `ours` is empty

  // Returns the first address of `ours` that is not a loopback one, else the first. `ours` must not
  // be empty.
  std::string Reachable() const;
};

// Binds `port` (0: a free one) on each address of `host`, and releases it. No socket listens
// meanwhile.
//
// Errors: kUnavailable (the name cannot be resolved now), kInvalidArgument (a wildcard address,
// which every machine has), kPermissionDenied (a port below 1024), kInternal (another system call
// failed).
absl::StatusOr<BindProbe> ProbeBind(const std::string& host, int port);

// Returns true for 0.0.0.0 or ::, in any spelling. Returns false for a name.
bool IsWildcard(const std::string& host);

// Returns a port that is free on `numeric_address` now. Errors: kInternal.
absl::StatusOr<int> FreePort(const std::string& numeric_address);

struct NetworkServerOptions {
  std::string folder;                  // PrivateRedisServer::Options::directory
  std::vector<std::string> addresses;  // numeric addresses to listen on
  int port = 0;
  std::string user;      // empty: "default"
  std::string password;  // empty: no password is required
};

// Returns the options of such a server. It takes many clients, keeps no data on disk, and has the
// scripts of jobs loaded. It has one user, who may run only the commands that jobs need, on the
// keys and channels of jobs only, and no other script.
store::PrivateRedisServer::Options NetworkServerConfig(const NetworkServerOptions& options);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_NETWORK_SERVER_H_
