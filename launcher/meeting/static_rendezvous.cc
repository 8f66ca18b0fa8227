#include "launcher/meeting/static_rendezvous.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/host_addresses.h"
#include "base/status_macros.h"
#include "launcher/meeting/address_proof.h"
#include "launcher/meeting/local_address.h"
#include "launcher/meeting/name_wait.h"
#include "launcher/meeting/network_server.h"
#include "launcher/output/say.h"
#include "nlohmann/json.hpp"
#include "store/tcp_store/tcp_store_client.h"

namespace ddp::launcher {
namespace {

// Key of the workers' store under which node 0 publishes the address of the rendezvous.
constexpr char kMeetingKey[] = "ddp/static-rendezvous";
// Prefix of keys that are challenges to node 0; the nonce follows.
constexpr char kProofPrefix[] = "ddp/static-proof/";
// Time for which node 0 may be away before the user is informed.
constexpr absl::Duration kQuietWait = absl::Seconds(5);
constexpr absl::Duration kPause = absl::Milliseconds(50);
// Maximum of ports to try: another program may bind a free port before our server does.
constexpr int kPortAttempts = 8;

absl::Time Now() { return MonotonicClock().Now(); }

absl::Status Explain(const std::string& flag, const absl::Status& status,
                     const std::string& cure = "") {
  return absl::Status(status.code(), absl::StrCat(flag, ": ", std::string(status.message()), cure));
}

// Returns the text for node 0 that both sides of a proof use.
std::string MasterOf(const StaticRendezvousOptions& options) {
  return absl::StrCat(options.master_addr, ":", options.master_port);
}

std::string MasterFlags(const StaticRendezvousOptions& options) {
  return absl::StrCat("--master-addr=", options.master_addr,
                      " --master-port=", options.master_port);
}

// Returns the addresses of this machine for the rendezvous' server to listen on. The first is the
// address for the other nodes.
absl::StatusOr<std::vector<std::string>> ServerAddresses(const std::string& master_addr,
                                                         absl::Duration timeout) {
  absl::StatusOr<BindProbe> probe;
  const std::string flag = absl::StrCat("--master-addr=", master_addr);
  DDP_RETURN_IF_ERROR(AwaitName({.what = flag, .timeout = timeout}, [&] {
    probe = ProbeBind(master_addr, 0);
    return probe.status();
  }));
  // The user means this machine alone if master_addr is localhost or a loopback address. Two other
  // cases need the address of an interface: the hosts file maps this machine's own name to a
  // loopback address, or master_addr is translated on the way to us.
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

// Publishes the address of the Redis server. With a random password every program that asks
// receives both. With the user's password a node must send a challenge, and receives the address
// with the proof.
void PublishMeeting(const StaticRendezvousOptions& options, const StaticMeeting& meeting) {
  const store::RedisEndpoint& endpoint = meeting.endpoint;
  nlohmann::json published = nlohmann::json::object();
  if (meeting.has_users_password) {
    const ProvenAddress address = {
        .master = MasterOf(options), .host = endpoint.host, .port = endpoint.port};
    meeting.worker_store->AnswerTo(
        kProofPrefix, [address, password = endpoint.password](const std::string& nonce) {
          const absl::StatusOr<std::string> own_nonce = MakeNonce();
          return own_nonce.ok() ? AnswerChallenge(password, address, nonce, *own_nonce) : "";
        });
    published["challenge"] = true;
  } else {
    published = {{"host", endpoint.host}, {"port", endpoint.port}, {"password", endpoint.password}};
  }
  meeting.worker_store->Publish(kMeetingKey, published.dump());
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
    DDP_ASSIGN_OR_RETURN(credentials.password, MakeNonce());
  }
  DDP_ASSIGN_OR_RETURN(meeting.server, StartServer(options, credentials, addresses));
  meeting.endpoint = meeting.server->endpoint();
  meeting.has_users_password = !is_ours;
  PublishMeeting(options, meeting);
  return meeting;
}

// Node 0's answer to every program that asks. Nothing in it is proved.
struct PublishedMeeting {
  bool wants_challenge = false;
  store::RedisEndpoint endpoint;  // only without a challenge
};

absl::StatusOr<PublishedMeeting> ParseMeeting(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return absl::DataLossError("what node 0 says is no address; is it of the same version?");
  }
  PublishedMeeting meeting;
  if (json.contains("challenge")) {
    meeting.wants_challenge = true;
    return meeting;
  }
  const auto is_text = [&](const char* name) {
    return json.contains(name) && json[name].is_string();
  };
  if (!is_text("host") || !is_text("password") || !json.contains("port") ||
      !json["port"].is_number_integer()) {
    return absl::DataLossError("what node 0 says is no address; is it of the same version?");
  }
  meeting.endpoint.host = json["host"].get<std::string>();
  meeting.endpoint.password = json["password"].get<std::string>();
  const int64_t port = json["port"].get<int64_t>();
  if (meeting.endpoint.host.empty() || port < 1 || port > 65535) {
    return absl::DataLossError("what node 0 says is no address");
  }
  meeting.endpoint.port = static_cast<int>(port);
  return meeting;
}

// Checks that the proved address is the one that this node's --master-addr means.
absl::Status CheckMaster(const StaticRendezvousOptions& options, const ProvenAddress& address) {
  if (address.master == MasterOf(options)) return absl::OkStatus();
  const absl::StatusOr<std::vector<std::string>> known = NumericAddressesOf(options.master_addr);
  if (known.ok() && std::find(known->begin(), known->end(), address.host) != known->end()) {
    return absl::OkStatus();
  }
  return absl::UnauthenticatedError(absl::StrCat(
      "node 0 is that of ", address.master, " and has its Redis server at ", address.host,
      ", which is no address of ", options.master_addr,
      ": give all nodes the same --master-addr and --master-port; the password was not sent"));
}

absl::StatusOr<store::RedisEndpoint> AskForProof(const StaticRendezvousOptions& options,
                                                 store::RedisEndpoint credentials,
                                                 store::TcpStoreClient& client) {
  DDP_ASSIGN_OR_RETURN(const std::string nonce, MakeNonce());
  const absl::StatusOr<std::string> answer =
      client.Get(absl::StrCat(kProofPrefix, nonce), options.proof_timeout);
  if (absl::IsUnavailable(answer.status())) return answer.status();
  const absl::StatusOr<ProvenAddress> address =
      answer.ok() ? CheckAnswer(credentials.password, nonce, *answer) : answer.status();
  if (!address.ok()) {
    return absl::UnauthenticatedError(
        "what answers there does not prove that it knows this node's DDP_REDIS_PASSWORD: it is "
        "another program, or node 0 has another password; the password was not sent");
  }
  DDP_RETURN_IF_ERROR(CheckMaster(options, *address));
  credentials.host = address->host;
  credentials.port = address->port;
  return credentials;
}

// Makes one attempt to connect and ask. kUnavailable, kDeadlineExceeded: another attempt may
// succeed.
absl::StatusOr<store::RedisEndpoint> Ask(const StaticRendezvousOptions& options,
                                         const store::RedisEndpoint& credentials,
                                         absl::Time deadline) {
  DDP_ASSIGN_OR_RETURN(
      const std::unique_ptr<store::TcpStoreClient> client,
      store::TcpStoreClient::Connect(options.master_addr, options.master_port, deadline - Now()));
  DDP_ASSIGN_OR_RETURN(const std::string text,
                       client->Get(kMeetingKey, std::max(deadline - Now(), absl::ZeroDuration())));
  DDP_ASSIGN_OR_RETURN(PublishedMeeting published, ParseMeeting(text));
  const bool has_password = !credentials.password.empty();
  if (published.wants_challenge != has_password) {
    return absl::InvalidArgumentError(
        has_password
            ? "this node has DDP_REDIS_PASSWORD in its environment, and node 0 has not: set it on "
              "all nodes, or on none; the password was not sent"
            : "node 0 has DDP_REDIS_PASSWORD in its environment, and this node has not: set it on "
              "all nodes, or on none");
  }
  return has_password ? AskForProof(options, credentials, *client) : std::move(published.endpoint);
}

absl::StatusOr<StaticMeeting> Visit(const StaticRendezvousOptions& options,
                                    const store::RedisEndpoint& credentials) {
  const absl::Time start = Now();
  const absl::Time deadline = start + options.timeout;
  bool told_user = false;
  while (true) {
    const absl::Time until = told_user ? deadline : std::min(deadline, start + kQuietWait);
    absl::StatusOr<store::RedisEndpoint> endpoint = Ask(options, credentials, until);
    if (endpoint.ok()) {
      StaticMeeting meeting;
      meeting.endpoint = *std::move(endpoint);
      meeting.has_users_password = !credentials.password.empty();
      return meeting;
    }
    const absl::Status& why = endpoint.status();
    if (!absl::IsUnavailable(why) && !absl::IsDeadlineExceeded(why)) {
      return Explain(MasterFlags(options), why);
    }
    if (Now() >= deadline) {
      const absl::Status late = Explain(MasterFlags(options), why, "; is node 0 running?");
      return absl::DeadlineExceededError(late.message());
    }
    // An answer that ends early comes from a store that is ending: another store may start.
    Pause(kPause);
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
