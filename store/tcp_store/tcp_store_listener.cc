#include "store/tcp_store/tcp_store_listener.h"

#include <arpa/inet.h>
#include <errno.h>
#include <glog/logging.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"

namespace ddp::store {
namespace {

constexpr int kBacklog = 4096;  // the kernel limits it to net.core.somaxconn
constexpr int kMaxAccepts = 64;
static_assert(TcpStoreListener::kMaxRounds == kBacklog / kMaxAccepts + 1);
// Pause of accepting when the process has no descriptor left.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// A process without descriptors must not fill the log.
constexpr int kMaxPausesLogged = 10;

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

absl::StatusOr<Address> ParseAddress(const std::string& text, int port) {
  if (port < 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("TCPStore: ", port, " is not a port"));
  }
  Address address;
  auto* const v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* const v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    address.size = sizeof(*v4);
    return address;
  }
  address.storage = {};
  if (inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    address.size = sizeof(*v6);
    return address;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("TCPStore: '", text, "' is neither an IPv4 nor an IPv6 address"));
}

absl::Status ListenError(int error_number, const std::string& address, int port) {
  const std::string what =
      absl::StrCat("TCPStore: listening on ", address.empty() ? "port " : address + " port ", port);
  switch (error_number) {
    case EADDRINUSE:
      return absl::AlreadyExistsError(absl::StrCat(what, ": the port is taken by another process"));
    case EADDRNOTAVAIL:
      return absl::FailedPreconditionError(
          absl::StrCat(what, ": this machine does not have that address"));
    case EACCES:
      return absl::PermissionDeniedError(absl::StrCat(what, ": not allowed to this user"));
    default:
      return absl::InternalError(absl::StrCat(what, ": ", strerror(error_number)));
  }
}

// Returns 0 or errno.
int TryListen(const Address& address, bool both_families, UniqueFd& fd) {
  fd.reset(socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return errno;
  const int on = 1;
  // Old connections of an earlier server at this port must not prevent the listening.
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.storage.ss_family == AF_INET6) {
    const int only = both_families ? 0 : 1;
    (void)setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof(only));
  }
  const auto* const name = reinterpret_cast<const sockaddr*>(&address.storage);
  if (bind(fd.get(), name, address.size) != 0) return errno;
  return listen(fd.get(), kBacklog) == 0 ? 0 : errno;
}

absl::StatusOr<UniqueFd> ListenOn(const std::string& text, int port) {
  DDP_ASSIGN_OR_RETURN(const Address address, ParseAddress(text.empty() ? "::" : text, port));
  UniqueFd fd;
  int error_number = TryListen(address, text.empty(), fd);
  if (text.empty() && error_number != 0 && error_number != EADDRINUSE) {
    // The machine may have no IPv6.
    DDP_ASSIGN_OR_RETURN(const Address any_v4, ParseAddress("0.0.0.0", port));
    error_number = TryListen(any_v4, false, fd);
  }
  if (error_number != 0) return ListenError(error_number, text, port);
  return fd;
}

int PortOf(int fd) {
  Address address;
  address.size = sizeof(address.storage);
  PCHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size) == 0);
  return ntohs(address.storage.ss_family == AF_INET
                   ? reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port
                   : reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_port);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TcpStoreListener>> TcpStoreListener::Listen(
    EventLoop* event_loop, const std::string& bind_address, int port) {
  DDP_ASSIGN_OR_RETURN(UniqueFd fd, ListenOn(bind_address, port));
  return std::unique_ptr<TcpStoreListener>(new TcpStoreListener(event_loop, std::move(fd)));
}

TcpStoreListener::TcpStoreListener(EventLoop* event_loop, UniqueFd fd)
    : event_loop_(event_loop), fd_(std::move(fd)), port_(PortOf(fd_.get())) {}

TcpStoreListener::~TcpStoreListener() {
  if (pause_.has_value()) event_loop_->CancelTimer(*pause_);
  event_loop_->Unwatch(fd_.get());
}

absl::Status TcpStoreListener::Start(OnClient on_client) {
  on_client_ = std::move(on_client);
  return Watch();
}

absl::Status TcpStoreListener::Watch() {
  return event_loop_->Watch(fd_.get(), EPOLLIN, [this](uint32_t) { Accept(); });
}

bool TcpStoreListener::Accept() {
  CHECK(on_client_) << "Start() comes first";
  for (int i = 0; i < kMaxAccepts; ++i) {
    UniqueFd socket(accept4(fd_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) {
      on_client_(std::move(socket));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) Pause();
    return false;
  }
  return true;
}

// Stops accepting for kAcceptPause. The socket stays readable meanwhile, so to watch it would be a
// busy loop.
void TcpStoreListener::Pause() {
  if (pause_.has_value()) return;
  LOG_FIRST_N(WARNING, kMaxPausesLogged)
      << "TCPStore at port " << port_ << " cannot accept a client: " << strerror(errno);
  event_loop_->Unwatch(fd_.get());
  pause_ = event_loop_->AddTimer(kAcceptPause, [this] {
    pause_.reset();
    const absl::Status watched = Watch();
    LOG_IF(ERROR, !watched.ok()) << watched;
  });
}

}  // namespace ddp::store
