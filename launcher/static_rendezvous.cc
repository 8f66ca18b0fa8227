#include "launcher/static_rendezvous.h"

#include <errno.h>
#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "launcher/local_address.h"
#include "launcher/name_wait.h"
#include "launcher/network_server.h"
#include "launcher/say.h"
#include "nlohmann/json.hpp"
#include "store/tcp_store_client.h"

namespace ddp::launcher {
namespace {

// Where node 0 says in the workers' store where the rendezvous is.
constexpr char kMeetingKey[] = "ddp/static-rendezvous";
// How long node 0 may be away before the user is told who is waited for.
constexpr absl::Duration kQuietWait = absl::Seconds(5);
constexpr absl::Duration kPause = absl::Milliseconds(50);
// Between a port's being free and our server's listening there another program can be faster.
constexpr int kPortAttempts = 8;
constexpr size_t kPasswordBytes = 24;

absl::Time Now() { return MonotonicClock().Now(); }

absl::Status Explain(const std::string& flag, const absl::Status& status,
                     const std::string& cure = "") {
  return absl::Status(status.code(), absl::StrCat(flag, ": ", std::string(status.message()), cure));
}

std::string MasterFlags(const StaticRendezvousOptions& options) {
  return absl::StrCat("--master-addr=", options.master_addr,
                      " --master-port=", options.master_port);
}

absl::StatusOr<std::string> RandomPassword() {
  std::string bytes(kPasswordBytes, '\0');
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return absl::ErrnoToStatus(errno, "getrandom");
  }
  return absl::BytesToHexString(bytes);
}

// The addresses of this machine that the rendezvous' server listens on; the one that the others
// are told is first.
absl::StatusOr<std::vector<std::string>> ServerAddresses(const std::string& master_addr,
                                                         absl::Duration timeout) {
  absl::StatusOr<BindProbe> probe;
  const std::string flag = absl::StrCat("--master-addr=", master_addr);
  DDP_RETURN_IF_ERROR(AwaitName({.what = flag, .timeout = timeout}, [&] {
    probe = ProbeBind(master_addr, 0);
    return probe.status();
  }));
  // Meant for this machine alone, when it says so. A name of its own that its hosts file calls a
  // loopback address, and an address that is translated on the way to us, are other matters: the
  // others need one that is an interface's.
  const bool wants_loopback = master_addr == "localhost" || IsLoopback(master_addr);
  std::vector<std::string> addresses = probe->ours;
  if (addresses.empty() || (probe->is_loopback && !wants_loopback)) {
    const absl::StatusOr<LocalAddress> own = LocalAddressTowards(master_addr, /*beyond_host=*/true);
    if (own.ok()) addresses.insert(addresses.begin(), own->address);
  }
  if (addresses.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--master-addr=", master_addr,
        ": this is node 0, but the address is none of this machine's: give node 0's address"));
  }
  const auto reachable = std::find_if_not(addresses.begin(), addresses.end(), IsLoopback);
  if (reachable != addresses.end()) std::iter_swap(addresses.begin(), reachable);
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  return addresses;
}

absl::StatusOr<std::unique_ptr<ServerGuard>> StartServer(
    const StaticRendezvousOptions& options, const store::RedisEndpoint& credentials,
    const std::vector<std::string>& addresses) {
  absl::Status last;
  for (int attempt = 0; attempt < kPortAttempts; ++attempt) {
    store::RedisEndpoint endpoint = credentials;
    endpoint.host = addresses[0];
    DDP_ASSIGN_OR_RETURN(endpoint.port, FreePort(endpoint.host));
    absl::StatusOr<std::unique_ptr<ServerGuard>> server =
        ServerGuard::Start(NetworkServerConfig({.folder = options.folder,
                                                .addresses = addresses,
                                                .port = endpoint.port,
                                                .user = endpoint.user,
                                                .password = endpoint.password}),
                           endpoint);
    if (server.ok()) return server;
    last = server.status();
    if (!absl::IsUnavailable(last)) break;
  }
  return last;
}

