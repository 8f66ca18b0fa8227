#include "testing/accelerator/peer_sockets.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
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

namespace ddp::testing {
namespace {

struct Header {
  uint64_t tag = 0;
  uint64_t bytes = 0;
};

// Bytes on their way to or from one peer: a header, then the message.
template <typename Byte>
class Transfer {
 public:
  Transfer() = default;
  Transfer(const Header& header, absl::Span<Byte> message)
      : header_(header), message_(message), active_(true) {}

  bool done() const { return !active_ || position_ == sizeof(Header) + message_.size(); }
  bool at_message() const { return position_ >= sizeof(Header); }
  const Header& header() const { return header_; }

  // Calls `transmit`, send() or recv() of the given bytes, until the message is through or the
  // socket is not ready. Returns false when the connection has ended. `before_message` is called
  // when the header is through.
  template <typename Transmit>
  absl::StatusOr<bool> Advance(const Transmit& transmit,
                               const std::function<absl::Status()>& before_message) {
    while (!done()) {
      char* header = reinterpret_cast<char*>(&header_);
      const size_t in_message = at_message() ? position_ - sizeof(Header) : 0;
      const ssize_t count =
          at_message() ? transmit(message_.data() + in_message, message_.size() - in_message)
                       : transmit(header + position_, sizeof(Header) - position_);
      if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;
      if (count <= 0) return false;
      const bool header_was_through = at_message();
      position_ += static_cast<size_t>(count);
      if (!header_was_through && at_message()) DDP_RETURN_IF_ERROR(before_message());
    }
    return true;
  }

 private:
  Header header_;
  absl::Span<Byte> message_;
  size_t position_ = 0;
  bool active_ = false;
};

struct PeerTransfers {
  Transfer<const char> out;
  Transfer<char> in;
  bool done() const { return out.done() && in.done(); }
};

// Sends and receives what peer `rank` is ready for.
absl::Status Advance(int rank, int fd, const Header& expected, PeerTransfers& transfers) {
  const auto send_some = [fd](const char* data, size_t size) {
    return send(fd, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  const auto receive_some = [fd](char* data, size_t size) {
    return recv(fd, data, size, MSG_DONTWAIT);
  };
  const auto check_header = [&]() -> absl::Status {
    const Header& header = transfers.in.header();
    if (header.tag == expected.tag && header.bytes == expected.bytes) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " is in another collective, or its sizes differ"));
  };
  DDP_ASSIGN_OR_RETURN(const bool sent,
                       transfers.out.Advance(send_some, [] { return absl::OkStatus(); }));
  DDP_ASSIGN_OR_RETURN(const bool received, transfers.in.Advance(receive_some, check_header));
  if (sent && received) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("rank ", rank, " has closed the connection"));
}

// Waits until one of `sockets` is ready, `aborted` is readable, or `deadline` has passed.
absl::Status AwaitReady(std::vector<pollfd> sockets, int aborted, absl::Time deadline) {
  sockets.push_back({.fd = aborted, .events = POLLIN});
  const absl::Duration left = deadline - MonotonicClock().Now();
  const absl::Duration wait = std::clamp(left, absl::ZeroDuration(), absl::Minutes(1));
  const int milliseconds = static_cast<int>(absl::ToInt64Milliseconds(wait)) + 1;
  const int ready = poll(sockets.data(), sockets.size(), milliseconds);
  if (sockets.back().revents != 0) return absl::AbortedError("the collective was aborted");
  if (ready == 0 && left <= absl::ZeroDuration()) {
    return absl::DeadlineExceededError("the ranks did not come in time");
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> Listen(std::string& address) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // The kernel chooses an abstract name when none is given.
  const sockaddr_un any{.sun_family = AF_UNIX};
  sockaddr_un chosen{};
  socklen_t length = sizeof(chosen);
  if (!fd.valid() ||
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&any), sizeof(any.sun_family)) != 0 ||
      listen(fd.get(), 4096) != 0 ||
      getsockname(fd.get(), reinterpret_cast<sockaddr*>(&chosen), &length) != 0) {
    return absl::ErrnoToStatus(errno, "no socket to listen on");
  }
  address.assign(reinterpret_cast<const char*>(&chosen), length);
  return fd;
}

