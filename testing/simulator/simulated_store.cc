#include "testing/simulator/simulated_store.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ddp::testing {

using store::RedisReply;

SimulatedStore::SimulatedStore(EventQueue* queue, Random random,
                               const NetworkConditions& conditions, const Trace* trace,
                               std::function<void(const RedisReply&)> on_run)
    : queue_(queue),
      random_(random),
      conditions_(conditions),
      trace_(trace),
      on_run_(std::move(on_run)),
      redis_({.now_us = [this] { return server_now_us(); },
              .publish = [this](std::string_view channel,
                                std::string_view text) { return Publish(channel, text); },
              .run = [this] { return starts_; }}) {}

SimulatedStore::ClientId SimulatedStore::AddClient(std::string name) {
  clients_.push_back({.name = std::move(name)});
  return static_cast<ClientId>(clients_.size()) - 1;
}

int64_t SimulatedStore::Delay() {
  return conditions_.delay_min_us + random_.Exponential(conditions_.delay_mean_us);
}

void SimulatedStore::Call(ClientId client, const store::RedisScript& script,
                          std::vector<std::string> keys, std::vector<std::string> args,
                          int64_t timeout_us, ReplyDone done) {
  const auto request =
      std::make_shared<Request>(Request{.client = client,
                                        .script = &script,
                                        .keys = std::move(keys),
                                        .args = std::move(args),
                                        .gives_up_at_us = queue_->now_us() + timeout_us,
                                        .done = std::move(done)});
  clients_[client].request = request;
  queue_->After(Delay(), [this, request] { Arrive(request); });
}

void SimulatedStore::Arrive(const RequestPtr& request) {
  // A request arrives even when its process has died since.
  if (clients_[request->client].cut_off) return AnswerNever(request);
  if (state_ == State::kDown) {
    return Answer(request, absl::UnavailableError("the connection was refused"));
  }
  if (clients_[request->client].is_broken || random_.Chance(conditions_.lose_request)) {
    ++counts_.lost_requests;
    return Answer(request, absl::UnavailableError("the connection broke"));
  }
  if (random_.Chance(conditions_.swallow)) {
    ++counts_.swallowed;
    return AnswerNever(request);
  }
  if (state_ == State::kPaused) {
    waiting_.push_back(request);
    return AnswerNever(request);
  }
  MemoryDatabase before;
  if (is_awaited_) before = redis_.database();
  RedisReply reply = Run(*request);
  if (IsAwaited(reply)) {
    snapshot_ = std::move(before);
    ++counts_.lost_replies;
    return Answer(request, absl::UnavailableError("the connection broke"));
  }
  if (random_.Chance(conditions_.duplicate)) {
    ++counts_.duplicates;
    queue_->After(random_.Exponential(conditions_.duplicate_mean_us), [this, request] {
      if (state_ != State::kUp) return;
      if (trace_->on()) trace_->Add(clients_[request->client].name, "(a duplicate arrives)");
      Run(*request);
    });
  }
  if (random_.Chance(conditions_.lose_reply)) {
    ++counts_.lost_replies;
    return Answer(request, absl::UnavailableError("the connection broke"));
  }
  Answer(request, std::move(reply));
}

void SimulatedStore::TakeSnapshotBefore(std::function<bool(const RedisReply&)> is_it,
                                        std::function<void()> then) {
  is_awaited_ = std::move(is_it);
  then_ = std::move(then);
}

bool SimulatedStore::IsAwaited(const RedisReply& reply) {
  if (!is_awaited_ || !is_awaited_(reply)) return false;
  is_awaited_ = nullptr;
  queue_->After(0, std::exchange(then_, nullptr));
  return true;
}

RedisReply SimulatedStore::Run(const Request& request) {
  ++counts_.scripts;
  RedisReply reply = redis_.Eval(*request.script, request.keys, request.args);
  on_run_(reply);
  return reply;
}

void SimulatedStore::Answer(const RequestPtr& request, absl::StatusOr<RedisReply> reply) {
  const int64_t at_us = queue_->now_us() + Delay();
  if (at_us >= request->gives_up_at_us) return AnswerNever(request);
  queue_->At(at_us, [this, request, reply = std::move(reply), starts = starts_] {
    if (clients_[request->client].cut_off) return AnswerNever(request);
    // A reply of a server that died does not arrive after the server has started again.
    const bool is_of_this_server = starts == starts_;
    Deliver(request, is_of_this_server ? reply : absl::UnavailableError("the connection broke"));
  });
}

void SimulatedStore::AnswerNever(const RequestPtr& request) {
  queue_->At(request->gives_up_at_us,
             [this, request] { Deliver(request, absl::DeadlineExceededError("no answer")); });
}

void SimulatedStore::Deliver(const RequestPtr& request, const absl::StatusOr<RedisReply>& reply) {
  if (clients_[request->client].gone || request->is_answered) return;
  request->is_answered = true;
  if (!reply.ok()) BreakConnection(request->client);
  request->done(reply);
}

