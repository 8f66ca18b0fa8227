#include "launcher/meeting/network_server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/host_addresses.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "launcher/meeting/local_address.h"
#include "store/redis/redis_script.h"
#include "store/redis_server/redis_acl.h"
#include "store/redis_store/redis_key_value_store.h"

namespace ddp::launcher {
namespace {

// Maximum of clients: each agent and each C++ worker has one connection. Redis accepts as many as
// its limit of open files allows, which it raises as far as it may.
constexpr int kMaxClients = 65000;
// Length of the accept queue; the kernel limits it to net.core.somaxconn.
constexpr int kBacklog = 4096;

absl::StatusOr<AddressList> Resolve(const std::string& host, int port) {
  absl::StatusOr<AddressList> found = ResolveHost(host, {.port = port});
  if (found.ok()) return found;
  return absl::UnavailableError(
      absl::StrCat("cannot resolve the name ", host, ": ", found.status().message()));
}

std::string Text(const addrinfo& address) {
  return NumericAddress(address.ai_addr, address.ai_addrlen);
}

// Binds a new socket. Returns 0 or errno.
int TryBind(const addrinfo& address, UniqueFd& fd) {
  fd.reset(socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return errno;
  const int on = 1;
  // The server sets SO_REUSEADDR too: lingering connections of an earlier server do not count.
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ai_family == AF_INET6) {
    (void)setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
  }
  return bind(fd.get(), address.ai_addr, address.ai_addrlen) == 0 ? 0 : errno;
}

std::vector<store::RedisScript> ScriptsOfJobs() {
  std::vector<store::RedisScript> scripts = store::KeyValueScripts();
  const elastic::RendezvousScripts rendezvous;
  for (int i = 0; i < elastic::kScriptCount; ++i) {
    scripts.push_back(rendezvous[static_cast<elastic::ScriptName>(i)]);
  }
  return scripts;
}

// Returns `text` in quotes, every byte by its number: no character has a meaning in the
// configuration.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char byte : text) {
    absl::StrAppend(&quoted, "\\x", absl::BytesToHexString(std::string(1, byte)));
  }
  return quoted + "\"";
}

}  // namespace

std::string BindProbe::Reachable() const {
  const auto found = std::find_if_not(ours.begin(), ours.end(), IsLoopback);
  return found == ours.end() ? ours.front() : *found;
}

bool IsWildcard(const std::string& host) {
  in_addr v4{};
  if (inet_aton(host.c_str(), &v4) != 0) return v4.s_addr == INADDR_ANY;
  in6_addr v6{};
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_UNSPECIFIED(&v6);
}

absl::StatusOr<BindProbe> ProbeBind(const std::string& host, int port) {
  DDP_ASSIGN_OR_RETURN(const AddressList addresses, Resolve(host, port));
  BindProbe probe;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const std::string text = Text(*address);
    if (IsWildcard(text)) {
      return absl::InvalidArgumentError(
          absl::StrCat(host, " is an address of every machine: name the one of one machine"));
    }
    UniqueFd fd;
    switch (const int error_number = TryBind(*address, fd)) {
      case 0:
        if (IsOwnAddress(*address->ai_addr)) probe.ours.push_back(text);
        break;
      case EADDRINUSE:
        probe.in_use = true;
        break;
      case EADDRNOTAVAIL:
      case EAFNOSUPPORT:  // a machine without IPv6
        break;
      case EACCES:
        return absl::PermissionDeniedError(
            absl::StrCat("this user may not listen on port ", port, ": choose one above 1023"));
      default:
        return absl::InternalError(
            absl::StrCat("binding ", text, " port ", port, ": ", strerror(error_number)));
    }
  }
  probe.is_loopback = std::all_of(probe.ours.begin(), probe.ours.end(), IsLoopback);
  return probe;
}

absl::StatusOr<int> FreePort(const std::string& numeric_address) {
  DDP_ASSIGN_OR_RETURN(const AddressList addresses, Resolve(numeric_address, 0));
  UniqueFd fd;
  const int error_number = TryBind(*addresses, fd);
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (error_number != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    return absl::InternalError(absl::StrCat("no free port on ", numeric_address, ": ",
                                            strerror(error_number != 0 ? error_number : errno)));
  }
  return ntohs(storage.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in&>(storage).sin_port
                   : reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
}

store::PrivateRedisServer::Options NetworkServerConfig(const NetworkServerOptions& options) {
  const bool is_default = options.user.empty() || options.user == "default";
  const std::string user = is_default ? "default" : Quoted(options.user);
  const std::string secret =
      options.password.empty() ? "nopass" : Quoted(absl::StrCat(">", options.password));
  store::PrivateRedisServer::Options server;
  server.directory = options.folder;
  server.scripts = ScriptsOfJobs();
  server.port = options.port;
  server.extra_config = {
      absl::StrCat("bind ", absl::StrJoin(options.addresses, " ")),
      absl::StrCat("maxclients ", kMaxClients),
      absl::StrCat("tcp-backlog ", kBacklog),
      absl::StrCat("user ", user, " on ", secret, " ", store::AllJobsAclRules()),
  };
  if (!is_default) server.extra_config.push_back("user default off");
  return server;
}

}  // namespace ddp::launcher
