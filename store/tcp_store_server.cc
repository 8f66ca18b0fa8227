#include "store/tcp_store_server.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <glog/logging.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "store/tcp_store_protocol.h"
#include "store/tcp_store_state.h"

namespace ddp::store {
namespace {

// What is taken from one client before the others have their turn.
constexpr size_t kReadBytes = size_t{64} << 10;
constexpr int kBacklog = 4096;  // the kernel takes what net.core.somaxconn allows
constexpr int kMaxAccepts = 64;
constexpr int kMaxBacklogRounds = kBacklog / kMaxAccepts + 1;
// How long nobody is accepted when the process has no descriptor left.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// A run of bad clients must not fill the log.
constexpr int kMaxDropsLogged = 10;

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
  // Connections of an earlier server that linger at the port are no reason not to listen.
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
    // A machine without IPv6.
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

std::string PeerOf(int fd) {
  Address address;
  address.size = sizeof(address.storage);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.size) != 0)
    return "?";
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.storage.ss_family == AF_INET) {
    inet_ntop(AF_INET, &reinterpret_cast<sockaddr_in*>(&address.storage)->sin_addr, text,
              sizeof(text));
  } else {
    inet_ntop(AF_INET6, &reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_addr, text,
              sizeof(text));
  }
  return text;
}

// At most half of the descriptors that the process may have: the rest is for what else it does.
int MaxClients(int limit) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return limit;
  return static_cast<int>(
      std::clamp<rlim_t>(files.rlim_cur / 2, 1, static_cast<rlim_t>(std::max(limit, 1))));
}

bool HasGone(int fd) {
  pollfd poller = {.fd = fd, .events = POLLRDHUP, .revents = 0};
  return poll(&poller, 1, 0) > 0;
}

// Whether it asks for nothing but what the owner publishes, which is the same in every life of the
// store.
bool IsForTheOwners(const TcpStoreRequest& request) {
  switch (request.query) {
    case TcpStoreQuery::kValidate:
    case TcpStoreQuery::kPing:
    case TcpStoreQuery::kCancelWait:
      return true;
    case TcpStoreQuery::kGet:
    case TcpStoreQuery::kMultiGet:
    case TcpStoreQuery::kCheck:
    case TcpStoreQuery::kWait:
      return std::none_of(request.keys.begin(), request.keys.end(),
                          [](const std::string& key) { return absl::StartsWith(key, "/"); });
    default:
      return false;
  }
}

size_t BytesOf(const TcpStoreRequest& request) {
  size_t bytes = kTcpStoreEntryBytes;
  for (const auto* texts : {&request.keys, &request.values}) {
    for (const std::string& text : *texts) bytes += text.size() + kTcpStoreEntryBytes;
  }
  return bytes;
}

void PrepareClient(int fd) {
  const int on = 1;
  const int idle_s = 15;
  const int interval_s = 5;
  const int probes = 3;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  // A client whose machine is lost says nothing more: ask the kernel to find out.
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

}  // namespace

// Reads what clients send, lets the state answer, writes what it says.
class TcpStoreServer::Shell {
 public:
  Shell(EventLoop* event_loop, UniqueFd listener, const TcpStoreLimits& limits)
      : event_loop_(event_loop),
        listener_(std::move(listener)),
        port_(PortOf(listener_.get())),
        limits_(limits),
        max_clients_(MaxClients(limits.max_clients)),
        state_(std::make_unique<TcpStoreState>(&limits_)),
        read_buffer_(kReadBytes) {}

  ~Shell() {
    for (const auto& [id, client] : clients_) event_loop_->Unwatch(client.fd.get());
    if (pause_.has_value()) event_loop_->CancelTimer(*pause_);
    event_loop_->Unwatch(listener_.get());
  }

  absl::Status Start() {
    return event_loop_->Watch(listener_.get(), EPOLLIN, [this](uint32_t) { Accept(); });
  }

  int port() const { return port_; }

  void Publish(const std::string& key, const std::string& value);
  void Hold();
  void Renew();

 private:
  using ClientId = TcpStoreState::ClientId;

  struct Client {
    Client(UniqueFd fd, const TcpStoreLimits* limits) : fd(std::move(fd)), parser(limits) {}

    size_t held_bytes() const {
      return parser.held_bytes() + output.size() - sent + (held.has_value() ? BytesOf(*held) : 0);
    }