void SimulatedStore::Subscribe(ClientId client, std::string channel, OnPush on_push,
                               std::function<void()> on_subscribed, std::function<void()> on_end) {
  EndSubscription(client);
  queue_->After(Delay(), [this, client, channel = std::move(channel), on_push = std::move(on_push),
                          on_subscribed = std::move(on_subscribed), on_end = std::move(on_end)] {
    Client& self = clients_[client];
    if (self.gone) return;
    if (state_ == State::kDown || self.cut_off || std::exchange(self.is_broken, false) ||
        random_.Chance(conditions_.lose_request)) {
      queue_->After(Delay(), [this, client, on_end] {
        if (!clients_[client].gone) on_end();
      });
      return;
    }
    self.subscription = Subscription{channel, on_push, on_end, next_serial_++};
    channels_[channel].push_back(client);
    on_subscribed();
  });
}

void SimulatedStore::EndSubscription(ClientId client) {
  std::optional<Subscription>& subscription = clients_[client].subscription;
  if (!subscription.has_value()) return;
  std::vector<ClientId>& listeners = channels_[subscription->channel];
  listeners.erase(std::remove(listeners.begin(), listeners.end(), client), listeners.end());
  subscription.reset();
}

// Ends the client's subscription and request. The next use makes a new connection.
void SimulatedStore::BreakConnection(ClientId client) {
  Client& self = clients_[client];
  self.is_broken = false;
  if (self.subscription.has_value()) {
    const std::function<void()> on_end = self.subscription->on_end;
    EndSubscription(client);
    queue_->After(0, [this, client, on_end] {
      if (!clients_[client].gone) on_end();
    });
  }
  if (self.request != nullptr && !self.request->is_answered) {
    Deliver(RequestPtr(self.request), absl::UnavailableError("the connection broke"));
  }
}

int64_t SimulatedStore::Publish(std::string_view channel, std::string_view text) {
  const auto found = channels_.find(channel);
  if (found == channels_.end()) return 0;
  const auto shared = std::make_shared<const std::string>(text);
  for (const ClientId client : found->second) {
    const uint64_t serial = clients_[client].subscription->serial;
    ++counts_.pushed;
    queue_->After(Delay(), [this, client, serial, shared] { Push(client, serial, shared); });
  }
  return static_cast<int64_t>(found->second.size());
}

void SimulatedStore::Push(ClientId client, uint64_t serial,
                          const std::shared_ptr<const std::string>& text) {
  Client& self = clients_[client];
  if (self.gone || !self.subscription.has_value() || self.subscription->serial != serial) return;
  if (self.cut_off || self.is_broken || random_.Chance(conditions_.lose_push)) {
    ++counts_.lost_pushes;
    self.is_broken = true;
    return;
  }
  if (random_.Chance(conditions_.break_subscription)) {
    ++counts_.broken_subscriptions;
    return BreakConnection(client);
  }
  const OnPush on_push = self.subscription->on_push;  // a copy: the callback may subscribe again
  on_push(*text);
}

void SimulatedStore::RemoveClient(ClientId client) {
  EndSubscription(client);
  clients_[client].gone = true;
}

void SimulatedStore::SetCutOff(ClientId client, bool cut_off) {
  clients_[client].cut_off = cut_off;
}

void SimulatedStore::Pause() {
  if (state_ == State::kUp) state_ = State::kPaused;
}

void SimulatedStore::Continue() {
  if (state_ != State::kPaused) return;
  state_ = State::kUp;
  for (const RequestPtr& request : std::exchange(waiting_, {})) {
    RedisReply reply = Run(*request);
    Answer(request, std::move(reply));
  }
}

void SimulatedStore::Kill() {
  state_ = State::kDown;
  for (const RequestPtr& request : std::exchange(waiting_, {})) {
    Answer(request, absl::UnavailableError("the connection broke"));
  }
  for (ClientId client = 0; client < static_cast<ClientId>(clients_.size()); ++client) {
    Client& self = clients_[client];
    if (!self.subscription.has_value()) continue;
    const std::function<void()> on_end = self.subscription->on_end;
    EndSubscription(client);
    queue_->After(Delay(), [this, client, on_end] {
      if (!clients_[client].gone) on_end();
    });
  }
}

void SimulatedStore::Start(Memory memory, int64_t clock_jump_us) {
  if (memory == Memory::kSnapshot) redis_.database() = snapshot_;
  if (memory == Memory::kNothing) redis_.database().Clear();
  clock_offset_us_ += clock_jump_us;
  ++starts_;
  state_ = State::kUp;
}

void SimulatedStore::Heal() {
  conditions_.lose_request = conditions_.lose_reply = conditions_.swallow = 0;
  conditions_.duplicate = conditions_.lose_push = conditions_.break_subscription = 0;
}

}  // namespace ddp::testing
