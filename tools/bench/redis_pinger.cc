#include "tools/bench/redis_pinger.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::bench {
namespace {

constexpr char kPing[] = "*1\r\n$4\r\nPING\r\n";
constexpr char kPong[] = "+PONG\r\n";
// Time in which all earlier requests must have been answered.
constexpr int kQuietMs = 300;
constexpr absl::Duration kPatience = absl::Seconds(10);

bool IsConnectedTo(int fd, int port) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  return getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
         address.sin_family == AF_INET && ntohs(address.sin_port) == port;
}

std::vector<int> OpenFiles() {
  std::vector<int> files;
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return files;
  while (const dirent* const entry = readdir(folder)) {
    int fd = 0;
    if (absl::SimpleAtoi(entry->d_name, &fd)) files.push_back(fd);
  }
  closedir(folder);
  std::sort(files.begin(), files.end());
  return files;
}

absl::Status Failed(const char* what) {
  return absl::InternalError(absl::StrCat(what, ": ", strerror(errno)));
}

}  // namespace

absl::StatusOr<RedisPinger> RedisPinger::Create(int port, absl::Duration interval) {
  poll(nullptr, 0, kQuietMs);
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return Failed("epoll");
  std::vector<Socket> sockets;
  for (const int fd : OpenFiles()) {
    int unread = 0;
    if (!IsConnectedTo(fd, port) || ioctl(fd, FIONREAD, &unread) != 0 || unread > 0) continue;
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = sockets.size();
    if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) return Failed("epoll_ctl");
    sockets.push_back({fd});
  }
  return RedisPinger(std::move(sockets), std::move(epoll), interval);
}

absl::StatusOr<int64_t> RedisPinger::Run(const std::function<bool()>& go_on) {
  asked_ = answered_ = 0;
  if (sockets_.empty()) return absl::FailedPreconditionError("no connection to send PINGs over");
  const absl::Time start = clock_.Now();
  const absl::Duration step = interval_ / static_cast<int64_t>(sockets_.size());
  for (size_t turn = 0; go_on(); ++turn) {
    DDP_RETURN_IF_ERROR(ReadUntil(start + static_cast<int64_t>(turn) * step, false));
    DDP_RETURN_IF_ERROR(Ask(sockets_[turn % sockets_.size()]));
  }
  DDP_RETURN_IF_ERROR(ReadUntil(clock_.Now() + kPatience, true));
  if (answered_ < asked_) return absl::DeadlineExceededError("a PING is not answered");
  return answered_;
}

absl::Status RedisPinger::Ask(Socket& socket) {
  if (socket.asked) return absl::OkStatus();  // a heartbeat also waits for the last reply
  const ssize_t size = sizeof(kPing) - 1;
  if (send(socket.fd, kPing, size, MSG_NOSIGNAL | MSG_DONTWAIT) != size) {
    return Failed("sending a PING");
  }
  socket.asked = true;
  ++asked_;
  return absl::OkStatus();
}

// Reads until `deadline`, and at least once. With `until_answered`, returns as soon as all PINGs
// are answered.
absl::Status RedisPinger::ReadUntil(absl::Time deadline, bool until_answered) {
  std::array<epoll_event, 64> events;
  while (!until_answered || answered_ < asked_) {
    const absl::Duration left = deadline - clock_.Now();
    const bool is_over = left <= absl::ZeroDuration();
    const int wait_ms = is_over ? 0 : static_cast<int>(absl::ToInt64Milliseconds(left) + 1);
    const int ready = epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms);
    if (ready < 0 && errno != EINTR) return Failed("epoll_wait");
    for (int i = 0; i < ready; ++i) DDP_RETURN_IF_ERROR(Read(sockets_[events[i].data.u64]));
    if (is_over) return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status RedisPinger::Read(Socket& socket) {
  char answer[64];
  const ssize_t count = recv(socket.fd, answer, sizeof(answer), MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return absl::OkStatus();
  if (!socket.asked || count != sizeof(kPong) - 1 || memcmp(answer, kPong, count) != 0) {
    return absl::InternalError("what came is not the answer to a PING");
  }
  socket.asked = false;
  ++answered_;
  return absl::OkStatus();
}

}  // namespace ddp::bench
