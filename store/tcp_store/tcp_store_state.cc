#include "store/tcp_store/tcp_store_state.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::store {
namespace {

// Returns the key for a message: printable and short.
std::string Quoted(const std::string& key) {
  constexpr size_t kMaxShown = 100;
  return absl::StrCat("'", absl::CEscape(key.substr(0, kMaxShown)),
                      key.size() > kMaxShown ? "...'" : "'");
}

size_t Cost(const std::string& text) { return text.size() + kTcpStoreEntryBytes; }
size_t Cost(const std::string& key, const std::string& value) { return Cost(key) + value.size(); }

absl::Status TooLarge(const std::string& what, size_t limit) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " would have more than ", limit, " bytes"));
}

}  // namespace

TcpStoreState::TcpStoreState(const TcpStoreLimits* limits) : limits_(limits) {}

void TcpStoreState::Connect(ClientId id) { clients_.try_emplace(id); }

void TcpStoreState::Disconnect(ClientId id, Replies& replies) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return;
  Client client = std::move(found->second);
  clients_.erase(found);
  if (client.wait != 0) EndWait(client);
  EndPromise(client, replies);
}

bool TcpStoreState::IsValidated(ClientId id) const {
  const auto found = clients_.find(id);
  return found != clients_.end() && found->second.validated;
}

absl::Status TcpStoreState::Handle(ClientId id, TcpStoreRequest request, Replies& replies) {
  const auto found = clients_.find(id);
  if (found == clients_.end()) return absl::InternalError("a request of an unknown client");
  Client& client = found->second;
  const bool validates = request.query == TcpStoreQuery::kValidate;
  if (validates == client.validated || (validates && request.number != kTcpStoreMagic)) {
    return absl::InvalidArgumentError("that is no TCPStore client");
  }
  client.validated = true;
  if (validates) return absl::OkStatus();
  const bool was_promised = client.is_promised;
  const absl::Status status = HandleValidated(client, id, request, replies);
  if (was_promised) EndPromise(client, replies);
  return status;
}

absl::Status TcpStoreState::HandleValidated(Client& client, ClientId id, TcpStoreRequest& request,
                                            Replies& replies) {
  DDP_RETURN_IF_ERROR(CheckRoom(request));
  std::string reply;
  switch (request.query) {
    case TcpStoreQuery::kSet:
    case TcpStoreQuery::kMultiSet:
    case TcpStoreQuery::kAppend:
    case TcpStoreQuery::kQueuePush:
      return Write(request, replies);
    case TcpStoreQuery::kAdd:
      return Add(id, request, replies);
    case TcpStoreQuery::kCompareSet:
      CompareSet(id, request, replies);
      return absl::OkStatus();
    case TcpStoreQuery::kWait:
      return Wait(client, id, request, replies);
    case TcpStoreQuery::kCancelWait:
      if (client.wait != 0) EndWait(client);
      reply = kWaitCanceled;
      break;
    case TcpStoreQuery::kCheck:
      reply = kReady;
      for (const std::string& key : request.keys) {
        if (!IsThere(key)) reply = kNotReady;
      }
      break;
    case TcpStoreQuery::kGet: {
      const auto found = values_.find(request.keys[0]);
      AppendString(reply, found == values_.end() ? std::string() : found->second);
      break;
    }
    case TcpStoreQuery::kMultiGet:
      DDP_RETURN_IF_ERROR(MultiGet(request, reply));
      break;
    case TcpStoreQuery::kListKeys:
      DDP_RETURN_IF_ERROR(ListKeys(reply));
      break;
    case TcpStoreQuery::kKeyCount:
      AppendNumber(reply, static_cast<int64_t>(values_.size()));
      break;
    case TcpStoreQuery::kDelete:
      AppendNumber(reply, Delete(request.keys[0]) ? 1 : 0);
      break;
    case TcpStoreQuery::kQueuePop:
      Pop(request.keys[0], reply);
      break;
    case TcpStoreQuery::kQueueLength: {
      const auto found = queues_.find(request.keys[0]);
      AppendNumber(reply, found == queues_.end() ? 0 : static_cast<int64_t>(found->second.size()));
      break;
    }
    case TcpStoreQuery::kPing:
      AppendNumber(reply, request.number);
      reply.resize(sizeof(uint32_t));
      break;
    case TcpStoreQuery::kValidate:
      break;  // not reached
  }
  if (!reply.empty()) replies.push_back({id, std::move(reply)});
  return absl::OkStatus();
}

