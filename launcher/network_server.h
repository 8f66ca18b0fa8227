// A private Redis server that other machines reach: which of a name's addresses are ours, and what
// its configuration says. For StartServerIfOurs and MeetStatically.
#ifndef DDP_LAUNCHER_NETWORK_SERVER_H_
#define DDP_LAUNCHER_NETWORK_SERVER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "store/private_redis_server.h"
#include "store/redis_endpoint.h"

namespace ddp::launcher {

// What the kernel said to an attempt to bind a port on each address that a name stands for.
struct BindProbe {
  std::vector<std::string> ours;  // numeric; could be bound
  bool in_use = false;            // the port is taken on one of the others
  bool is_loopback = false;       // all of `ours` are

  // The first address of `ours` that is no loopback one, else the first. `ours` is not empty.
  std::string Reachable() const;
};

// Tries to bind `port` (0: one that is free) on each address of `host`, and gives it back. Nobody
// listens meanwhile.
//
// kUnavailable: the name cannot be resolved now. kInvalidArgument: a wildcard address, which every
// machine has. kPermissionDenied: ports below 1024. kInternal: another system call failed.
absl::StatusOr<BindProbe> ProbeBind(const std::string& host, int port);

// Whether `host` can be resolved. Errors: kUnavailable, as above.
absl::Status LookUp(const std::string& host);

// The numeric addresses that `host` stands for. Errors: as above.
absl::StatusOr<std::vector<std::string>> AddressesOf(const std::string& host);

// Whether it is an address of every machine: 0.0.0.0 or ::, in whatever spelling. A name is none.
bool IsWildcard(const std::string& host);

bool IsLoopback(const std::string& numeric_address);

// A port that is free on `numeric_address` now. kInternal.
absl::StatusOr<int> FreePort(const std::string& numeric_address);

struct NetworkServerOptions {
  std::string folder;                  // PrivateRedisServer::Options::directory
  std::vector<std::string> addresses;  // numeric
  int port = 0;
  std::string user;      // empty: "default"
  std::string password;  // empty: none is asked for
};

// How to start a server there: for many clients, keeping nothing, with the scripts of jobs loaded
// and one user, who may run only the commands that jobs need, on the keys and channels of jobs
// only. The user can run no script but these.
store::PrivateRedisServer::Options NetworkServerConfig(const NetworkServerOptions& options);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_NETWORK_SERVER_H_
