#include "launcher/watch/metrics_server.h"

#include <errno.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "launcher/watch/metrics_text.h"

namespace ddp::launcher {
namespace {

// Maximum size of a request; Prometheus sends about 300 bytes.
constexpr size_t kRequestBytesMax = 8192;
constexpr int kBacklog = 16;
constexpr absl::Duration kAcceptPause = absl::Seconds(1);

absl::Status ListenError(int port) {
  const std::string what =
      absl::StrCat("--metrics-port: cannot listen on port ", port, ": ", strerror(errno));
  if (errno == EADDRINUSE) {
    return absl::FailedPreconditionError(absl::StrCat(what, " (0 takes any free port)"));
  }
  if (errno == EACCES) return absl::PermissionDeniedError(what);
  return absl::InternalError(what);
}

// Returns a listening socket; invalid, with errno, when the address family or port cannot be used.
UniqueFd TryListen(int family, int port) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return fd;
  // SO_REUSEADDR makes the port of an agent that has just ended available at once.
  const int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  sockaddr_in6 v6{};
  sockaddr_in v4{};
  const sockaddr* address = reinterpret_cast<const sockaddr*>(&v4);
  socklen_t size = sizeof(v4);
  if (family == AF_INET6) {
    const int off = 0;  // the socket accepts IPv4 too, whatever bindv6only says
    ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
    address = reinterpret_cast<const sockaddr*>(&v6);
    size = sizeof(v6);
  }
  v6.sin6_family = AF_INET6;
  v6.sin6_addr = in6addr_any;
  v4.sin_family = AF_INET;
  v4.sin_addr.s_addr = htonl(INADDR_ANY);
  v6.sin6_port = v4.sin_port = htons(static_cast<uint16_t>(port));
  if (::bind(fd.get(), address, size) == 0 && ::listen(fd.get(), kBacklog) == 0) return fd;
  const int error = errno;
  fd.reset();
  errno = error;
  return fd;
}

// Listens on IPv6 and IPv4, or on IPv4 alone if the machine was started without IPv6.
absl::StatusOr<UniqueFd> ListenOn(int port) {
  UniqueFd fd = TryListen(AF_INET6, port);
  if (!fd.valid() && (errno == EAFNOSUPPORT || errno == EADDRNOTAVAIL)) {
    fd = TryListen(AF_INET, port);
  }
  if (!fd.valid()) return ListenError(port);
  return fd;
}

absl::StatusOr<int> PortOf(const UniqueFd& listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return absl::InternalError(absl::StrCat("getsockname: ", strerror(errno)));
  }
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string Response(const char* status, const char* type, const std::string& body,
                     const char* more_headers = "") {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                      "\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\n",
                      more_headers, "\r\n", body);
}

bool IsComplete(const std::string& request) {
  return absl::StrContains(request, "\r\n\r\n") || absl::StrContains(request, "\n\n");
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Listen(EventLoop* loop,
                                                                     const Options& options,
                                                                     Source source) {
  DDP_ASSIGN_OR_RETURN(UniqueFd listener, ListenOn(options.port));
  DDP_ASSIGN_OR_RETURN(const int port, PortOf(listener));
  std::unique_ptr<MetricsServer> server(
      new MetricsServer(loop, options, std::move(source), std::move(listener), port));
  DDP_RETURN_IF_ERROR(server->StartAccepting());
  return server;
}

MetricsServer::MetricsServer(EventLoop* loop, const Options& options, Source source,
                             UniqueFd listener, int port)
    : loop_(loop),
      options_(options),
      source_(std::move(source)),
      listener_(std::move(listener)),
      port_(port) {}

MetricsServer::~MetricsServer() {
  while (!connections_.empty()) Close(connections_.begin()->first);
  loop_->CancelTimer(pause_timer_);
  loop_->Unwatch(listener_.get());
}

absl::Status MetricsServer::StartAccepting() {
  return loop_->Watch(listener_.get(), EPOLLIN, [this](uint32_t) { Accept(); });
}

// Pauses when descriptors are used up: the listener stays readable, and the loop must not spin on
// it.
void MetricsServer::PauseAccepting() {
  loop_->Unwatch(listener_.get());
  pause_timer_ = loop_->AddTimer(kAcceptPause, [this] {
    pause_timer_ = 0;
    if (!StartAccepting().ok()) PauseAccepting();
  });
}

void MetricsServer::Accept() {
  UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) PauseAccepting();
    return;
  }
  if (connections_.size() >= static_cast<size_t>(options_.connections_max)) return;
  const int number = fd.get();
  Connection& connection = connections_[number];
  connection.fd = std::move(fd);
  connection.timer = loop_->AddTimer(options_.connection_timeout, [this, number] {
    connections_.at(number).timer = 0;
    Close(number);
  });
  if (!WatchFor(connection, EPOLLIN)) Close(number);
}

