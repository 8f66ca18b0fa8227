#include "store/redis/redis_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/host_addresses.h"
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

absl::StatusOr<UniqueFd> Begin(const RedisEndpoint& endpoint) {
  if (endpoint.is_unix()) return BeginUnix(endpoint);
  const absl::StatusOr<AddressList> address =
      ResolveHost(endpoint.host, {.port = endpoint.port, .is_numeric = true});
  if (!address.ok()) {
    return absl::UnavailableError(absl::StrCat("cannot reach Redis at ", endpoint.DebugString(),
                                               ": ", address.status().message()));
  }
  return BeginTo((*address)->ai_addr, (*address)->ai_addrlen, endpoint);
}

absl::StatusOr<size_t> ReceiveFrom(int fd, absl::Span<char> buffer, int flags,
                                   const RedisEndpoint& endpoint) {
  const ssize_t count = recv(fd, buffer.data(), buffer.size(), flags);
  if (count > 0) return static_cast<size_t>(count);
  if (count == 0) {
    return absl::UnavailableError(
        absl::StrCat("Redis at ", endpoint.DebugString(), " closed the connection"));
  }
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return 0;
  return ConnectionError("the connection broke to", endpoint, errno);
}

}  // namespace

absl::StatusOr<RedisSocket> RedisSocket::BeginConnecting(const RedisEndpoint& endpoint) {
  DDP_ASSIGN_OR_RETURN(UniqueFd fd, Begin(endpoint));
  return RedisSocket(std::move(fd));
}

absl::StatusOr<short> RedisSocket::FinishConnecting(const RedisEndpoint& endpoint) {
  if (tls_ != nullptr) return tls_->Handshake();
  int error_number = 0;
  socklen_t length = sizeof(error_number);
  getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error_number, &length);
  if (error_number != 0) return ConnectionError("cannot reach", endpoint, error_number);
  if (!endpoint.is_unix()) SetTcpOptions(fd());
  if (!endpoint.tls) return short{0};
  DDP_ASSIGN_OR_RETURN(tls_, TlsSession::Start(fd(), endpoint));
  return tls_->Handshake();
}

void RedisSocket::reset() {
  tls_.reset();
  fd_.reset();
}

absl::Status RedisSocket::LimitBlocking(absl::Duration limit) {
  blocking_limit_ = limit;
  const timeval value = absl::ToTimeval(limit);
  const int flags = fcntl(fd(), F_GETFL);
  if (setsockopt(fd(), SOL_SOCKET, SO_RCVTIMEO, &value, sizeof(value)) != 0 || flags < 0 ||
      fcntl(fd(), F_SETFL, flags & ~O_NONBLOCK) != 0) {
    return absl::ErrnoToStatus(errno, "preparing a socket to Redis");
  }
  return absl::OkStatus();
}

absl::StatusOr<size_t> RedisSocket::Send(absl::string_view bytes, const RedisEndpoint& endpoint) {
  if (tls_ != nullptr) return tls_->Send(bytes);
  while (true) {
    const ssize_t count = send(fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) return static_cast<size_t>(count);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) return ConnectionError("the connection broke to", endpoint, errno);
  }
}

absl::StatusOr<size_t> RedisSocket::Receive(absl::Span<char> buffer, Blocking blocking,
                                            const RedisEndpoint& endpoint) {
  const bool may_block = blocking == Blocking::kMayBlock;
  if (tls_ == nullptr) return ReceiveFrom(fd(), buffer, may_block ? 0 : MSG_DONTWAIT, endpoint);
  if (may_block) AwaitSocket(fd(), POLLIN, MonotonicClock().Now() + blocking_limit_);
  return tls_->Receive(buffer);
}

absl::StatusOr<bool> RedisSocket::HasInput(const RedisEndpoint& endpoint) {
  if (tls_ != nullptr) return tls_->HasInput();
  char byte = 0;
  DDP_ASSIGN_OR_RETURN(const size_t count, ReceiveFrom(fd(), absl::MakeSpan(&byte, 1),
                                                       MSG_PEEK | MSG_DONTWAIT, endpoint));
  return count > 0;
}

bool RedisSocket::IsBroken() const {
  char byte = 0;
  const ssize_t count = recv(fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

std::string PeerAddress(int fd, bool with_port) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  auto* const address = reinterpret_cast<sockaddr*>(&peer);
  if (getpeername(fd, address, &size) != 0) return "";
  std::string text = NumericAddress(address, size);
  if (text.empty() || !with_port) return text;
  if (address->sa_family == AF_INET6) {
    const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&peer);
    return absl::StrCat("[", text, "]:", ntohs(v6->sin6_port));
  }
  return absl::StrCat(text, ":", ntohs(reinterpret_cast<const sockaddr_in*>(&peer)->sin_port));
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
