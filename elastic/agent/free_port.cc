#include "elastic/agent/free_port.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace ddp::elastic {
namespace {

// Above the ports that services are known by.
constexpr int kPortMin = 10'000;
constexpr int kPortMax = 65'535;
constexpr int kTriesMax = 256;

// The first port that the kernel gives out by itself.
int FirstEphemeralPort() {
  constexpr int kUsual = 32'768;
  const std::unique_ptr<FILE, int (*)(FILE*)> file(
      fopen("/proc/sys/net/ipv4/ip_local_port_range", "re"), &fclose);
  int first = kUsual;
  if (file == nullptr || fscanf(file.get(), "%d", &first) != 1) return kUsual;
  return first;
}

// Zero, or the errno of binding a listener of `family` to `port` on all addresses.
int TryBind(int family, int port, bool reuse_address) {
  UniqueFd listener(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!listener.valid()) return errno;
  const int reuse = reuse_address ? 1 : 0;
  setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof(reuse));
  sockaddr_storage storage{};  // of zeros: all addresses
  socklen_t size = sizeof(sockaddr_in);
  if (family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(static_cast<uint16_t>(port));
    size = sizeof(sockaddr_in6);
  } else {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(static_cast<uint16_t>(port));
  }
  storage.ss_family = static_cast<sa_family_t>(family);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0) return errno;
  // Of two sockets that reuse addresses both may be bound; only one can listen.
  if (listen(listener.get(), 1) != 0) return errno;
  return 0;
}

// The wildcard of IPv6 takes that of IPv4 along; a host without IPv6 has the latter only.
int TryListen(int port, bool reuse_address) {
  const int error = TryBind(AF_INET6, port, reuse_address);
  if (error == 0 || error == EADDRINUSE || error == EACCES) return error;
  return TryBind(AF_INET, port, reuse_address);
}

}  // namespace

absl::StatusOr<int> FindFreePort() {
  int last = FirstEphemeralPort() - 1;
  // A host may have given nearly all ports to the kernel's range: then there is no better one.
  if (last < kPortMin + kTriesMax) last = kPortMax;
  std::random_device seed;
  std::uniform_int_distribution<int> draw(kPortMin, std::min(last, kPortMax));
  for (int tries = 0; tries < kTriesMax; ++tries) {
    const int port = draw(seed);
    if (TryListen(port, /*reuse_address=*/false) == 0) return port;
  }
  return absl::ResourceExhaustedError(absl::StrCat("no free TCP port for MASTER_PORT: ", kTriesMax,
                                                   " of ", kPortMin, "..", last,
                                                   " tried; name one with --master-port"));
}

absl::Status CheckPortIsFree(int port) {
  const int error = TryListen(port, /*reuse_address=*/true);
  if (error == 0) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("port ", port, " cannot be used: ", strerror(error),
                                             "; leave --master-port out to have one found"));
}

}  // namespace ddp::elastic
