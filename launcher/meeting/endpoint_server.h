#ifndef DDP_LAUNCHER_MEETING_ENDPOINT_SERVER_H_
#define DDP_LAUNCHER_MEETING_ENDPOINT_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "launcher/meeting/server_guard.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::launcher {

// Starts Redis at `endpoint` when the address is this node's and no server listens there.
//
// - The function decides by binding the address, never by comparing names. An address of another
//   machine, or one that is in use (by a server or a faster agent), is not ours.
// - For a name with several addresses here, the server listens on all that can be bound; it is not
//   started if one is in use.
// - The server listens on these addresses only. It keeps its files in `folder`
//   (PrivateRedisServer::Options::directory) and no data on disk.
// - It requires `endpoint`'s password if there is one, and refuses commands that the rendezvous and
//   RedisStore do not need (store/redis_server/redis_acl.h).
// - A line on stderr says where the server is, whether a password guards it, and that losing this
//   node ends membership changes.
//
// Returns nullptr when the endpoint is not ours, is a unix socket, has TLS or is behind sentinels:
// a server is there, or another node or its operator will start it. The caller keeps the returned
// guard while the job lives, and calls Watch() on it.
//
// Blocks for at most about `name_timeout` while the name cannot be resolved
// (launcher/meeting/name_wait.h).
//
// Thread: main (see PrivateRedisServer). Errors: those of PrivateRedisServer::Start and ProbeBind,
// and:
// - kDeadlineExceeded: the name had no address within `name_timeout`.
// - kNotFound: the endpoint is ours, but redis-server is not installed.
// - kInvalidArgument: a wildcard address (0.0.0.0, ::), which every machine has.
absl::StatusOr<std::unique_ptr<ServerGuard>> StartServerIfOurs(const store::RedisEndpoint& endpoint,
                                                               const std::string& folder,
                                                               absl::Duration name_timeout);

// Returns true when StartServerIfOurs() would start a server now. Errors: those of resolving and
// binding, as above.
absl::StatusOr<bool> WouldStartServer(const store::RedisEndpoint& endpoint,
                                      absl::Duration name_timeout);

// Blocks until the endpoint's name can be resolved, as StartServerIfOurs() does: for a node that
// starts no server. Returns at once for a unix socket and for sentinels. Errors: kDeadlineExceeded.
absl::Status AwaitEndpointName(const store::RedisEndpoint& endpoint, absl::Duration name_timeout);

// Sets DDP_REDIS_USER and DDP_REDIS_PASSWORD in this process's environment to the endpoint's, for
// the workers. Unsets those that are empty, and DDP_REDIS_PASSWORD_FILE.
void ExportCredentials(const store::RedisEndpoint& endpoint);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_ENDPOINT_SERVER_H_
