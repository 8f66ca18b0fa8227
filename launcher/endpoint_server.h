#ifndef DDP_LAUNCHER_ENDPOINT_SERVER_H_
#define DDP_LAUNCHER_ENDPOINT_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "launcher/server_guard.h"
#include "store/redis_endpoint.h"

namespace ddp::launcher {

// Starts Redis at `endpoint` where nobody has: on the node whose address that is. Whether it is
// ours is asked of the kernel by binding it, never by comparing names: an address of another
// machine and one that is in use (a server, or another agent that was faster) are not ours. Of a
// name that has several addresses here, all that can be bound are served, and none if one is in
// use.
//
// The server listens on these addresses only, in `folder` (PrivateRedisServer::Options::directory),
// wants `endpoint`'s password if there is one, knows no command that the rendezvous and RedisStore
// do not need (store/redis_acl.h), and keeps nothing on disk. Says on stderr where it is,
// whether a password guards it, and that losing this node ends membership changes.
//
// Returns nullptr when the endpoint is not ours, or is a unix socket: then a server is there, or
// will be. Keep what is returned while the job lives, and Watch() it.
//
// A name that cannot be resolved yet is waited for, for `name_timeout` (launcher/name_wait.h).
//
// kDeadlineExceeded: the name had no address in that time. kNotFound: the endpoint is ours, but
// redis-server is not installed. kInvalidArgument: a wildcard address (0.0.0.0, ::), which would be
// everybody's. Else what PrivateRedisServer::Start says. Call it on the main thread (see there).
absl::StatusOr<std::unique_ptr<ServerGuard>> StartServerIfOurs(const store::RedisEndpoint& endpoint,
                                                               const std::string& folder,
                                                               absl::Duration name_timeout);

// Whether StartServerIfOurs() would start one. Errors: the same, as far as they can be known.
absl::StatusOr<bool> WouldStartServer(const store::RedisEndpoint& endpoint,
                                      absl::Duration name_timeout);

// As StartServerIfOurs() does, waits until the endpoint's name can be resolved, for a node that
// starts no server. Errors: kDeadlineExceeded.
absl::Status AwaitEndpointName(const store::RedisEndpoint& endpoint, absl::Duration name_timeout);

// For the workers, who connect with what stands in the environment (DDP_REDIS_USER,
// DDP_REDIS_PASSWORD): sets it there to the endpoint's.
void ExportCredentials(const store::RedisEndpoint& endpoint);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_ENDPOINT_SERVER_H_
