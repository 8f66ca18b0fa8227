#include "store/tcp_store/tcp_store_connection.h"

#include <arpa/inet.h>
#include <errno.h>
#include <glog/logging.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <utility>

#include "base/status_macros.h"

namespace ddp::store {
namespace {

// Bytes read from one client before the other clients have their turn.
constexpr size_t kReadBytes = size_t{64} << 10;

absl::Status Gone() { return absl::UnavailableError("TCPStore: the client has gone"); }

void Prepare(int fd) {
  const int on = 1;
  const int idle_s = 15;
  const int interval_s = 5;
  const int probes = 3;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A client whose machine is lost sends nothing: only these probes detect the loss.
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

size_t BytesOf(const TcpStoreRequest& request) {
  size_t bytes = kTcpStoreEntryBytes;
  for (const auto* texts : {&request.keys, &request.values}) {
    for (const std::string& text : *texts) bytes += text.size() + kTcpStoreEntryBytes;
  }
  return bytes;
}

}  // namespace

TcpStoreConnection::TcpStoreConnection(EventLoop* event_loop, UniqueFd socket,
                                       const TcpStoreLimits* limits, OnReady on_ready)
    : event_loop_(event_loop),
      socket_(std::move(socket)),
      on_ready_(std::move(on_ready)),
      parser_(limits) {
  Prepare(socket_.get());
}

TcpStoreConnection::~TcpStoreConnection() { event_loop_->Unwatch(socket_.get()); }

absl::Status TcpStoreConnection::Start() { return WatchFor(EPOLLIN); }

absl::Status TcpStoreConnection::Advance() {
  if (is_writing_) return Flush();
  if (held_.has_value()) return Gone();  // only the client's closing is watched for
  return Read();
}

absl::Status TcpStoreConnection::Read() {
  std::array<char, kReadBytes> buffer;
  const ssize_t count = recv(socket_.get(), buffer.data(), buffer.size(), 0);
  if (count > 0) {
    parser_.Append(buffer.data(), static_cast<size_t>(count));
    return absl::OkStatus();
  }
  const bool later = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  return later ? absl::OkStatus() : Gone();
}

absl::StatusOr<std::optional<TcpStoreRequest>> TcpStoreConnection::NextRequest() {
  if (is_writing_ || held_.has_value()) return std::nullopt;
  return parser_.Next();
}

absl::Status TcpStoreConnection::Send(const std::string& bytes) {
  output_.append(bytes);
  return is_writing_ ? absl::OkStatus() : Flush();
}

absl::Status TcpStoreConnection::Flush() {
  while (sent_ < output_.size()) {
    const ssize_t count =
        send(socket_.get(), output_.data() + sent_, output_.size() - sent_, MSG_NOSIGNAL);
    if (count >= 0) {
      sent_ += static_cast<size_t>(count);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Gone();
    if (std::exchange(is_writing_, true)) return absl::OkStatus();
    return WatchFor(EPOLLOUT);
  }
  output_ = {};
  sent_ = 0;
  if (!std::exchange(is_writing_, false)) return absl::OkStatus();
  return WatchFor(held_.has_value() ? EPOLLRDHUP : EPOLLIN);
}

absl::Status TcpStoreConnection::Hold(TcpStoreRequest request) {
  CHECK(!held_.has_value()) << "one request is held already";
  held_ = std::move(request);
  return is_writing_ ? absl::OkStatus() : WatchFor(EPOLLRDHUP);
}

absl::StatusOr<TcpStoreRequest> TcpStoreConnection::Release() {
  CHECK(held_.has_value()) << "no request is held";
  TcpStoreRequest request = *std::move(held_);
  held_.reset();
  if (!is_writing_) DDP_RETURN_IF_ERROR(WatchFor(EPOLLIN));
  return request;
}

size_t TcpStoreConnection::held_bytes() const {
  return parser_.held_bytes() + output_.size() - sent_ + (held_.has_value() ? BytesOf(*held_) : 0);
}

bool TcpStoreConnection::HasGone() const {
  pollfd poller = {.fd = socket_.get(), .events = POLLRDHUP, .revents = 0};
  return poll(&poller, 1, 0) > 0;
}

std::string TcpStoreConnection::PeerAddress() const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getpeername(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) return "?";
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(&address)->sin_addr, text, sizeof(text));
  } else {
    inet_ntop(AF_INET6, &reinterpret_cast<sockaddr_in6*>(&address)->sin6_addr, text, sizeof(text));
  }
  return text;
}

absl::Status TcpStoreConnection::WatchFor(uint32_t events) {
  event_loop_->Unwatch(socket_.get());
  return event_loop_->Watch(socket_.get(), events, on_ready_);
}

}  // namespace ddp::store
