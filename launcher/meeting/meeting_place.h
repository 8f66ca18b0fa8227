#ifndef DDP_LAUNCHER_MEETING_MEETING_PLACE_H_
#define DDP_LAUNCHER_MEETING_MEETING_PLACE_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "launcher/flags/launch_options.h"
#include "launcher/meeting/local_address.h"
#include "launcher/meeting/server_guard.h"
#include "store/redis/redis_endpoint.h"
#include "store/tcp_store/tcp_store_server.h"

namespace ddp::launcher {

// Rendezvous of a job as one node sees it: its endpoint, the servers that this node runs for it,
// and the address where other nodes reach this one.
struct MeetingPlace {
  store::RedisEndpoint endpoint;
  bool has_random_password = false;  // a static rendezvous made it: it is no secret of the user's
  LocalAddress own;

  // Servers of this node; keep them while the job lives.
  std::unique_ptr<ServerGuard> server;                  // null: another process serves
  std::unique_ptr<store::TcpStoreServer> worker_store;  // node 0 of a static rendezvous only
};

// Finds the rendezvous and starts the servers that this node has to run for it: a private one on a
// unix socket, the one at --rdzv-endpoint, or node 0's of a static rendezvous. Afterwards this
// process's environment has the credentials that the workers need, and no others.
//
// `given` is the endpoint that the user named (RendezvousKind::kRedis), with its credentials.
// `folder` is PrivateRedisServer::Options::directory. `event_loop` is not owned and must outlive
// the result.
//
// Blocks for up to RendezvousOptions::read_timeout: for a name that cannot be resolved yet, and
// on other nodes of a static rendezvous for node 0. Blocks also while a server starts. Thread: main
// (see PrivateRedisServer).
//
// Errors: those of ServerGuard::Start, StartServerIfOurs, AwaitEndpointName, MeetStatically and
// LocalAddressTowards.
absl::StatusOr<MeetingPlace> FindMeetingPlace(const LaunchOptions& options,
                                              const std::optional<store::RedisEndpoint>& given,
                                              const std::string& folder, EventLoop* event_loop);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_MEETING_PLACE_H_