    UniqueFd fd;
    bool is_past = false;                 // goes on in past_
    std::optional<TcpStoreRequest> held;  // until Renew(); nothing is read meanwhile
    TcpStoreParser parser;
    std::string output;
    size_t sent = 0;           // of `output`
    bool is_writing = false;   // waits for EPOLLOUT; nothing is read until all is written
    size_t counted_bytes = 0;  // of it, in client_bytes_
  };

  bool Accept();  // whether more may be waiting
  void AcceptOne(UniqueFd fd);
  void PauseAccepting();
  void MakeRoom();

  void OnReady(ClientId id, uint32_t events);
  // Take what there is. Condemn the client when it has gone.
  void Read(ClientId id, Client& client);
  void Answer(ClientId id, Client& client);
  void Handle(ClientId id, Client& client, TcpStoreRequest request);
  void Flush(ClientId id, Client& client);
  void WatchFor(ClientId id, Client& client, uint32_t events);
  void Deliver(const TcpStoreState::Replies& replies);

  void Count(Client& client);
  void HoldLimit();
  void Condemn(ClientId id, const absl::Status& why);
  void DropCondemned();
  void DropPast();
  void DropGone();
  TcpStoreState& StateOf(const Client& client) { return client.is_past ? *past_ : *state_; }

  EventLoop* const event_loop_;
  const UniqueFd listener_;
  const int port_;
  const TcpStoreLimits limits_;
  const int max_clients_;
  std::map<std::string, std::string> published_;

  std::unique_ptr<TcpStoreState> state_;
  std::unique_ptr<TcpStoreState> past_;  // from Hold() to Renew(): of those who were there before
  std::map<ClientId, Client> clients_;
  std::set<ClientId> strangers_;  // those that have not shown yet that they speak the protocol
  std::set<ClientId> condemned_;  // to be dropped before the event loop goes on
  ClientId next_client_ = 1;
  size_t client_bytes_ = 0;  // what all clients hold
  std::optional<EventLoop::TimerId> pause_;
  std::vector<char> read_buffer_;
};

void TcpStoreServer::Shell::Publish(const std::string& key, const std::string& value) {
  published_[key] = value;
  TcpStoreState::Replies replies;
  state_->Set(key, value, replies);
  if (past_ != nullptr) past_->Set(key, value, replies);
  Deliver(replies);
  DropCondemned();
}

void TcpStoreServer::Shell::Hold() {
  if (past_ != nullptr) return;
  past_ = std::exchange(state_, std::make_unique<TcpStoreState>(&limits_));
  TcpStoreState::Replies replies;  // of nobody
  for (const auto& [key, value] : published_) state_->Set(key, value, replies);
  for (auto& [id, client] : clients_) client.is_past = true;
}

void TcpStoreServer::Shell::Renew() {
  Hold();
  DropPast();
  DropGone();
  // Also those that the kernel alone has met so far: of them some have gone too.
  bool more = true;
  for (int i = 0; more && i < kMaxBacklogRounds; ++i) {
    more = Accept();
    DropGone();
  }
  std::vector<ClientId> held;
  for (const auto& [id, client] : clients_) {
    if (client.held.has_value()) held.push_back(id);
  }
  for (const ClientId id : held) {
    const auto found = clients_.find(id);
    if (found == clients_.end()) continue;
    Client& client = found->second;
    TcpStoreRequest request = *std::move(client.held);
    client.held.reset();
    if (!client.is_writing) WatchFor(id, client, EPOLLIN);
    Handle(id, client, std::move(request));
    Answer(id, client);
    Count(client);
    HoldLimit();
    DropCondemned();
  }
}

bool TcpStoreServer::Shell::Accept() {
  bool more = true;
  for (int i = 0; more && i < kMaxAccepts; ++i) {
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd.valid()) {
      AcceptOne(std::move(fd));
      continue;
    }
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) PauseAccepting();
    more = false;
  }
  DropCondemned();
  return more;
}

void TcpStoreServer::Shell::AcceptOne(UniqueFd fd) {
  if (static_cast<int>(clients_.size()) >= max_clients_) MakeRoom();
  if (static_cast<int>(clients_.size()) >= max_clients_) {
    LOG_FIRST_N(WARNING, kMaxDropsLogged)
        << "TCPStore at port " << port_ << ": more than " << max_clients_
        << " clients; raise the limit of open files (ulimit -n)";
    return;
  }
  PrepareClient(fd.get());
  const ClientId id = next_client_++;
  Client& client = clients_.try_emplace(id, std::move(fd), &limits_).first->second;
  state_->Connect(id);
  strangers_.insert(id);
  WatchFor(id, client, EPOLLIN);
}

