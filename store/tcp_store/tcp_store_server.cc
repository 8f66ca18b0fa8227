#include "store/tcp_store/tcp_store_server.h"

#include <glog/logging.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/unique_fd.h"
#include "store/tcp_store/tcp_store_connection.h"
#include "store/tcp_store/tcp_store_listener.h"
#include "store/tcp_store/tcp_store_protocol.h"
#include "store/tcp_store/tcp_store_state.h"

namespace ddp::store {
namespace {

// Many bad clients must not fill the log.
constexpr int kMaxDropsLogged = 10;

// Returns `limit`, but at most half of the process's descriptors. The process needs the rest.
int MaxClients(int limit) {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return limit;
  return static_cast<int>(
      std::clamp<rlim_t>(files.rlim_cur / 2, 1, static_cast<rlim_t>(std::max(limit, 1))));
}

// Returns true when the request needs nothing but the owner's keys, which are the same before and
// after Renew().
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

}  // namespace

// Passes the connections' requests to the state, sends the state's replies, and keeps all clients
// together within the limits.
class TcpStoreServer::Shell {
 public:
  Shell(EventLoop* event_loop, std::unique_ptr<TcpStoreListener> listener,
        const TcpStoreLimits& limits)
      : event_loop_(event_loop),
        listener_(std::move(listener)),
        limits_(limits),
        max_clients_(MaxClients(limits.max_clients)),
        state_(std::make_unique<TcpStoreState>(&limits_)) {}

  absl::Status Start() {
    return listener_->Start([this](UniqueFd socket) { OnClient(std::move(socket)); });
  }

  int port() const { return listener_->port(); }

  void Publish(const std::string& key, const std::string& value);
  void AnswerTo(const std::string& prefix, Answer answer) {
    prefix_ = prefix;
    answer_ = std::move(answer);
  }
  void Hold();
  void Renew();

 private:
  using ClientId = TcpStoreState::ClientId;

  struct Client {
    Client(EventLoop* event_loop, UniqueFd socket, const TcpStoreLimits* limits,
           TcpStoreConnection::OnReady on_ready)
        : connection(event_loop, std::move(socket), limits, std::move(on_ready)) {}

    TcpStoreConnection connection;
    bool is_past = false;      // connected before Hold(); its state is past_
    size_t counted_bytes = 0;  // its part of client_bytes_
  };

  void OnClient(UniqueFd socket);
  void MakeRoom();

  void OnReady(ClientId id);
  // Both functions condemn the client on an error and when it has closed its end.
  void Answer(ClientId id, Client& client);
  void Handle(ClientId id, const Client& client, TcpStoreRequest request);
  std::optional<std::string> ReplyOfOwner(const TcpStoreRequest& request) const;
  void Deliver(const TcpStoreState::Replies& replies);
  void AnswerHeld(ClientId id);

  void RestoreInvariants(Client& client);
  void Count(Client& client);
  void HoldLimit();
  void CondemnUnlessOk(ClientId id, const absl::Status& status);
  void DropCondemned();
  void DropPast();
  void DropGone();
  TcpStoreState& StateOf(const Client& client) { return client.is_past ? *past_ : *state_; }

  EventLoop* const event_loop_;
  const std::unique_ptr<TcpStoreListener> listener_;
  const TcpStoreLimits limits_;
  const int max_clients_;
  std::map<std::string, std::string> published_;
  std::string prefix_;  // of the keys that answer_ answers; empty: none
  TcpStoreServer::Answer answer_;

  std::unique_ptr<TcpStoreState> state_;
  std::unique_ptr<TcpStoreState> past_;  // from Hold() to Renew(): state of clients with is_past
  std::map<ClientId, Client> clients_;
  std::set<ClientId> strangers_;  // clients that are not validated yet
  std::set<ClientId> condemned_;  // clients to be dropped before the event loop goes on
  ClientId next_client_ = 1;
  size_t client_bytes_ = 0;  // held by all clients
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
  TcpStoreState::Replies replies;  // none: the new state has no waits
  for (const auto& [key, value] : published_) state_->Set(key, value, replies);
  for (auto& [id, client] : clients_) client.is_past = true;
}

void TcpStoreServer::Shell::Renew() {
  Hold();
  DropPast();
  DropGone();
  // Accepts the clients that wait in the kernel, and drops those that have closed their end.
  bool more = true;
  for (int i = 0; more && i < TcpStoreListener::kMaxRounds; ++i) {
    more = listener_->Accept();
    DropGone();
  }
  std::vector<ClientId> held;
  for (const auto& [id, client] : clients_) {
    if (client.connection.is_holding()) held.push_back(id);
  }
  for (const ClientId id : held) AnswerHeld(id);
}

void TcpStoreServer::Shell::AnswerHeld(ClientId id) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;  // dropped while an earlier client was answered
  Client& client = found->second;
  absl::StatusOr<TcpStoreRequest> request = client.connection.Release();
  if (request.ok()) {
    Handle(id, client, *std::move(request));
    Answer(id, client);
  } else {
    CondemnUnlessOk(id, request.status());
  }
  RestoreInvariants(client);
}

