#ifndef DDP_LAUNCHER_MEETING_PLACE_H_
#define DDP_LAUNCHER_MEETING_PLACE_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "launcher/launch_options.h"
#include "launcher/local_address.h"
#include "launcher/server_guard.h"
#include "store/redis_endpoint.h"
#include "store/tcp_store_server.h"

namespace ddp::launcher {

// Where the nodes of a job meet, what of it this node serves, and where the others reach this node.
struct MeetingPlace {
  store::RedisEndpoint endpoint;
  LocalAddress own;

  // To be kept while the job lives.
  std::unique_ptr<ServerGuard> server;                  // null: somebody else's
  std::unique_ptr<store::TcpStoreServer> worker_store;  // of node 0 of a static rendezvous
};

// Finds the place, and starts there what this node has to serve: a private server on a unix socket,
// the server at --rdzv-endpoint where that is this node's, or node 0's part of a static rendezvous.
// The credentials that the workers will need are in the environment afterwards, and no others.
//
// `given` is the endpoint that the user named (RendezvousKind::kRedis), with its credentials.
// `folder` is a folder of ours for a server. `event_loop` is not owned and must outlive the place.
// May block for RendezvousOptions::ReachTimeout(): for a name that cannot be resolved yet, and on
// other nodes of a static rendezvous for node 0. Call it on the main thread (see
// PrivateRedisServer).
//
// Errors: those of ServerGuard::Start, StartServerIfOurs, MeetStatically and LocalAddressTowards.
absl::StatusOr<MeetingPlace> FindMeetingPlace(const LaunchOptions& options,
                                              const std::optional<store::RedisEndpoint>& given,
                                              const std::string& folder, EventLoop* event_loop);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_PLACE_H_