void MetricsServer::OnReady(int fd, uint32_t events) {
  Connection& connection = connections_.at(fd);
  const bool goes_on = (events & EPOLLERR) == 0 &&
                       (connection.response.empty() ? Receive(connection) : Send(connection));
  if (!goes_on) Close(fd);
}

// Returns false when the connection is to be closed.
bool MetricsServer::Receive(Connection& connection) {
  std::array<char, 4096> bytes;
  const ssize_t got = ::recv(connection.fd.get(), bytes.data(), bytes.size(), 0);
  if (got < 0) return errno == EAGAIN || errno == EINTR;
  if (got == 0) return false;
  connection.request.append(bytes.data(), static_cast<size_t>(got));
  if (connection.request.size() > kRequestBytesMax) {
    connection.response =
        Response("431 Request Header Fields Too Large", "text/plain", "request too large\n");
  } else if (IsComplete(connection.request)) {
    connection.response = Answer(connection.request);
  } else {
    return true;
  }
  return WatchFor(connection, EPOLLOUT) && Send(connection);
}

bool MetricsServer::Send(Connection& connection) {
  const std::string& response = connection.response;
  const ssize_t put = ::send(connection.fd.get(), response.data() + connection.sent,
                             response.size() - connection.sent, MSG_NOSIGNAL);
  if (put < 0) return errno == EAGAIN || errno == EINTR;
  connection.sent += static_cast<size_t>(put);
  return connection.sent < response.size();
}

bool MetricsServer::WatchFor(Connection& connection, uint32_t events) {
  const int fd = connection.fd.get();
  loop_->Unwatch(fd);
  return loop_->Watch(fd, events, [this, fd](uint32_t ready) { OnReady(fd, ready); }).ok();
}

void MetricsServer::Close(int fd) {
  const auto found = connections_.find(fd);
  loop_->CancelTimer(found->second.timer);
  loop_->Unwatch(fd);
  connections_.erase(found);
}

std::string MetricsServer::Answer(const std::string& request) const {
  const std::string line = request.substr(0, request.find_first_of("\r\n"));
  const size_t method_end = line.find(' ');
  const size_t target_end = line.find(' ', method_end == std::string::npos ? 0 : method_end + 1);
  if (method_end == std::string::npos || target_end == std::string::npos ||
      line.compare(target_end + 1, 5, "HTTP/") != 0) {
    return Response("400 Bad Request", "text/plain", "not an HTTP request\n");
  }
  const std::string method = line.substr(0, method_end);
  std::string target = line.substr(method_end + 1, target_end - method_end - 1);
  target = target.substr(0, target.find('?'));
  if (method != "GET") {
    return Response("405 Method Not Allowed", "text/plain", "only GET\n", "Allow: GET\r\n");
  }
  if (target != "/metrics") {
    return Response("404 Not Found", "text/plain", "the metrics are at /metrics\n");
  }
  return Response("200 OK", kMetricsContentType, MetricsText(source_()));
}

}  // namespace ddp::launcher