// The oldest of those that have connected and said nothing goes.
void TcpStoreServer::Shell::MakeRoom() {
  DropCondemned();
  if (strangers_.empty() || static_cast<int>(clients_.size()) < max_clients_) return;
  Condemn(*strangers_.begin(), absl::ResourceExhaustedError("it said nothing, and others wait"));
  DropCondemned();
}

// Out of descriptors: the listener stays ready, and calling back at once would be a busy loop.
void TcpStoreServer::Shell::PauseAccepting() {
  if (pause_.has_value()) return;
  LOG_FIRST_N(WARNING, kMaxDropsLogged)
      << "TCPStore at port " << port_ << " cannot accept a client: " << strerror(errno);
  event_loop_->Unwatch(listener_.get());
  pause_ = event_loop_->AddTimer(kAcceptPause, [this] {
    pause_.reset();
    const absl::Status watched = Start();
    LOG_IF(ERROR, !watched.ok()) << watched;
  });
}

void TcpStoreServer::Shell::OnReady(ClientId id, uint32_t events) {
  Client& client = clients_.at(id);
  if (client.is_writing) {
    Flush(id, client);
    Answer(id, client);
  } else if (client.held.has_value()) {
    Condemn(id, absl::OkStatus());  // it has gone: nothing else is looked for
  } else if (events != 0) {
    Read(id, client);
  }
  Count(client);
  HoldLimit();
  DropCondemned();
}

void TcpStoreServer::Shell::Read(ClientId id, Client& client) {
  const ssize_t count = recv(client.fd.get(), read_buffer_.data(), read_buffer_.size(), 0);
  if (count > 0) {
    client.parser.Append(read_buffer_.data(), static_cast<size_t>(count));
    Answer(id, client);
    return;
  }
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  Condemn(id, absl::OkStatus());
}

// Stops where replies cannot be sent: what follows is answered when they are. And at what must wait
// for Renew().
void TcpStoreServer::Shell::Answer(ClientId id, Client& client) {
  while (!client.is_writing && !client.held.has_value() && !condemned_.contains(id)) {
    absl::StatusOr<std::optional<TcpStoreRequest>> request = client.parser.Next();
    if (!request.ok()) return Condemn(id, request.status());
    if (!request->has_value()) return;
    const bool is_early = past_ != nullptr && !client.is_past && state_->IsValidated(id);
    if (is_early && !IsForTheOwners(**request)) {
      client.held = **std::move(request);
      WatchFor(id, client, EPOLLRDHUP);
      return;
    }
    Handle(id, client, **std::move(request));
  }
}

void TcpStoreServer::Shell::Handle(ClientId id, Client& client, TcpStoreRequest request) {
  TcpStoreState& state = StateOf(client);
  TcpStoreState::Replies replies;
  const absl::Status handled = state.Handle(id, std::move(request), replies);
  if (!handled.ok()) return Condemn(id, handled);
  if (!strangers_.empty() && state.IsValidated(id)) strangers_.erase(id);
  Deliver(replies);
}

void TcpStoreServer::Shell::Deliver(const TcpStoreState::Replies& replies) {
  for (const TcpStoreState::Reply& reply : replies) {
    const auto found = clients_.find(reply.client);
    if (found == clients_.end() || condemned_.contains(reply.client)) continue;
    Client& client = found->second;
    client.output.append(reply.bytes);
    if (!client.is_writing) Flush(reply.client, client);
    Count(client);
  }
}

void TcpStoreServer::Shell::Flush(ClientId id, Client& client) {
  while (client.sent < client.output.size()) {
    const ssize_t count = send(client.fd.get(), client.output.data() + client.sent,
                               client.output.size() - client.sent, MSG_NOSIGNAL);
    if (count >= 0) {
      client.sent += static_cast<size_t>(count);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) return Condemn(id, absl::OkStatus());
    if (!client.is_writing) WatchFor(id, client, EPOLLOUT);
    client.is_writing = true;
    return;
  }
  client.output = {};
  client.sent = 0;
  if (!std::exchange(client.is_writing, false)) return;
  WatchFor(id, client, client.held.has_value() ? EPOLLRDHUP : EPOLLIN);
}

