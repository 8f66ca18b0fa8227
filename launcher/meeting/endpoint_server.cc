#include "launcher/meeting/endpoint_server.h"

#include <stdlib.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/host_addresses.h"
#include "base/status_macros.h"
#include "launcher/meeting/name_wait.h"
#include "launcher/meeting/network_server.h"
#include "launcher/output/say.h"

namespace ddp::launcher {
namespace {

// Maximum of starts: a start fails when another agent was faster, and the address is then probed
// again.
constexpr int kAttempts = 3;

// Returns the endpoint as a person types it, without credentials.
std::string PlaceOf(const store::RedisEndpoint& endpoint) {
  store::RedisEndpoint place;
  place.host = endpoint.host;
  place.port = endpoint.port;
  return place.DebugString();
}

std::string Flag(const store::RedisEndpoint& endpoint) {
  return absl::StrCat("--rdzv-endpoint=", PlaceOf(endpoint));
}

absl::StatusOr<BindProbe> Probe(const store::RedisEndpoint& endpoint, absl::Duration name_timeout) {
  absl::StatusOr<BindProbe> probe;
  DDP_RETURN_IF_ERROR(AwaitName({.what = Flag(endpoint), .timeout = name_timeout}, [&] {
    probe = ProbeBind(endpoint.host, endpoint.port);
    return probe.status();
  }));
  return probe;
}

// A server with TLS needs a certificate, and one behind sentinels has peers: both are their
// operator's to start.
bool CanStartServer(const store::RedisEndpoint& endpoint) {
  return !endpoint.is_unix() && !endpoint.tls && !endpoint.is_behind_sentinels();
}

void Announce(const store::RedisEndpoint& endpoint, const BindProbe& probe) {
  std::string line =
      absl::StrCat("started Redis at ", PlaceOf(endpoint), " on this node, ",
                   endpoint.password.empty() ? "without a password (DDP_REDIS_PASSWORD): every "
                                               "program that reaches it can stop the job"
                                             : "guarded by the password in DDP_REDIS_PASSWORD",
                   "; if the node is lost, the others' workers go on, but the job cannot replace, "
                   "restart or add any");
  if (probe.is_loopback)
    absl::StrAppend(&line, " (a loopback address: other machines cannot reach it)");
  Say(line);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerGuard>> StartServerIfOurs(const store::RedisEndpoint& endpoint,
                                                               const std::string& folder,
                                                               absl::Duration name_timeout) {
  std::unique_ptr<ServerGuard> none;
  if (!CanStartServer(endpoint)) return none;
  absl::Status last;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    DDP_ASSIGN_OR_RETURN(const BindProbe probe, Probe(endpoint, name_timeout));
    if (probe.ours.empty() || probe.in_use) return none;
    absl::StatusOr<std::unique_ptr<ServerGuard>> server =
        ServerGuard::Start(NetworkServerConfig({.folder = folder,
                                                .addresses = probe.ours,
                                                .port = endpoint.port,
                                                .user = endpoint.user,
                                                .password = endpoint.password}),
                           endpoint);
    if (server.ok()) {
      Announce(endpoint, probe);
      return server;
    }
    last = server.status();
    if (!absl::IsUnavailable(last)) break;
  }
  return absl::Status(last.code(),
                      absl::StrCat(Flag(endpoint),
                                   ": no server is there, and none can be started on this node, "
                                   "whose address it is: ",
                                   std::string(last.message())));
}

absl::StatusOr<bool> WouldStartServer(const store::RedisEndpoint& endpoint,
                                      absl::Duration name_timeout) {
  if (!CanStartServer(endpoint)) return false;
  DDP_ASSIGN_OR_RETURN(const BindProbe probe, Probe(endpoint, name_timeout));
  return !probe.ours.empty() && !probe.in_use;
}

absl::Status AwaitEndpointName(const store::RedisEndpoint& endpoint, absl::Duration name_timeout) {
  if (endpoint.is_unix() || endpoint.is_behind_sentinels()) return absl::OkStatus();
  return AwaitName({.what = Flag(endpoint), .timeout = name_timeout},
                   [&] { return NumericAddressesOf(endpoint.host).status(); });
}

void ExportCredentials(const store::RedisEndpoint& endpoint) {
  const auto set = [](const char* name, const std::string& value) {
    if (value.empty()) {
      ::unsetenv(name);
    } else {
      ::setenv(name, value.c_str(), 1);
    }
  };
  set("DDP_REDIS_USER", endpoint.user);
  set("DDP_REDIS_PASSWORD", endpoint.password);
  ::unsetenv("DDP_REDIS_PASSWORD_FILE");
}

}  // namespace ddp::launcher
