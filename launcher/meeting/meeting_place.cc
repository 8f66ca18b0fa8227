#include "launcher/meeting/meeting_place.h"

#include <stdlib.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"
#include "launcher/meeting/endpoint_server.h"
#include "launcher/meeting/static_rendezvous.h"
#include "launcher/output/say.h"

namespace ddp::launcher {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

absl::StatusOr<LocalAddress> OwnAddress(const LaunchOptions& options, const std::string& peer) {
  if (!options.local_addr.empty()) {
    return LocalAddress{.address = options.local_addr,
                        .interface = InterfaceOf(options.local_addr)};
  }
  if (peer.empty()) {
    return LocalAddress{.address = kLoopback, .interface = "", .is_loopback = true};
  }
  return LocalAddressTowards(peer, /*beyond_host=*/options.job.limits.max_nodes > 1);
}

absl::StatusOr<MeetingPlace> MeetPrivately(const std::string& folder) {
  MeetingPlace place;
  DDP_ASSIGN_OR_RETURN(place.server, ServerGuard::Start(folder));
  place.endpoint = place.server->endpoint();
  // The workers would read these variables and send the credentials to a server that has none.
  for (const char* name : {"DDP_REDIS_USER", "DDP_REDIS_PASSWORD", "DDP_REDIS_PASSWORD_FILE"}) {
    ::unsetenv(name);
  }
  return place;
}

absl::StatusOr<MeetingPlace> MeetAtEndpoint(const LaunchOptions& options,
                                            const store::RedisEndpoint& endpoint,
                                            const std::string& folder) {
  MeetingPlace place;
  place.endpoint = endpoint;
  const bool is_host = options.rendezvous.is_host.value_or(true);
  if (is_host && options.job.limits.max_nodes == 1 && !options.job.fingerprint.empty()) {
    // Uses a private server: another ddprun must not depend on a server that ends with this one.
    DDP_ASSIGN_OR_RETURN(const bool nobody_serves,
                         WouldStartServer(endpoint, options.rendezvous.read_timeout));
    if (nobody_serves) return MeetPrivately(folder);
  }
  if (is_host) {
    DDP_ASSIGN_OR_RETURN(place.server,
                         StartServerIfOurs(endpoint, folder, options.rendezvous.read_timeout));
  } else {
    DDP_RETURN_IF_ERROR(AwaitEndpointName(endpoint, options.rendezvous.read_timeout));
  }
  return place;
}

absl::StatusOr<MeetingPlace> MeetAtMaster(const LaunchOptions& options, const std::string& folder,
                                          EventLoop* event_loop) {
  StaticRendezvousOptions meeting;
  meeting.node_rank = std::max(options.node_rank, 0);
  meeting.master_addr = options.master_addr;
  if (options.master_port != 0) meeting.master_port = options.master_port;
  meeting.folder = folder;
  meeting.timeout = options.rendezvous.read_timeout;
  DDP_ASSIGN_OR_RETURN(StaticMeeting met, MeetStatically(meeting, event_loop));
  MeetingPlace place;
  place.endpoint = std::move(met.endpoint);
  place.has_random_password = !met.has_users_password;
  place.server = std::move(met.server);
  place.worker_store = std::move(met.worker_store);
  ExportCredentials(place.endpoint);
  if (place.server != nullptr && options.job.limits.max_nodes > 1) {
    Say(absl::StrCat(
        "this node, --node-rank=0, holds the rendezvous, ",
        met.has_users_password
            ? "guarded by the password in DDP_REDIS_PASSWORD"
            : "guarded by a random password that every program gets which reaches MASTER_PORT "
              "(DDP_REDIS_PASSWORD sets one)",
        "; if the node is lost, the others' workers go on, but the job cannot replace, restart or "
        "add any"));
  }
  return place;
}

}  // namespace

absl::StatusOr<MeetingPlace> FindMeetingPlace(const LaunchOptions& options,
                                              const std::optional<store::RedisEndpoint>& given,
                                              const std::string& folder, EventLoop* event_loop) {
  absl::StatusOr<MeetingPlace> place;
  std::string peer;  // address that the other nodes reach as well
  switch (options.rendezvous.kind) {
    case RendezvousKind::kPrivate:
      place = MeetPrivately(folder);
      break;
    case RendezvousKind::kRedis:
      peer = given->is_behind_sentinels() ? given->sentinels.front().first : given->host;
      place = MeetAtEndpoint(options, *given, folder);
      break;
    case RendezvousKind::kStatic:
      peer = options.master_addr;
      place = MeetAtMaster(options, folder, event_loop);
      break;
  }
  if (!place.ok()) return place;
  DDP_ASSIGN_OR_RETURN(place->own, OwnAddress(options, peer));
  return place;
}

}  // namespace ddp::launcher