// Refuses a request that might exceed max_stored_bytes. The store cannot grow by more than the
// request's size, where a wait's keys count twice because they are stored twice.
absl::Status TcpStoreState::CheckRoom(const TcpStoreRequest& request) const {
  const bool waits = request.query == TcpStoreQuery::kWait;
  if (request.values.empty() && request.query != TcpStoreQuery::kAdd && !waits) {
    return absl::OkStatus();
  }
  size_t bytes = 0;
  for (const std::string& key : request.keys) bytes += 2 * Cost(key);
  for (const std::string& value : request.values) bytes += Cost(value);
  if (stored_bytes_ + bytes <= limits_->max_stored_bytes) return absl::OkStatus();
  return TooLarge(
      absl::StrCat("with ", Quoted(request.keys.empty() ? "" : request.keys[0]), " the store"),
      limits_->max_stored_bytes);
}

absl::Status TcpStoreState::Write(TcpStoreRequest& request, Replies& replies) {
  if (request.query == TcpStoreQuery::kQueuePush) {
    Push(request.keys[0], std::move(request.values[0]), replies);
    return absl::OkStatus();
  }
  if (request.query == TcpStoreQuery::kAppend) {
    const auto found = values_.find(request.keys[0]);
    if (found != values_.end()) {
      if (found->second.size() + request.values[0].size() > limits_->max_value_bytes) {
        return TooLarge(absl::StrCat("append: the value of ", Quoted(request.keys[0])),
                        limits_->max_value_bytes);
      }
      found->second.append(request.values[0]);
      stored_bytes_ += request.values[0].size();
      return absl::OkStatus();
    }
  }
  for (size_t i = 0; i < request.keys.size(); ++i) {
    Set(request.keys[i], std::move(request.values[i]), replies);
  }
  return absl::OkStatus();
}

void TcpStoreState::Set(const std::string& key, std::string value, Replies& replies) {
  const bool was_there = IsThere(key);
  const auto [entry, is_new] = values_.try_emplace(key);
  stored_bytes_ += is_new ? Cost(key, value) : value.size();
  stored_bytes_ -= entry->second.size();
  entry->second = std::move(value);
  if (!is_new) return;
  if (was_there) {
    EndFulfilledWaits(key, replies);  // waits that no element of the queue has ended
  } else {
    Appeared(key, replies);
  }
}

absl::Status TcpStoreState::Add(ClientId id, const TcpStoreRequest& request, Replies& replies) {
  const std::string& key = request.keys[0];
  int64_t sum = 0;
  const auto found = values_.find(key);
  if (found != values_.end() && !absl::SimpleAtoi(found->second, &sum)) {
    return absl::InvalidArgumentError(
        absl::StrCat("add: the value of ", Quoted(key), " is not a number"));
  }
  if (__builtin_add_overflow(sum, request.number, &sum)) {
    return absl::InvalidArgumentError(
        absl::StrCat("add: the sum for ", Quoted(key), " does not fit into 64 bits"));
  }
  Set(key, absl::StrCat(sum), replies);
  std::string reply;
  AppendNumber(reply, sum);
  replies.push_back({id, std::move(reply)});
  return absl::OkStatus();
}

void TcpStoreState::CompareSet(ClientId id, TcpStoreRequest& request, Replies& replies) {
  const std::string& key = request.keys[0];
  const std::string& expected = request.values[0];
  const auto found = values_.find(key);
  std::string reply;
  if (found == values_.end() ? expected.empty() : found->second == expected) {
    AppendString(reply, request.values[1]);
    Set(key, std::move(request.values[1]), replies);
  } else {
    AppendString(reply, found == values_.end() ? expected : found->second);
  }
  replies.push_back({id, std::move(reply)});
}

absl::Status TcpStoreState::MultiGet(const TcpStoreRequest& request, std::string& reply) const {
  for (const std::string& key : request.keys) {
    const auto found = values_.find(key);
    AppendString(reply, found == values_.end() ? std::string() : found->second);
    if (reply.size() > limits_->max_reply_bytes) {
      return TooLarge("multi get: the reply", limits_->max_reply_bytes);
    }
  }
  return absl::OkStatus();
}

absl::Status TcpStoreState::ListKeys(std::string& reply) const {
  AppendNumber(reply, static_cast<int64_t>(values_.size()));
  for (const auto& [key, value] : values_) {
    AppendString(reply, key);
    if (reply.size() > limits_->max_reply_bytes) {
      return TooLarge("list keys: the reply", limits_->max_reply_bytes);
    }
  }
  return absl::OkStatus();
}

bool TcpStoreState::Delete(const std::string& key) {
  const auto found = values_.find(key);
  if (found == values_.end()) return false;
  stored_bytes_ -= Cost(key, found->second);
  values_.erase(found);
  if (!IsThere(key)) Disappeared(key);
  return true;
}

