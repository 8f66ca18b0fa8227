#include "store/tcp_store/tcp_store_client.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/duration_text.h"
#include "base/host_addresses.h"
#include "base/status_macros.h"
#include "store/redis/redis_socket.h"
#include "store/tcp_store/tcp_store_protocol.h"

namespace ddp::store {
namespace {

// Limit of one attempt to connect. A machine that does not answer must not use up the whole time,
// because its name may soon point to another.
constexpr absl::Duration kTryTimeout = absl::Seconds(5);
constexpr absl::Duration kFirstPause = absl::Milliseconds(20);
constexpr absl::Duration kLongestPause = absl::Seconds(1);
constexpr size_t kMaxValueBytes = size_t{1} << 20;

absl::Time Now() { return MonotonicClock().Now(); }

absl::Status Unavailable(const std::string& server, const std::string& why) {
  return absl::UnavailableError(absl::StrCat("TCPStore at ", server, ": ", why));
}

// Waits for a random part of `pause`, at least half, so that many clients of one server do not come
// at once.
void Pause(absl::Duration pause, absl::Time deadline) {
  uint16_t random = 0;
  (void)!getrandom(&random, sizeof(random), GRND_NONBLOCK);
  const absl::Duration length = std::min(pause * (0.5 + random / 131072.0), deadline - Now());
  ::ddp::Pause(length);
}

absl::StatusOr<UniqueFd> ConnectTo(const addrinfo& address, const std::string& server,
                                   absl::Time deadline) {
  UniqueFd fd(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return Unavailable(server, strerror(errno));
  if (connect(fd.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return Unavailable(server, strerror(errno));
    if (!AwaitSocket(fd.get(), POLLOUT, deadline)) return Unavailable(server, "no answer");
    int error_number = 0;
    socklen_t length = sizeof(error_number);
    getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error_number, &length);
    if (error_number != 0) return Unavailable(server, strerror(error_number));
  }
  const int on = 1;
  (void)setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  (void)setsockopt(fd.get(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  return fd;
}

// Makes one attempt with each address of the name.
absl::StatusOr<UniqueFd> TryConnect(const std::string& host, int port, const std::string& server,
                                    absl::Time deadline) {
  const absl::StatusOr<AddressList> found = ResolveHost(host, {.port = port});
  if (!found.ok()) {
    return Unavailable(server, absl::StrCat("host name: ", found.status().message()));
  }
  absl::Status last = Unavailable(server, "the name has no address");
  for (const addrinfo* address = found->get(); address != nullptr; address = address->ai_next) {
    absl::StatusOr<UniqueFd> fd =
        ConnectTo(*address, server, std::min(deadline, Now() + kTryTimeout));
    if (fd.ok()) return fd;
    last = fd.status();
  }
  return last;
}

}  // namespace

TcpStoreClient::TcpStoreClient(std::string server, UniqueFd fd)
    : server_(std::move(server)), fd_(std::move(fd)) {}

TcpStoreClient::~TcpStoreClient() = default;

absl::StatusOr<std::unique_ptr<TcpStoreClient>> TcpStoreClient::Connect(const std::string& host,
                                                                        int port,
                                                                        absl::Duration timeout) {
  const std::string server = absl::StrCat(host, ":", port);
  const absl::Time deadline = Now() + timeout;
  for (absl::Duration pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    absl::StatusOr<UniqueFd> fd = TryConnect(host, port, server, deadline);
    absl::Status status = fd.status();
    if (status.ok()) {
      std::unique_ptr<TcpStoreClient> client(new TcpStoreClient(server, *std::move(fd)));
      status = client->Validate(std::min(deadline, Now() + kTryTimeout));
      if (status.ok()) return client;
    }
    if (Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat(std::string(status.message()), ", for ", DurationText(timeout)));
    }
    Pause(pause, deadline);
  }
}

absl::Status TcpStoreClient::Validate(absl::Time deadline) {
  const auto number = static_cast<uint32_t>(getpid());
  const std::string greeting = TcpStoreGreeting(number);
  DDP_RETURN_IF_ERROR(Send(greeting, deadline));
  DDP_ASSIGN_OR_RETURN(const std::string answer, Receive(sizeof(number), deadline));
  if (answer == greeting.substr(greeting.size() - sizeof(number))) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("what answers at ", server_, " is no TCPStore: is the port another program's?"));
}

absl::Status TcpStoreClient::Send(const std::string& bytes, absl::Time deadline) {
  size_t sent = 0;
  while (sent < bytes.size()) {
    const ssize_t count = send(fd_.get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!AwaitSocket(fd_.get(), POLLOUT, deadline)) {
        return absl::DeadlineExceededError(
            absl::StrCat("TCPStore at ", server_, " takes no more requests"));
      }
    } else if (errno != EINTR) {
      return Unavailable(server_, strerror(errno));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TcpStoreClient::Receive(size_t size, absl::Time deadline) {
  std::string bytes(size, '\0');
  size_t received = 0;
  while (received < size) {
    const ssize_t count = recv(fd_.get(), bytes.data() + received, size - received, 0);
    if (count > 0) {
      received += static_cast<size_t>(count);
    } else if (count == 0) {
      return Unavailable(server_, "it closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!AwaitSocket(fd_.get(), POLLIN, deadline)) {
        return absl::DeadlineExceededError(
            absl::StrCat("TCPStore at ", server_, " does not answer"));
      }
    } else if (errno != EINTR) {
      return Unavailable(server_, strerror(errno));
    }
  }
  return bytes;
}

absl::Status TcpStoreClient::Set(const std::string& key, const std::string& value,
                                 absl::Duration timeout) {
  // A set has no reply. The reply to the key count after it shows that the set was applied.
  const absl::Time deadline = Now() + timeout;
  std::string request;
  AppendQuery(request, TcpStoreQuery::kSet);
  AppendString(request, key);
  AppendString(request, value);
  AppendQuery(request, TcpStoreQuery::kKeyCount);
  DDP_RETURN_IF_ERROR(Send(request, deadline));
  return Receive(sizeof(int64_t), deadline).status();
}

absl::StatusOr<std::string> TcpStoreClient::Get(const std::string& key, absl::Duration timeout) {
  const absl::Time deadline = Now() + timeout;
  std::string request;
  AppendQuery(request, TcpStoreQuery::kWait);
  AppendNumber(request, 1);
  AppendString(request, key);
  DDP_RETURN_IF_ERROR(Send(request, deadline));
  const absl::Status waited = Receive(1, deadline).status();
  if (absl::IsDeadlineExceeded(waited)) {
    return absl::DeadlineExceededError(absl::StrCat("TCPStore at ", server_, ": no key '", key,
                                                    "' within ", DurationText(timeout)));
  }
  DDP_RETURN_IF_ERROR(waited);
  request.clear();
  AppendQuery(request, TcpStoreQuery::kGet);
  AppendString(request, key);
  DDP_RETURN_IF_ERROR(Send(request, deadline));
  DDP_ASSIGN_OR_RETURN(const std::string head, Receive(sizeof(uint64_t), deadline));
  uint64_t size = 0;
  std::memcpy(&size, head.data(), sizeof(size));
  if (size > kMaxValueBytes) {
    return absl::DataLossError(absl::StrCat("TCPStore at ", server_, ": the value of '", key,
                                            "' has ", size, " bytes; at most ", kMaxValueBytes,
                                            " are read"));
  }
  return Receive(size, deadline);
}

}  // namespace ddp::store