void TcpStoreServer::Shell::OnClient(UniqueFd socket) {
  if (static_cast<int>(clients_.size()) >= max_clients_) MakeRoom();
  if (static_cast<int>(clients_.size()) >= max_clients_) {
    LOG_FIRST_N(WARNING, kMaxDropsLogged)
        << "TCPStore at port " << port() << ": more than " << max_clients_
        << " clients; raise the limit of open files (ulimit -n)";
    return;
  }
  const ClientId id = next_client_++;
  const auto made = clients_.try_emplace(id, event_loop_, std::move(socket), &limits_,
                                         [this, id](uint32_t) { OnReady(id); });
  state_->Connect(id);
  strangers_.insert(id);
  CondemnUnlessOk(id, made.first->second.connection.Start());
  DropCondemned();
}

// Drops the oldest client that is not validated yet.
void TcpStoreServer::Shell::MakeRoom() {
  DropCondemned();
  if (strangers_.empty() || static_cast<int>(clients_.size()) < max_clients_) return;
  CondemnUnlessOk(*strangers_.begin(),
                  absl::ResourceExhaustedError("it said nothing, and others wait"));
  DropCondemned();
}

void TcpStoreServer::Shell::OnReady(ClientId id) {
  Client& client = clients_.at(id);
  CondemnUnlessOk(id, client.connection.Advance());
  Answer(id, client);
  RestoreInvariants(client);
}

// Answers the client's requests. Stops while a reply cannot be sent.
// Holds a request that must wait for Renew().
void TcpStoreServer::Shell::Answer(ClientId id, Client& client) {
  while (!condemned_.contains(id)) {
    absl::StatusOr<std::optional<TcpStoreRequest>> request = client.connection.NextRequest();
    if (!request.ok()) return CondemnUnlessOk(id, request.status());
    if (!request->has_value()) return;
    const bool is_early = past_ != nullptr && !client.is_past && state_->IsValidated(id);
    if (is_early && !IsForTheOwners(**request)) {
      return CondemnUnlessOk(id, client.connection.Hold(**std::move(request)));
    }
    Handle(id, client, **std::move(request));
  }
}

void TcpStoreServer::Shell::Handle(ClientId id, const Client& client, TcpStoreRequest request) {
  TcpStoreState& state = StateOf(client);
  TcpStoreState::Replies replies;
  if (state.IsValidated(id)) {
    if (std::optional<std::string> reply = ReplyOfOwner(request); reply.has_value()) {
      return Deliver({{id, *std::move(reply)}});
    }
  }
  const absl::Status handled = state.Handle(id, std::move(request), replies);
  if (!handled.ok()) return CondemnUnlessOk(id, handled);
  if (!strangers_.empty() && state.IsValidated(id)) strangers_.erase(id);
  Deliver(replies);
}

// Returns the reply to a request that AnswerTo() covers; nullopt for any other.
std::optional<std::string> TcpStoreServer::Shell::ReplyOfOwner(
    const TcpStoreRequest& request) const {
  const bool waits = request.query == TcpStoreQuery::kWait;
  if (prefix_.empty() || (!waits && request.query != TcpStoreQuery::kGet) ||
      request.keys.size() != 1 || !absl::StartsWith(request.keys[0], prefix_)) {
    return std::nullopt;
  }
  if (waits) return std::string(1, kStopWaiting);
  std::string reply;
  AppendString(reply, answer_(request.keys[0].substr(prefix_.size())));
  return reply;
}

