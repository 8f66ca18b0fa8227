#include "tools/bench/redis_pinger.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace ddp::bench {
namespace {

constexpr char kPing[] = "*1\r\n$4\r\nPING\r\n";
constexpr char kPong[] = "+PONG\r\n";
// Time in which all earlier requests must have been answered.
constexpr int kQuietMs = 300;
constexpr int kPatienceMs = 10'000;

bool IsIdleConnection(int fd, int port) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  int unread = 0;
  return getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         address.sin_family == AF_INET && ntohs(address.sin_port) == port &&
         ioctl(fd, FIONREAD, &unread) == 0 && unread == 0;
}

absl::Status Failed(const char* what) {
  return absl::InternalError(absl::StrCat(what, ": ", strerror(errno)));
}

}  // namespace

RedisPinger::RedisPinger(int port, absl::Duration interval) : interval_(interval) {
  poll(nullptr, 0, kQuietMs);
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    int fd = 0;
    if (absl::SimpleAtoi(entry.path().filename().string(), &fd) && IsIdleConnection(fd, port)) {
      sockets_.push_back({fd});
    }
  }
}

absl::StatusOr<int64_t> RedisPinger::Run(const std::function<bool()>& go_on) {
  answered_ = 0;
  if (sockets_.empty()) return absl::FailedPreconditionError("no connection to send PINGs over");
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  const absl::Duration step = interval_ / static_cast<int64_t>(sockets_.size());
  for (int64_t turn = 0; go_on(); ++turn) {
    const absl::Duration left = start + turn * step - clock.Now();
    const auto ms =
        std::max(int64_t{0}, absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))));
    poll(nullptr, 0, static_cast<int>(ms));
    Socket& socket = sockets_[turn % sockets_.size()];
    DDP_RETURN_IF_ERROR(Read(socket));
    if (socket.is_asked) continue;  // a heartbeat also waits for the last reply
    const ssize_t size = sizeof(kPing) - 1;
    if (send(socket.fd, kPing, size, MSG_NOSIGNAL | MSG_DONTWAIT) != size) {
      return Failed("sending a PING");
    }
    socket.is_asked = true;
  }
  for (Socket& socket : sockets_) {
    pollfd readable = {.fd = socket.fd, .events = POLLIN, .revents = 0};
    if (socket.is_asked) poll(&readable, 1, kPatienceMs);
    DDP_RETURN_IF_ERROR(Read(socket));
    if (socket.is_asked) return absl::DeadlineExceededError("a PING is not answered");
  }
  return answered_;
}

absl::Status RedisPinger::Read(Socket& socket) {
  char answer[64];
  const ssize_t count = recv(socket.fd, answer, sizeof(answer), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return absl::OkStatus();
  if (!socket.is_asked || count != sizeof(kPong) - 1 || memcmp(answer, kPong, count) != 0) {
    return absl::InternalError("the received bytes are not the reply to a PING");
  }
  socket.is_asked = false;
  ++answered_;
  return absl::OkStatus();
}

}  // namespace ddp::bench