void TcpStoreState::Push(const std::string& key, std::string value, Replies& replies) {
  const bool was_there = IsThere(key);
  const auto [queue, is_new] = queues_.try_emplace(key);
  if (is_new) stored_bytes_ += Cost(key);
  stored_bytes_ += Cost(value);
  queue->second.push_back(std::move(value));
  if (!was_there) Appeared(key, replies);
  OfferElements(key, replies);
}

void TcpStoreState::Pop(const std::string& key, std::string& reply) {
  const auto queue = queues_.find(key);
  AppendNumber(reply, queue == queues_.end() ? 0 : static_cast<int64_t>(queue->second.size()));
  if (queue == queues_.end()) return;
  AppendString(reply, queue->second.front());
  stored_bytes_ -= Cost(queue->second.front());
  queue->second.pop_front();
  if (!queue->second.empty()) return;
  stored_bytes_ -= Cost(key);
  queues_.erase(queue);
  if (!IsThere(key)) Disappeared(key);
}

absl::Status TcpStoreState::Wait(Client& client, ClientId id, TcpStoreRequest& request,
                                 Replies& replies) {
  if (client.wait != 0) return absl::InvalidArgumentError("a wait during another one");
  size_t missing = 0;
  absl::flat_hash_set<std::string> awaited;
  for (std::string& key : request.keys) {
    const bool is_there = IsThere(key);
    if (awaited.insert(std::move(key)).second && !is_there) ++missing;
  }
  if (missing == 0) {
    replies.push_back({id, std::string(1, kStopWaiting)});
    return absl::OkStatus();
  }
  client.wait = next_wait_++;
  client.missing = missing;
  client.awaited = std::move(awaited);
  for (const std::string& key : client.awaited) {
    waiters_[key].emplace(client.wait, id);
    stored_bytes_ += 2 * Cost(key);
  }
  return absl::OkStatus();
}

bool TcpStoreState::IsThere(const std::string& key) const {
  return values_.contains(key) || queues_.contains(key);
}

void TcpStoreState::Appeared(const std::string& key, Replies& replies) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  for (const auto& [wait, id] : found->second) --clients_.at(id).missing;
  EndFulfilledWaits(key, replies);
}

void TcpStoreState::EndFulfilledWaits(const std::string& key, Replies& replies) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  // An element of a queue is for a wait for that queue alone: see OfferElements.
  const bool is_value = values_.contains(key);
  std::vector<ClientId> done;
  for (const auto& [wait, id] : found->second) {
    const Client& client = clients_.at(id);
    if (client.missing == 0 && (is_value || client.awaited.size() > 1)) done.push_back(id);
  }
  for (const ClientId id : done) {
    EndWait(clients_.at(id));
    replies.push_back({id, std::string(1, kStopWaiting)});
  }
}

void TcpStoreState::Disappeared(const std::string& key) {
  const auto found = waiters_.find(key);
  if (found == waiters_.end()) return;
  for (const auto& [wait, id] : found->second) ++clients_.at(id).missing;
}

void TcpStoreState::EndWait(Client& client) {
  for (const std::string& key : client.awaited) {
    const auto found = waiters_.find(key);
    found->second.erase(client.wait);
    if (found->second.empty()) waiters_.erase(found);
    stored_bytes_ -= 2 * Cost(key);
  }
  client.awaited.clear();
  client.wait = 0;
}

void TcpStoreState::OfferElements(const std::string& key, Replies& replies) {
  const auto queue = queues_.find(key);
  if (queue == queues_.end()) return;
  while (true) {
    const auto promised = promises_.find(key);
    if (promised != promises_.end() && promised->second >= queue->second.size()) return;
    const auto waiters = waiters_.find(key);
    if (waiters == waiters_.end()) return;
    ClientId next = 0;
    for (const auto& [wait, id] : waiters->second) {
      if (clients_.at(id).awaited.size() > 1) continue;
      next = id;
      break;
    }
    if (next == 0) return;
    Client& client = clients_.at(next);
    EndWait(client);
    client.promise = key;
    client.is_promised = true;
    ++promises_[key];
    replies.push_back({next, std::string(1, kStopWaiting)});
  }
}

void TcpStoreState::EndPromise(Client& client, Replies& replies) {
  if (!std::exchange(client.is_promised, false)) return;
  const std::string key = std::exchange(client.promise, {});
  const auto promised = promises_.find(key);
  if (--promised->second == 0) promises_.erase(promised);
  OfferElements(key, replies);
}

}  // namespace ddp::store