void TcpStoreServer::Shell::Deliver(const TcpStoreState::Replies& replies) {
  for (const TcpStoreState::Reply& reply : replies) {
    const auto found = clients_.find(reply.client);
    if (found == clients_.end() || condemned_.contains(reply.client)) continue;
    CondemnUnlessOk(reply.client, found->second.connection.Send(reply.bytes));
    Count(found->second);
  }
}

// Restores what must hold before the event loop goes on. `client` may be destroyed.
void TcpStoreServer::Shell::RestoreInvariants(Client& client) {
  Count(client);
  HoldLimit();
  DropCondemned();
}

void TcpStoreServer::Shell::Count(Client& client) {
  client_bytes_ -= client.counted_bytes;
  client.counted_bytes = client.connection.held_bytes();
  client_bytes_ += client.counted_bytes;
}

// Drops the client that holds most, until all clients are within the limit.
void TcpStoreServer::Shell::HoldLimit() {
  while (client_bytes_ > limits_.max_buffered_bytes) {
    const auto worst = std::max_element(clients_.begin(), clients_.end(), [](auto& a, auto& b) {
      return a.second.counted_bytes < b.second.counted_bytes;
    });
    CondemnUnlessOk(worst->first, absl::ResourceExhaustedError(absl::StrCat(
                                      "its requests and replies are ", worst->second.counted_bytes,
                                      " of more than ", limits_.max_buffered_bytes, " bytes")));
    DropCondemned();
  }
}

void TcpStoreServer::Shell::CondemnUnlessOk(ClientId id, const absl::Status& status) {
  // kUnavailable: the client has closed its end, which is not logged.
  if (status.ok() || !condemned_.insert(id).second || absl::IsUnavailable(status)) return;
  static std::atomic<int> told = 0;  // log lines, of all servers of the process
  if (told >= kMaxDropsLogged) return;
  const int number = ++told;
  LOG(WARNING) << "TCPStore at port " << port() << " drops a client at "
               << clients_.at(id).connection.PeerAddress() << ": " << std::string(status.message())
               << (number == kMaxDropsLogged ? "; more of these are not told" : "");
}

void TcpStoreServer::Shell::DropCondemned() {
  // A drop may end waits of other clients. If a reply cannot be sent, its client is condemned too.
  while (!condemned_.empty()) {
    const ClientId id = *condemned_.begin();
    const auto found = clients_.find(id);
    if (found != clients_.end()) {
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

// The state of these clients is dropped too, so no other client's wait can end.
void TcpStoreServer::Shell::DropPast() {
  for (auto next = clients_.begin(); next != clients_.end();) {
    const auto at = next++;
    if (!at->second.is_past) continue;
    client_bytes_ -= at->second.counted_bytes;
    strangers_.erase(at->first);
    condemned_.erase(at->first);
    clients_.erase(at);
  }
  past_.reset();
}

void TcpStoreServer::Shell::DropGone() {
  for (const auto& [id, client] : clients_) {
    if (client.connection.HasGone()) {
      CondemnUnlessOk(id, absl::UnavailableError("TCPStore: the client has gone"));
    }
  }
  DropCondemned();
}

TcpStoreServer::TcpStoreServer(std::unique_ptr<Shell> shell) : shell_(std::move(shell)) {}
TcpStoreServer::~TcpStoreServer() = default;

absl::StatusOr<std::unique_ptr<TcpStoreServer>> TcpStoreServer::Listen(
    EventLoop* event_loop, const std::string& bind_address, int port,
    const TcpStoreLimits& limits) {
  DDP_ASSIGN_OR_RETURN(auto listener, TcpStoreListener::Listen(event_loop, bind_address, port));
  auto shell = std::make_unique<Shell>(event_loop, std::move(listener), limits);
  DDP_RETURN_IF_ERROR(shell->Start());
  return std::unique_ptr<TcpStoreServer>(new TcpStoreServer(std::move(shell)));
}

int TcpStoreServer::port() const { return shell_->port(); }

void TcpStoreServer::Publish(const std::string& key, const std::string& value) {
  shell_->Publish(key, value);
}

void TcpStoreServer::AnswerTo(const std::string& prefix, Answer answer) {
  shell_->AnswerTo(prefix, std::move(answer));
}

void TcpStoreServer::Hold() { shell_->Hold(); }

void TcpStoreServer::Renew() { shell_->Renew(); }

}  // namespace ddp::store