void TcpStoreServer::Shell::WatchFor(ClientId id, Client& client, uint32_t events) {
  event_loop_->Unwatch(client.fd.get());
  const absl::Status watched = event_loop_->Watch(
      client.fd.get(), events, [this, id](uint32_t ready) { OnReady(id, ready); });
  if (!watched.ok()) Condemn(id, watched);
}

void TcpStoreServer::Shell::Count(Client& client) {
  client_bytes_ -= client.counted_bytes;
  client.counted_bytes = client.held_bytes();
  client_bytes_ += client.counted_bytes;
}

// Beyond the limit goes who holds most.
void TcpStoreServer::Shell::HoldLimit() {
  while (client_bytes_ > limits_.max_buffered_bytes) {
    const auto worst = std::max_element(clients_.begin(), clients_.end(), [](auto& a, auto& b) {
      return a.second.counted_bytes < b.second.counted_bytes;
    });
    Condemn(worst->first, absl::ResourceExhaustedError(absl::StrCat(
                              "its requests and replies are ", worst->second.counted_bytes,
                              " of more than ", limits_.max_buffered_bytes, " bytes")));
    DropCondemned();
  }
}

void TcpStoreServer::Shell::Condemn(ClientId id, const absl::Status& why) {
  if (!condemned_.insert(id).second || why.ok()) return;
  static std::atomic<int> told = 0;  // of all servers of the process
  if (told >= kMaxDropsLogged) return;
  const int number = ++told;
  LOG(WARNING) << "TCPStore at port " << port_ << " drops a client at "
               << PeerOf(clients_.at(id).fd.get()) << ": " << std::string(why.message())
               << (number == kMaxDropsLogged ? "; more of these are not told" : "");
}

void TcpStoreServer::Shell::DropCondemned() {
  // Others' waits may end with it, and they may be gone, too.
  while (!condemned_.empty()) {
    const ClientId id = *condemned_.begin();
    const auto found = clients_.find(id);
    if (found != clients_.end()) {
      event_loop_->Unwatch(found->second.fd.get());
      client_bytes_ -= found->second.counted_bytes;
      TcpStoreState& state = StateOf(found->second);
      clients_.erase(found);
      strangers_.erase(id);
      TcpStoreState::Replies replies;
      state.Disconnect(id, replies);
      Deliver(replies);
    }
    condemned_.erase(id);
  }
}

// With them goes what they knew: nobody waits for them.
void TcpStoreServer::Shell::DropPast() {
  for (auto next = clients_.begin(); next != clients_.end();) {
    const auto at = next++;
    if (!at->second.is_past) continue;
    event_loop_->Unwatch(at->second.fd.get());
    client_bytes_ -= at->second.counted_bytes;
    strangers_.erase(at->first);
    condemned_.erase(at->first);
    clients_.erase(at);
  }
  past_.reset();
}

void TcpStoreServer::Shell::DropGone() {
  for (const auto& [id, client] : clients_) {
    if (HasGone(client.fd.get())) Condemn(id, absl::OkStatus());
  }
  DropCondemned();
}

TcpStoreServer::TcpStoreServer(std::unique_ptr<Shell> shell) : shell_(std::move(shell)) {}
TcpStoreServer::~TcpStoreServer() = default;

absl::StatusOr<std::unique_ptr<TcpStoreServer>> TcpStoreServer::Listen(
    EventLoop* event_loop, const std::string& bind_address, int port,
    const TcpStoreLimits& limits) {
  DDP_ASSIGN_OR_RETURN(UniqueFd listener, ListenOn(bind_address, port));
  auto shell = std::make_unique<Shell>(event_loop, std::move(listener), limits);
  DDP_RETURN_IF_ERROR(shell->Start());
  return std::unique_ptr<TcpStoreServer>(new TcpStoreServer(std::move(shell)));
}

int TcpStoreServer::port() const { return shell_->port(); }

void TcpStoreServer::Publish(const std::string& key, const std::string& value) {
  shell_->Publish(key, value);
}

void TcpStoreServer::Hold() { shell_->Hold(); }

void TcpStoreServer::Renew() { shell_->Renew(); }

}  // namespace ddp::store