absl::StatusOr<StaticMeeting> Host(const StaticRendezvousOptions& options,
                                   store::RedisEndpoint credentials, EventLoop* event_loop) {
  StaticMeeting meeting;
  auto worker_store = store::TcpStoreServer::Listen(event_loop, "", options.master_port);
  if (!worker_store.ok()) {
    return Explain(absl::StrCat("--master-port=", options.master_port), worker_store.status(),
                   "; choose another one, the same on all nodes");
  }
  meeting.worker_store = *std::move(worker_store);
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> addresses,
                       ServerAddresses(options.master_addr, options.timeout));
  const bool is_ours = credentials.password.empty();
  if (is_ours) {
    DDP_ASSIGN_OR_RETURN(credentials.password, RandomPassword());
  }
  DDP_ASSIGN_OR_RETURN(meeting.server, StartServer(options, credentials, addresses));
  meeting.endpoint = meeting.server->endpoint();
  nlohmann::json told = {{"host", meeting.endpoint.host}, {"port", meeting.endpoint.port}};
  if (is_ours) told["password"] = meeting.endpoint.password;
  meeting.worker_store->Publish(kMeetingKey, told.dump());
  return meeting;
}

absl::StatusOr<store::RedisEndpoint> ParseMeeting(const std::string& text,
                                                  store::RedisEndpoint credentials) {
  const nlohmann::json told = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto is_text = [&](const char* name) {
    return told.contains(name) && told[name].is_string();
  };
  if (!told.is_object() || !is_text("host") || !told.contains("port") ||
      !told["port"].is_number_integer()) {
    return absl::DataLossError("what node 0 says is no address; is it of the same version?");
  }
  credentials.host = told["host"].get<std::string>();
  const int64_t port = told["port"].get<int64_t>();
  if (credentials.host.empty() || port < 1 || port > 65535) {
    return absl::DataLossError("what node 0 says is no address");
  }
  credentials.port = static_cast<int>(port);
  if (credentials.password.empty() && !is_text("password")) {
    return absl::InvalidArgumentError(
        "node 0 has DDP_REDIS_PASSWORD in its environment, and this node has not: set it on all "
        "nodes, or on none");
  }
  if (is_text("password")) {
    credentials.user.clear();
    credentials.password = told["password"].get<std::string>();
  }
  return credentials;
}

// One attempt: to connect, and to be told.
absl::StatusOr<std::string> Ask(const StaticRendezvousOptions& options, absl::Time deadline) {
  DDP_ASSIGN_OR_RETURN(
      const std::unique_ptr<store::TcpStoreClient> client,
      store::TcpStoreClient::Connect(options.master_addr, options.master_port, deadline - Now()));
  return client->Get(kMeetingKey, std::max(deadline - Now(), absl::ZeroDuration()));
}

absl::StatusOr<StaticMeeting> Visit(const StaticRendezvousOptions& options,
                                    const store::RedisEndpoint& credentials) {
  const absl::Time start = Now();
  const absl::Time deadline = start + options.timeout;
  bool told_user = false;
  while (true) {
    const absl::Time until = told_user ? deadline : std::min(deadline, start + kQuietWait);
    const absl::StatusOr<std::string> answer = Ask(options, until);
    if (answer.ok()) {
      absl::StatusOr<store::RedisEndpoint> endpoint = ParseMeeting(*answer, credentials);
      if (!endpoint.ok()) return Explain(MasterFlags(options), endpoint.status());
      StaticMeeting meeting;
      meeting.endpoint = *std::move(endpoint);
      return meeting;
    }
    const bool may_pass =
        absl::IsUnavailable(answer.status()) || absl::IsDeadlineExceeded(answer.status());
    if (!may_pass || Now() >= deadline) {
      const absl::Status why =
          Explain(MasterFlags(options), answer.status(), "; is node 0 running?");
      return may_pass ? absl::DeadlineExceededError(why.message()) : why;
    }
    // An answer that breaks off is of a store that is going: another one may come.
    const timespec pause = absl::ToTimespec(kPause);
    (void)ppoll(nullptr, 0, &pause, nullptr);
    if (!told_user && Now() >= start + kQuietWait) {
      told_user = true;
      Say(absl::StrCat("waiting for node 0 at ", options.master_addr, ":", options.master_port,
                       " (--master-addr, --master-port)"));
    }
  }
}

}  // namespace

absl::StatusOr<StaticMeeting> MeetStatically(const StaticRendezvousOptions& options,
                                             EventLoop* event_loop) {
  store::RedisEndpoint credentials;
  DDP_RETURN_IF_ERROR(store::ApplyRedisCredentialsFromEnvironment(credentials));
  return options.node_rank == 0 ? Host(options, std::move(credentials), event_loop)
                                : Visit(options, credentials);
}

}  // namespace ddp::launcher