// Returns a socket to the listener at `address`, on which it has sent `rank`.
absl::StatusOr<UniqueFd> ConnectTo(const std::string& address, int rank) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd.valid() ||
      connect(fd.get(), reinterpret_cast<const sockaddr*>(address.data()),
              static_cast<socklen_t>(address.size())) != 0 ||
      send(fd.get(), &rank, sizeof(rank), MSG_NOSIGNAL) != sizeof(rank)) {
    return absl::ErrnoToStatus(errno, "a peer cannot be reached");
  }
  return fd;
}

}  // namespace

absl::StatusOr<PeerSockets> PeerSockets::Connect(Place place, const Store& store,
                                                 const std::string& prefix,
                                                 absl::Duration timeout) {
  const absl::Time deadline = MonotonicClock().Now() + timeout;
  PeerSockets sockets;
  sockets.peers_.resize(place.size);
  sockets.aborted_ = UniqueFd(eventfd(0, EFD_CLOEXEC));
  std::string address;
  DDP_ASSIGN_OR_RETURN(const UniqueFd listener, Listen(address));
  store.set(absl::StrCat(prefix, place.rank), address);
  for (int peer = 0; peer < place.rank; ++peer) {
    DDP_ASSIGN_OR_RETURN(sockets.peers_[peer],
                         ConnectTo(store.get(absl::StrCat(prefix, peer)), place.rank));
  }
  for (int count = place.rank + 1; count < place.size; ++count) {
    UniqueFd fd;
    while (!fd.valid()) {
      DDP_RETURN_IF_ERROR(
          AwaitReady({{.fd = listener.get(), .events = POLLIN}}, sockets.aborted_.get(), deadline));
      fd = UniqueFd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
    int peer = -1;
    if (recv(fd.get(), &peer, sizeof(peer), MSG_WAITALL) != sizeof(peer)) {
      return absl::UnavailableError("a peer has closed the connection");
    }
    sockets.peers_.at(peer) = std::move(fd);
  }
  return sockets;
}

absl::Status PeerSockets::Exchange(uint64_t tag, const Outgoing& outgoing, const Incoming& incoming,
                                   absl::Time deadline) {
  std::vector<PeerTransfers> transfers(peers_.size());
  std::vector<Header> expected(peers_.size());
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    if (!peers_[peer].valid()) continue;
    if (outgoing[peer]) {
      transfers[peer].out = {{.tag = tag, .bytes = outgoing[peer]->size()}, *outgoing[peer]};
    }
    if (incoming[peer]) {
      expected[peer] = {.tag = tag, .bytes = incoming[peer]->size()};
      transfers[peer].in = {Header(), *incoming[peer]};
    }
  }
  for (;;) {
    std::vector<pollfd> unready;
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      PeerTransfers& both = transfers[peer];
      if (both.done()) continue;
      DDP_RETURN_IF_ERROR(
          Advance(static_cast<int>(peer), peers_[peer].get(), expected[peer], both));
      if (both.done()) continue;
      const int events = (both.in.done() ? 0 : POLLIN) | (both.out.done() ? 0 : POLLOUT);
      unready.push_back({.fd = peers_[peer].get(), .events = static_cast<short>(events)});
    }
    if (unready.empty()) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(AwaitReady(std::move(unready), aborted_.get(), deadline));
  }
}

void PeerSockets::Abort() {
  const uint64_t one = 1;
  (void)!write(aborted_.get(), &one, sizeof(one));
  for (const UniqueFd& peer : peers_) {
    if (peer.valid()) shutdown(peer.get(), SHUT_RDWR);
  }
}

}  // namespace ddp::testing
