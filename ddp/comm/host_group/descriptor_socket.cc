#include "ddp/comm/host_group/descriptor_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace ddp::internal {
namespace {

absl::Status Error(const char* what) { return absl::ErrnoToStatus(errno, what); }

struct Address {
  explicit Address(const std::string& name) {
    value.sun_family = AF_UNIX;
    const size_t count = std::min(name.size(), sizeof value.sun_path - 1);
    std::memcpy(value.sun_path + 1, name.data(), count);  // the first byte is 0: abstract
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + count);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&value); }

  sockaddr_un value = {};
  socklen_t length = 0;
};

UniqueFd NewSocket() { return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

int64_t DeadlineAfter(absl::Duration timeout) {
  constexpr absl::Duration kYear = absl::Hours(24 * 365);
  return MonotonicNanoseconds() +
         absl::ToInt64Nanoseconds(std::clamp(timeout, absl::ZeroDuration(), kYear));
}

// Blocks until an event or the deadline. Signals do not prolong the wait.
absl::Status AwaitEvent(int fd, int16_t events, int64_t deadline_ns, const char* what) {
  pollfd entry = {.fd = fd, .events = events, .revents = 0};
  while (true) {
    const int64_t left_ns = std::max<int64_t>(0, deadline_ns - MonotonicNanoseconds());
    const int64_t left_ms = std::min<int64_t>((left_ns + 999'999) / 1'000'000, 1 << 30);
    const int ready = ::poll(&entry, 1, static_cast<int>(left_ms));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return Error(what);
    if (left_ns == 0) return absl::DeadlineExceededError(absl::StrCat(what, ": timed out"));
  }
}

// A message with room for descriptors.
struct Message {
  Message(void* data, size_t bytes) : part{.iov_base = data, .iov_len = bytes} {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
  }

  iovec part;
  msghdr header = {};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control = {};
};

}  // namespace

absl::StatusOr<UniqueFd> ListenAt(const std::string& name, int backlog) {
  // Non-blocking: a connection may have gone between poll() and accept().
  UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const Address address(name);
  if (!listener.valid()) return Error("socket");
  if (::bind(listener.get(), address.get(), address.length) != 0) return Error("bind");
  if (::listen(listener.get(), backlog) != 0) return Error("listen");
  return listener;
}

absl::StatusOr<UniqueFd> ConnectTo(const std::string& name, absl::Duration timeout) {
  const int64_t deadline_ns = DeadlineAfter(timeout);
  UniqueFd socket = NewSocket();
  const Address address(name);
  if (!socket.valid()) return Error("socket");
  while (true) {
    // A connect() that blocks on a full backlog obeys this limit. 0 would mean none.
    const int64_t left_ns = std::max<int64_t>(1'000'000, deadline_ns - MonotonicNanoseconds());
    const timeval limit = absl::ToTimeval(absl::Nanoseconds(left_ns));
    ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (::connect(socket.get(), address.get(), address.length) == 0) return socket;
    if (errno == EAGAIN) {
      return absl::DeadlineExceededError("the first rank of the group takes no connections");
    }
    if (errno != EINTR) return Error("connecting to the unix socket of the group's first rank");
  }
}

absl::StatusOr<UniqueFd> Accept(int listener, absl::Duration timeout) {
  const int64_t deadline_ns = DeadlineAfter(timeout);
  while (true) {
    UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    if (socket.valid()) return socket;
    if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) return Error("accept");
    DDP_RETURN_IF_ERROR(AwaitEvent(listener, POLLIN, deadline_ns, "accept"));
  }
}

absl::Status CheckSameUser(int socket) {
  ucred peer = {};
  socklen_t length = sizeof peer;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0)
    return Error("SO_PEERCRED");
  if (peer.uid == ::geteuid() || peer.uid == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("process ", peer.pid, " at the other end of a unix socket is of user ", peer.uid,
                   ", and this process is of user ", ::geteuid()));
}

absl::Status SendAll(int socket, std::span<const std::byte> bytes, std::span<const int> descriptors,
                     absl::Duration timeout) {
  const int64_t deadline_ns = DeadlineAfter(timeout);
  size_t sent = 0;
  while (sent < bytes.size()) {
    DDP_RETURN_IF_ERROR(AwaitEvent(socket, POLLOUT, deadline_ns, "send"));
    Message message(const_cast<std::byte*>(bytes.data() + sent), bytes.size() - sent);
    if (sent == 0 && !descriptors.empty()) {
      message.header.msg_control = message.control.data();
      message.header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
      cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
      control->cmsg_level = SOL_SOCKET;
      control->cmsg_type = SCM_RIGHTS;
      control->cmsg_len = CMSG_LEN(descriptors.size_bytes());
      std::memcpy(CMSG_DATA(control), descriptors.data(), descriptors.size_bytes());
    }
    const ssize_t count = ::sendmsg(socket, &message.header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    // The user has more descriptors under way than the limit of open files, in all sockets
    // together. The receivers take them out.
    if (count < 0 && errno == ETOOMANYREFS && MonotonicNanoseconds() < deadline_ns) {
      ::poll(nullptr, 0, 1);
      continue;
    }
    if (count < 0) return Error("sendmsg");
    sent += static_cast<size_t>(count);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<UniqueFd>> ReceiveAll(int socket, std::span<std::byte> bytes,
                                                 size_t descriptors, absl::Duration timeout) {
  const int64_t deadline_ns = DeadlineAfter(timeout);
  std::vector<UniqueFd> found;
  size_t received = 0;
  while (received < bytes.size()) {
    DDP_RETURN_IF_ERROR(AwaitEvent(socket, POLLIN, deadline_ns, "receive"));
    Message message(bytes.data() + received, bytes.size() - received);
    message.header.msg_control = message.control.data();
    message.header.msg_controllen = message.control.size();
    const ssize_t count = ::recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) return Error("recvmsg");
    for (cmsghdr* control = CMSG_FIRSTHDR(&message.header); control != nullptr;
         control = CMSG_NXTHDR(&message.header, control)) {
      if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
      const size_t numbers = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < numbers; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(control) + i * sizeof(int), sizeof fd);
        found.emplace_back(fd);
      }
    }
    if (count == 0) return absl::UnavailableError("the peer has closed the connection");
    received += static_cast<size_t>(count);
  }
  if (found.size() != descriptors) {
    return absl::DataLossError(absl::StrCat("the peer has sent ", found.size(), " descriptors of ",
                                            descriptors, ": is the limit of open files reached?"));
  }
  return found;
}

}  // namespace ddp::internal
