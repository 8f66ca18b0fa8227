#include "store/redis/redis_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "store/redis/redis_errors.h"

namespace ddp::store {
namespace {

void SetOption(int fd, int level, int name, int value) {
  // Errors are ignored: without the option the kernel's default still works.
  (void)setsockopt(fd, level, name, &value, sizeof(value));
}

void SetTcpOptions(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A waiter sends nothing, so only these probes detect that the server's machine is gone.
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 25'000);
}

absl::StatusOr<UniqueFd> BeginTo(const sockaddr* address, socklen_t size,
                                 const RedisEndpoint& endpoint) {
  UniqueFd fd(socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ConnectionError("making a socket to", endpoint, errno);
  if (connect(fd.get(), address, size) != 0 && errno != EINPROGRESS) {
    return ConnectionError("cannot reach", endpoint, errno);
  }
  return fd;
}

absl::StatusOr<UniqueFd> BeginUnix(const RedisEndpoint& endpoint) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (endpoint.unix_path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the path of a unix socket is too long: ", endpoint.unix_path));
  }
  memcpy(address.sun_path, endpoint.unix_path.data(), endpoint.unix_path.size());
  return BeginTo(reinterpret_cast<const sockaddr*>(&address), sizeof(address), endpoint);
}

absl::StatusOr<UniqueFd> AwaitConnected(absl::StatusOr<UniqueFd> fd, const RedisEndpoint& endpoint,
                                        absl::Time deadline) {
  if (!fd.ok()) return fd;
  if (!AwaitSocket(fd->get(), POLLOUT, deadline)) {
    return ConnectionError("cannot reach", endpoint, ETIMEDOUT);
  }
  DDP_RETURN_IF_ERROR(FinishConnecting(fd->get(), endpoint));
  return fd;
}

using AddressList = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

absl::StatusOr<AddressList> AddressesOf(const RedisEndpoint& endpoint, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  const std::string port = absl::StrCat(endpoint.port);
  const int error = getaddrinfo(endpoint.host.c_str(), port.c_str(), &hints, &found);
  if (error == 0) return AddressList(found, &freeaddrinfo);
  return absl::UnavailableError(absl::StrCat("cannot reach Redis at ", endpoint.DebugString(),
                                             ": host name: ", gai_strerror(error)));
}

}  // namespace

absl::StatusOr<UniqueFd> BeginConnecting(const RedisEndpoint& endpoint) {
  if (endpoint.is_unix()) return BeginUnix(endpoint);
  DDP_ASSIGN_OR_RETURN(const AddressList address, AddressesOf(endpoint, AI_NUMERICHOST));
  return BeginTo(address->ai_addr, address->ai_addrlen, endpoint);
}

absl::Status FinishConnecting(int fd, const RedisEndpoint& endpoint) {
  int error_number = 0;
  socklen_t length = sizeof(error_number);
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error_number, &length);
  if (error_number != 0) return ConnectionError("cannot reach", endpoint, error_number);
  if (!endpoint.is_unix()) SetTcpOptions(fd);
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> ConnectSocket(const RedisEndpoint& endpoint, absl::Time deadline) {
  if (endpoint.is_unix()) return AwaitConnected(BeginUnix(endpoint), endpoint, deadline);
  DDP_ASSIGN_OR_RETURN(const AddressList addresses, AddressesOf(endpoint, 0));
  absl::Status last = ConnectionError("cannot reach", endpoint, EADDRNOTAVAIL);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    absl::StatusOr<UniqueFd> fd = AwaitConnected(
        BeginTo(address->ai_addr, address->ai_addrlen, endpoint), endpoint, deadline);
    if (fd.ok()) return fd;
    last = fd.status();
  }
  return last;
}

std::string PeerAddress(int fd) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  std::array<char, NI_MAXHOST> host{};
  auto* const address = reinterpret_cast<sockaddr*>(&peer);
  if (getpeername(fd, address, &size) != 0 || peer.ss_family == AF_UNIX ||
      getnameinfo(address, size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "";
  }
  return host.data();
}

absl::Status LimitBlocking(int fd, absl::Duration limit) {
  const timeval value = absl::ToTimeval(limit);
  const int flags = fcntl(fd, F_GETFL);
  if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &value, sizeof(value)) != 0 || flags < 0 ||
      fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) != 0) {
    return absl::ErrnoToStatus(errno, "preparing a socket to Redis");
  }
  return absl::OkStatus();
}

bool AwaitSocket(int fd, short events, absl::Time deadline) {
  const MonotonicClock clock;
  pollfd entry{.fd = fd, .events = events, .revents = 0};
  while (true) {
    const bool forever = deadline == absl::InfiniteFuture();
    const absl::Duration left = std::max(deadline - clock.Now(), absl::ZeroDuration());
    const timespec timeout = absl::ToTimespec(left);
    const int ready = ppoll(&entry, 1, forever ? nullptr : &timeout, nullptr);
    // Other errors (a bad descriptor) are reported by the caller's next read or write.
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
    if (ready == 0) return false;
  }
}

}  // namespace ddp::store
