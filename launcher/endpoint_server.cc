#include "launcher/endpoint_server.h"

#include <poll.h>
#include <stdlib.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "launcher/network_server.h"
#include "launcher/say.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kNamePause = absl::Milliseconds(500);
// How often a server that could not be started is looked at again: another agent was faster.
constexpr int kAttempts = 3;

absl::Status AtFlag(const store::RedisEndpoint& endpoint, const absl::Status& status) {
  return absl::Status(status.code(),
                      absl::StrCat("--rdzv-endpoint=", endpoint.host, ":", endpoint.port, ": ",
                                   std::string(status.message())));
}

absl::StatusOr<BindProbe> Probe(const store::RedisEndpoint& endpoint, absl::Duration name_timeout) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + name_timeout;
  while (true) {
    absl::StatusOr<BindProbe> probe = ProbeBind(endpoint.host, endpoint.port);
    if (!absl::IsUnavailable(probe.status())) return probe;
    if (clock.Now() >= deadline) {
      return absl::NotFoundError(std::string(probe.status().message()));
    }
    const timespec pause = absl::ToTimespec(kNamePause);
    (void)ppoll(nullptr, 0, &pause, nullptr);
  }
}

void Announce(const store::RedisEndpoint& endpoint, const BindProbe& probe) {
  std::string line = absl::StrCat(
      "started Redis at ", endpoint.host, ":", endpoint.port,
      " on this node; if the node is lost, the others' workers go on, but the job cannot replace, "
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
  if (endpoint.is_unix()) return none;
  absl::Status last;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const absl::StatusOr<BindProbe> probe = Probe(endpoint, name_timeout);
    if (!probe.ok()) return AtFlag(endpoint, probe.status());
    if (probe->ours.empty() || probe->in_use) return none;
    absl::StatusOr<std::unique_ptr<ServerGuard>> server =
        ServerGuard::Start(NetworkServerConfig({.folder = folder,
                                                .addresses = probe->ours,
                                                .port = endpoint.port,
                                                .user = endpoint.user,
                                                .password = endpoint.password}),
                           endpoint);
    if (server.ok()) {
      Announce(endpoint, *probe);
      return server;
    }
    last = server.status();
    if (!absl::IsUnavailable(last)) break;
  }
  return AtFlag(endpoint, absl::Status(last.code(),
                                       absl::StrCat("no server is there, and none can be started "
                                                    "on this node, whose address it is: ",
                                                    std::string(last.message()))));
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
