#include "elastic/rendezvous/rendezvous_connection.h"

#include <glog/logging.h>
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "store/redis/redis_errors.h"

namespace ddp::elastic {
namespace {

// Bound on the replies handled in one turn of the event loop, as RedisSocket::kReceiveBytes is on
// the bytes read: a flood must not starve its other work.
constexpr int kRepliesPerTurn = 64;

store::RedisConnectionOptions WithPushes(store::RedisConnectionOptions options) {
  options.resp3 = true;
  return options;
}

}  // namespace

RendezvousConnection::RendezvousConnection(const store::RedisEndpoint& endpoint,
                                           const store::RedisConnectionOptions& options,
                                           EventLoop* loop, Callbacks callbacks)
    : endpoint_(endpoint),
      options_(WithPushes(options)),
      loop_(loop),
      callbacks_(std::move(callbacks)),
      dialer_(endpoint, options_),
      wire_(store::RedisWire::Pushes::kKept, options.limits) {}

RendezvousConnection::~RendezvousConnection() { Close(); }

// Asking. ----------------------------------------------------------------------------------------

void RendezvousConnection::Call(const store::RedisScript& script,
                                const std::vector<std::string>& keys,
                                const std::vector<std::string>& args, Done done) {
  CHECK(!busy()) << "one call at a time";
  std::vector<std::string> words = {absl::StrCat(keys.size())};
  words.insert(words.end(), keys.begin(), keys.end());
  words.insert(words.end(), args.begin(), args.end());
  call_ = PendingCall{std::move(done), &script, std::move(words)};
  if (Ready()) SendCall();
}

void RendezvousConnection::Call(std::vector<std::string> words, Done done) {
  CHECK(!busy()) << "one call at a time";
  call_ = PendingCall{std::move(done), nullptr, std::move(words)};
  if (Ready()) SendCall();
}

void RendezvousConnection::Listen(const std::string& channel) {
  const std::string earlier = std::exchange(channel_, channel);
  listening_ = false;
  if (!Ready()) return;
  if (!earlier.empty() && earlier != channel) {
    Send({Awaited::Kind::kUnsubscribe, earlier}, {"UNSUBSCRIBE", earlier});
  }
  AskForChannel();
}

// Returns true when there is a connection. Else starts to connect, if need be: requests are sent on
// the new connection, or fail with it.
bool RendezvousConnection::Ready() {
  if (break_timer_ != 0) return false;
  if (socket_.valid()) return true;
  if (!std::exchange(dialing_, true)) {
    dialer_.Dial(loop_, absl::InfiniteFuture(), [this](absl::StatusOr<store::RedisSocket> socket) {
      dialing_ = false;
      socket.ok() ? Use(*std::move(socket)) : Break(socket.status());
    });
  }
  return false;
}

void RendezvousConnection::Adopt(store::RedisSocket socket) {
  dialer_.FoundAt(dialer_.AddressOf(socket));
  Use(std::move(socket));
}

void RendezvousConnection::Use(store::RedisSocket socket) {
  CHECK(!socket_.valid() && !dialing_) << "one connection at a time";
  socket_ = std::move(socket);
  WatchFor(EPOLLIN);
  if (!channel_.empty()) AskForChannel();
  if (call_.has_value()) SendCall();
}

void RendezvousConnection::SendCall() {
  std::vector<std::string> words = call_->words;
  if (call_->script != nullptr) {
    words.insert(words.begin(),
                 {call_->source_sent ? "EVAL" : "EVALSHA",
                  call_->source_sent ? call_->script->source() : call_->script->sha1_hex()});
  }
  loop_->CancelTimer(reply_timer_);
  reply_timer_ = loop_->AddTimer(options_.command_timeout, [this] {
    Break(absl::DeadlineExceededError(
        absl::StrCat("no reply from Redis at ", endpoint_.DebugString(), " in ",
                     absl::FormatDuration(options_.command_timeout))));
  });
  Send({Awaited::Kind::kCall, ""}, words);
}

void RendezvousConnection::AskForChannel() {
  loop_->CancelTimer(confirm_timer_);
  confirm_timer_ = loop_->AddTimer(options_.command_timeout, [this] {
    Break(absl::DeadlineExceededError(
        absl::StrCat("no answer to a subscription from Redis at ", endpoint_.DebugString(), " in ",
                     absl::FormatDuration(options_.command_timeout))));
  });
  Send({Awaited::Kind::kSubscribe, channel_}, {"SUBSCRIBE", channel_});
}

void RendezvousConnection::Send(Awaited awaited, const std::vector<std::string>& words) {
  awaited_.push_back(std::move(awaited));
  store::AppendRedisCommand(words, out_);
  Flush();
}

void RendezvousConnection::Flush() {
  if (break_timer_ != 0) return;
  absl::string_view left = out_;
  while (!left.empty()) {
    const absl::StatusOr<size_t> count = socket_.Send(left, endpoint_);
    if (!count.ok()) return BreakSoon(count.status());
    if (*count == 0) break;
    left.remove_prefix(*count);
  }
  out_.erase(0, out_.size() - left.size());
  WatchFor(out_.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

void RendezvousConnection::WatchFor(uint32_t events) {
  if (watched_events_ == events) return;
  if (watched_events_ != 0) loop_->Unwatch(socket_.fd());
  watched_events_ = 0;
  const absl::Status watched =
      loop_->Watch(socket_.fd(), events, [this](uint32_t ready) { OnEvents(ready); });
  if (!watched.ok()) return BreakSoon(watched);
  watched_events_ = events;
}

// Hearing. ---------------------------------------------------------------------------------------

void RendezvousConnection::OnEvents(uint32_t events) {
  if ((events & EPOLLOUT) != 0) Flush();
  // Received replies are still waiting for their turn; read more only after them.
  if (break_timer_ != 0 || turn_timer_ != 0) return;
  const absl::Status read = Read();
  if (!read.ok()) return Break(read);
  TakeTurn();
}

absl::Status RendezvousConnection::Read() {
  char buffer[store::RedisSocket::kReceiveBytes];
  DDP_ASSIGN_OR_RETURN(
      const size_t count,
      socket_.Receive(absl::MakeSpan(buffer), store::RedisSocket::Blocking::kNever, endpoint_));
  return wire_.Feed(buffer, count);
}

void RendezvousConnection::TakeTurn() {
  for (int i = 0; i < kRepliesPerTurn; ++i) {
    const absl::StatusOr<bool> took = TakeNext();
    if (!took.ok()) return Break(took.status());
    if (!*took || break_timer_ != 0) return;
  }
  // Replies that were already read do not make the socket readable, so a timer resumes.
  turn_timer_ = loop_->AddTimer(absl::ZeroDuration(), [this] {
    turn_timer_ = 0;
    TakeTurn();
  });
}

// Handles one reply or push. Returns false when there was none. Order alone tells what a reply
// answers. If the oldest awaited answer is a call's, the next reply is that call's. Else the next
// reply is an error to a subscription; it is handled after all pushes, because a push may confirm
// that subscription.
absl::StatusOr<bool> RendezvousConnection::TakeNext() {
  const bool call_is_next = !awaited_.empty() && awaited_.front().kind == Awaited::Kind::kCall;
  if (call_is_next) {
    DDP_ASSIGN_OR_RETURN(const bool replied, TakeNextReply());
    if (replied) return true;
  }
  DDP_ASSIGN_OR_RETURN(const bool pushed, TakeNextPush());
  if (pushed || call_is_next) return pushed;
  return TakeNextReply();
}

absl::StatusOr<bool> RendezvousConnection::TakeNextReply() {
  store::RedisReply reply;
  const absl::StatusOr<bool> replied = wire_.NextReply(reply);
  if (!replied.ok()) return Named(replied.status());
  if (*replied) DDP_RETURN_IF_ERROR(TakeReply(std::move(reply)));
  return replied;
}

absl::StatusOr<bool> RendezvousConnection::TakeNextPush() {
  store::RedisPush push;
  const absl::StatusOr<bool> pushed = wire_.NextPush(push);
  if (!pushed.ok()) return Named(pushed.status());
  if (*pushed) TakePush(push);
  return pushed;
}

// Returns the wire's error with the name of the server.
absl::Status RendezvousConnection::Named(const absl::Status& wire_error) const {
  return absl::Status(wire_error.code(), absl::StrCat("Redis at ", endpoint_.DebugString(), ": ",
                                                      wire_error.message()));
}

absl::Status RendezvousConnection::TakeReply(store::RedisReply reply) {
  if (awaited_.empty()) {
    return absl::InternalError(absl::StrCat("Redis at ", endpoint_.DebugString(),
                                            " answered what was not asked: ", reply.DebugString()));
  }
  const Awaited asked = std::move(awaited_.front());
  awaited_.pop_front();
  if (asked.kind == Awaited::Kind::kCall) {
    if (reply.IsError() && store::IsReplicaRefusal(reply.error_text())) {
      // After a fail-over this is the old master, which no longer publishes either.
      dialer_.Doubt();
      return store::StatusOfErrorReply(reply.error_text(), endpoint_);
    }
    OnReply(std::move(reply));
  } else if (!reply.IsError()) {
    return absl::InternalError(absl::StrCat("Redis at ", endpoint_.DebugString(), " answered ",
                                            reply.DebugString(), " to a subscription"));
  } else if (asked.kind == Awaited::Kind::kSubscribe && asked.channel == channel_ &&
             !Awaits(Awaited::Kind::kSubscribe, channel_)) {
    EndSubscription(store::StatusOfErrorReply(reply.error_text(), endpoint_));
  }
  return absl::OkStatus();
}

void RendezvousConnection::OnReply(store::RedisReply reply) {
  if (reply.IsError() && call_->script != nullptr && store::IsUnknownScript(reply.error_text()) &&
      !std::exchange(call_->source_sent, true)) {
    return SendCall();
  }
  loop_->CancelTimer(std::exchange(reply_timer_, 0));
  const PendingCall call = *std::exchange(call_, std::nullopt);
  if (reply.IsError()) return call.done(store::StatusOfErrorReply(reply.error_text(), endpoint_));
  call.done(std::move(reply));
}

void RendezvousConnection::TakePush(const store::RedisPush& push) {
  using Kind = store::RedisPush::Kind;
  if (push.kind == Kind::kMessage) {
    // A message of an earlier channel is dropped.
    if (listening_ && push.channel == channel_) callbacks_.on_push(push.text);
    return;
  }
  if (push.kind == Kind::kOther) return;
  const Awaited::Kind confirmed =
      push.kind == Kind::kSubscribed ? Awaited::Kind::kSubscribe : Awaited::Kind::kUnsubscribe;
  const auto asked = std::find_if(awaited_.begin(), awaited_.end(), [&](const Awaited& awaited) {
    return awaited.kind == confirmed && awaited.channel == push.channel;
  });
  if (asked == awaited_.end()) return;
  awaited_.erase(asked);
  if (confirmed == Awaited::Kind::kUnsubscribe || push.channel != channel_ ||
      Awaits(confirmed, push.channel)) {
    return;
  }
  loop_->CancelTimer(std::exchange(confirm_timer_, 0));
  listening_ = true;
  callbacks_.on_subscribed();
}

bool RendezvousConnection::Awaits(Awaited::Kind kind, const std::string& channel) const {
  return std::any_of(awaited_.begin(), awaited_.end(), [&](const Awaited& awaited) {
    return awaited.kind == kind && awaited.channel == channel;
  });
}

void RendezvousConnection::EndSubscription(const absl::Status& why) {
  loop_->CancelTimer(std::exchange(confirm_timer_, 0));
  channel_.clear();
  listening_ = false;
  callbacks_.on_end(why);
}

// Breaking. --------------------------------------------------------------------------------------

void RendezvousConnection::Break(const absl::Status& why) {
  Close();
  const std::optional<PendingCall> call = std::exchange(call_, std::nullopt);
  if (!channel_.empty()) EndSubscription(why);
  if (call.has_value()) call->done(why);
}

void RendezvousConnection::BreakSoon(const absl::Status& why) {
  if (break_timer_ != 0) return;
  break_timer_ = loop_->AddTimer(absl::ZeroDuration(), [this, why] { Break(why); });
}

void RendezvousConnection::Close() {
  for (EventLoop::TimerId* const timer :
       {&turn_timer_, &break_timer_, &reply_timer_, &confirm_timer_}) {
    loop_->CancelTimer(std::exchange(*timer, 0));
  }
  dialer_.Cancel();
  dialing_ = false;
  if (watched_events_ != 0) loop_->Unwatch(socket_.fd());
  watched_events_ = 0;
  socket_.reset();
  out_.clear();
  awaited_.clear();
  wire_.Reset();
}

}  // namespace ddp::elastic
