#include "store/redis/shared_redis_connection.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "store/redis/redis_errors.h"
#include "store/redis/redis_greeting.h"

namespace ddp::store {
namespace {

using Blocking = RedisSocket::Blocking;

// The limit that RedisConnection::Dial sets: the socket itself blocks for this long.
constexpr absl::Duration kBlockingReceive = absl::Milliseconds(100);
// A condition variable cannot wait for an infinite time.
constexpr absl::Duration kLongestWait = absl::Hours(1);

// Returns a copy that shares no memory with another thread's status. (ThreadSanitizer does not see
// the reference counts of the system's abseil.)
absl::Status Own(const absl::Status& status) {
  return absl::Status(status.code(), std::string(status.message()));
}

}  // namespace

SharedRedisConnection::SharedRedisConnection(const RedisEndpoint& endpoint,
                                             const RedisConnectionOptions& options)
    : RedisCaller(endpoint, options),
      dialer_(RedisConnection::Unconnected(endpoint, options)),
      wire_(RedisWire::Pushes::kKept, options.limits) {}

SharedRedisConnection::~SharedRedisConnection() = default;

absl::StatusOr<std::unique_ptr<SharedRedisConnection>> SharedRedisConnection::Connect(
    const RedisEndpoint& endpoint, const RedisConnectionOptions& options) {
  std::unique_ptr<SharedRedisConnection> connection(new SharedRedisConnection(endpoint, options));
  // A call without commands only connects.
  DDP_RETURN_IF_ERROR(connection->Call({.what = "connecting"}).status());
  return connection;
}

absl::StatusOr<std::vector<RedisReply>> SharedRedisConnection::TryOnce(const Request& request,
                                                                       absl::Time deadline,
                                                                       bool& sent) {
  const MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Ensure(deadline));
  if (request.replies == 0) return std::vector<RedisReply>();
  // A restarted server has closed the connection. When this is seen before sending, a command that
  // must not be sent twice can still go on, on a new connection.
  if (!request.call.idempotent) {
    const int64_t epoch = epoch_;
    SeeWhetherOpen();
    // Any other error (bytes that are not the protocol) is the result of this attempt.
    if (epoch != epoch_ && !absl::IsUnavailable(last_error_)) return Own(last_error_);
    DDP_RETURN_IF_ERROR(Ensure(deadline));
  }
  const absl::Time start = clock_.Now();
  const absl::Time attempt_deadline = std::min(deadline, start + request.call.command_timeout);
  DDP_RETURN_IF_ERROR(BeginWriting(attempt_deadline));
  const int64_t epoch = epoch_;
  const auto exchange = Expect(Exchange::Kind::kRequest, "", request.replies);
  absl::StatusOr<std::vector<RedisReply>> replies =
      Converse(*exchange, request.bytes, attempt_deadline, sent);
  // A caller with a short deadline times out alone. A server that is silent for command_timeout is
  // lost to all callers.
  if (absl::IsDeadlineExceeded(replies.status()) && epoch == epoch_ && HasBeenSilentSince(start)) {
    Break(replies.status());
  }
  return replies;
}

// The connection. --------------------------------------------------------------------------------

absl::Status SharedRedisConnection::Ensure(absl::Time deadline) {
  const int64_t failed_dials = failed_dials_;
  while (!TakesRequests()) {
    if (!socket_.valid() && !dialing_) return Dial(deadline);
    if (clock_.Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat("not connected to Redis at ", endpoint().DebugString()));
    }
    WaitForChange(deadline);
    // A failed attempt of another thread counts as this thread's attempt.
    if (failed_dials != failed_dials_) return Own(last_error_);
  }
  return absl::OkStatus();
}

absl::Status SharedRedisConnection::Dial(absl::Time deadline) {
  dialing_ = true;
  mutex_.Unlock();
  absl::StatusOr<RedisSocket> socket = dialer_->Dial(deadline);
  mutex_.Lock();
  dialing_ = false;
  changed_.NotifyAll();
  if (!socket.ok()) {
    ++failed_dials_;
    last_error_ = Own(socket.status());
    return socket.status();
  }
  socket_ = *std::move(socket);
  wire_.Reset();
  // Requests need not wait for HELLO's reply: TakeReply() checks it.
  DDP_RETURN_IF_ERROR(BeginWriting(deadline));
  Expect(Exchange::Kind::kHello, "", 1);
  bool sent = false;
  return Write(RedisWireForm({RedisHello()}), clock_.Now() + options().connect_timeout, sent);
}

// Called when the server was demoted by a failover. Requests sent before the first refusal keep
// their replies: only a reply tells whether a change was refused or made.
void SharedRedisConnection::LeaveReplica(const std::string& refusal) {
  if (!leaving_.ok()) return;
  leaving_ = StatusOfErrorReply(refusal, endpoint());
  // A reply came, so there is a connection, and no thread is dialing.
  dialer_->Doubt();
}

// Ends all exchanges and waits of this connection with an error.
void SharedRedisConnection::Break(const absl::Status& why) {
  if (!Usable()) return;
  broken_ = true;
  leaving_ = absl::OkStatus();
  ++epoch_;
  // The expired deadline is one caller's. The other callers get kUnavailable.
  const bool silent = absl::IsDeadlineExceeded(why);
  last_error_ = silent ? absl::UnavailableError(why.message()) : Own(why);
  shutdown(socket_.fd(), SHUT_RDWR);  // wakes the threads that read or write
  for (const auto& exchange : exchanges_) {
    exchange->status = Own(last_error_);
    Finish(exchange->waiter);
  }
  exchanges_.clear();
  for (const auto& [name, channel] : channels_) {
    for (Waiter* const waiter : channel.waiters) Finish(waiter);
  }
  channels_.clear();
  CloseIfUnused();
}

void SharedRedisConnection::CloseIfUnused() {
  if (!broken_ || reading_ || writing_) return;
  socket_.reset();
  broken_ = false;
  changed_.NotifyAll();
}

void SharedRedisConnection::WaitForChange(absl::Time deadline) {
  changed_.WaitFor(mutex_, std::min(deadline - clock_.Now(), kLongestWait));
}

void SharedRedisConnection::Finish(Waiter* waiter) {
  if (waiter == nullptr) return;
  waiter->done = true;
  waiter->wake.NotifyOne();
}

absl::Status SharedRedisConnection::Silence() const {
  return absl::DeadlineExceededError(
      absl::StrCat("Redis at ", endpoint().DebugString(), " did not answer in time"));
}

// Returns true when a request has been unanswered for command_timeout: the request of the caller
// that began at `start`, or an earlier one. (If only the caller's own request counted, a server
// whose callers all have shorter deadlines would never be dropped.)
bool SharedRedisConnection::HasBeenSilentSince(absl::Time start) const {
  const absl::Time oldest = exchanges_.empty() ? start : exchanges_.front()->sent_at;
  return clock_.Now() - std::min(start, oldest) >= options().command_timeout;
}

// Writing. ---------------------------------------------------------------------------------------

absl::Status SharedRedisConnection::BeginWriting(absl::Time deadline) {
  const int64_t epoch = epoch_;
  while (writing_) {
    if (clock_.Now() >= deadline) return Silence();
    WaitForChange(deadline);
    if (epoch != epoch_) return Own(last_error_);
  }
  if (Usable() && !leaving_.ok()) return Own(leaving_);
  if (!Usable()) {
    return absl::UnavailableError(
        absl::StrCat("not connected to Redis at ", endpoint().DebugString()));
  }
  writing_ = true;
  return absl::OkStatus();
}

std::shared_ptr<SharedRedisConnection::Exchange> SharedRedisConnection::Expect(
    Exchange::Kind kind, const std::string& channel, size_t wanted) {
  auto exchange = std::make_shared<Exchange>();
  exchange->kind = kind;
  exchange->channel = channel;
  exchange->sent_at = clock_.Now();
  exchange->wanted = wanted;
  exchanges_.push_back(exchange);
  return exchange;
}

absl::Status SharedRedisConnection::Write(const std::string& bytes, absl::Time deadline,
                                          bool& sent) {
  const absl::Status status = WriteAll(bytes, deadline, sent);
  writing_ = false;
  changed_.NotifyAll();
  // Once a part of a request is sent, no other request can follow on this connection.
  if (!status.ok()) Break(status);
  CloseIfUnused();
  return status;
}

absl::Status SharedRedisConnection::WriteAll(const std::string& bytes, absl::Time deadline,
                                             bool& sent) {
  absl::string_view left = bytes;
  while (!left.empty()) {
    if (broken_) return Own(last_error_);
    const int fd = socket_.fd();
    DDP_ASSIGN_OR_RETURN(const size_t count, socket_.Send(left, endpoint()));
    if (count > 0) {
      left.remove_prefix(count);
      sent = true;
      continue;
    }
    mutex_.Unlock();
    const bool ready = AwaitSocket(fd, POLLOUT, deadline);
    mutex_.Lock();
    if (!ready) {
      return absl::DeadlineExceededError(
          absl::StrCat("Redis at ", endpoint().DebugString(), " does not take what we send"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RedisReply>> SharedRedisConnection::Converse(Exchange& exchange,
                                                                        const std::string& bytes,
                                                                        absl::Time deadline,
                                                                        bool& sent) {
  ++conversing_;
  const absl::Status written = Write(bytes, deadline, sent);
  absl::StatusOr<std::vector<RedisReply>> replies = std::vector<RedisReply>();
  if (written.ok()) replies = Await(exchange, deadline);
  --conversing_;
  if (conversing_ == 0 && !leaving_.ok()) Break(Own(leaving_));
  if (!written.ok()) return written;
  return replies;
}

// Waiting and reading. ---------------------------------------------------------------------------

absl::StatusOr<std::vector<RedisReply>> SharedRedisConnection::Await(Exchange& exchange,
                                                                     absl::Time deadline) {
  Waiter waiter;
  if (exchange.status.ok() && exchange.replies.size() < exchange.wanted) {
    exchange.waiter = &waiter;
    AwaitDone(waiter, deadline);
    exchange.waiter = nullptr;
  }
  if (!exchange.status.ok()) return std::move(exchange.status);
  if (exchange.replies.size() < exchange.wanted) return Silence();
  return std::move(exchange.replies);
}

// Blocks until `waiter` is done or `deadline`. One of the waiting threads reads for all.
void SharedRedisConnection::AwaitDone(Waiter& waiter, absl::Time deadline) {
  while (!waiter.done && Usable()) {
    const absl::Duration left = deadline - clock_.Now();
    if (left <= absl::ZeroDuration()) break;
    if (!reading_) {
      ReadFor(waiter, deadline);
    } else {
      const auto place = followers_.insert(followers_.end(), &waiter);
      waiter.wake.WaitFor(mutex_, std::min(left, kLongestWait));
      followers_.erase(place);
    }
  }
  if (!reading_ && !followers_.empty()) followers_.front()->wake.NotifyOne();
}

void SharedRedisConnection::ReadFor(const Waiter& waiter, absl::Time deadline) {
  std::array<char, RedisSocket::kReceiveBytes> buffer;
  reading_ = true;
  bool may_block = true;  // in Receive(), which saves the system call of a poll before it
  while (!waiter.done && !broken_) {
    const absl::Duration left = deadline - clock_.Now();
    if (left <= absl::ZeroDuration()) break;
    const bool blocking = may_block && left > kBlockingReceive;
    RedisSocket* const socket = &socket_;  // while reading_, nobody else receives or closes it
    mutex_.Unlock();
    absl::StatusOr<size_t> count = size_t{0};
    if (blocking || AwaitSocket(socket->fd(), POLLIN, deadline)) {
      count = socket->Receive(absl::MakeSpan(buffer),
                              blocking ? Blocking::kMayBlock : Blocking::kNever, endpoint());
    }
    mutex_.Lock();
    may_block = !broken_ && Received(buffer.data(), count);
  }
  reading_ = false;
  CloseIfUnused();
}

// Takes the bytes that have come, without blocking. Breaks the connection if the server closed it.
void SharedRedisConnection::SeeWhetherOpen() {
  if (reading_) {  // the bytes are left for the thread that reads
    if (Usable() && socket_.IsBroken()) {
      Break(absl::UnavailableError(
          absl::StrCat("Redis at ", endpoint().DebugString(), " closed the connection")));
    }
    return;
  }
  std::array<char, RedisSocket::kReceiveBytes> buffer;
  bool more = true;
  while (more && Usable()) {
    more = Received(buffer.data(),
                    socket_.Receive(absl::MakeSpan(buffer), Blocking::kNever, endpoint()));
  }
}

// Handles the result of RedisSocket::Receive(). Returns true when bytes have come and were
// accepted.
bool SharedRedisConnection::Received(const char* data, const absl::StatusOr<size_t>& count) {
  if (count.ok() && *count == 0) return false;
  const absl::Status status = count.ok() ? Dispatch(data, *count) : count.status();
  if (!status.ok()) Break(status);
  return status.ok();
}

absl::Status SharedRedisConnection::Dispatch(const char* data, size_t size) {
  DDP_RETURN_IF_ERROR(wire_.Feed(data, size));
  // Pushes first: a subscription is confirmed before the reply to a question asked after it.
  RedisPush push;
  while (true) {
    DDP_ASSIGN_OR_RETURN(const bool complete, wire_.NextPush(push));
    if (!complete) break;
    TakePush(push);
  }
  RedisReply reply;
  while (true) {
    DDP_ASSIGN_OR_RETURN(const bool complete, wire_.NextReply(reply));
    if (!complete) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(TakeReply(std::move(reply)));
  }
}

absl::Status SharedRedisConnection::TakeReply(RedisReply reply) {
  if (exchanges_.empty()) {
    return absl::InternalError(absl::StrCat("Redis at ", endpoint().DebugString(),
                                            " answered what was not asked: ", reply.DebugString()));
  }
  Exchange& exchange = *exchanges_.front();
  switch (exchange.kind) {
    case Exchange::Kind::kRequest:
      if (reply.IsError() && IsReplicaRefusal(reply.error_text())) LeaveReplica(reply.error_text());
      exchange.replies.push_back(std::move(reply));
      break;
    case Exchange::Kind::kHello:
      DDP_RETURN_IF_ERROR(JudgeRedisHello(reply, endpoint()));
      exchange.replies.push_back(std::move(reply));
      break;
    case Exchange::Kind::kSubscribe:
    case Exchange::Kind::kUnsubscribe:
      if (!reply.IsError()) {
        return absl::InternalError(absl::StrCat("Redis at ", endpoint().DebugString(), " answered ",
                                                reply.DebugString(), " to a subscription"));
      }
      exchange.status = StatusOfErrorReply(reply.error_text(), endpoint());
      if (exchange.kind == Exchange::Kind::kSubscribe) {
        channels_[exchange.channel].refusal = Own(exchange.status);
      }
      break;
  }
  if (exchange.status.ok() && exchange.replies.size() < exchange.wanted) return absl::OkStatus();
  Finish(exchange.waiter);
  exchanges_.pop_front();
  // If no thread is in Converse(), no thread waits for more replies of a demoted server: close.
  return conversing_ == 0 ? Own(leaving_) : absl::OkStatus();
}

void SharedRedisConnection::TakePush(const RedisPush& push) {
  if (push.kind == RedisPush::Kind::kMessage) {
    const auto channel = channels_.find(push.channel);
    if (channel == channels_.end()) return;  // unsubscribed since
    ++channel->second.messages;
    for (Waiter* const waiter : channel->second.waiters) Finish(waiter);
    return;
  }
  const auto is_confirmed = [&](const std::shared_ptr<Exchange>& exchange) {
    return exchange->channel == push.channel && ((exchange->kind == Exchange::Kind::kSubscribe &&
                                                  push.kind == RedisPush::Kind::kSubscribed) ||
                                                 (exchange->kind == Exchange::Kind::kUnsubscribe &&
                                                  push.kind == RedisPush::Kind::kUnsubscribed));
  };
  const auto exchange = std::find_if(exchanges_.begin(), exchanges_.end(), is_confirmed);
  if (exchange != exchanges_.end()) exchanges_.erase(exchange);
}

// Subscriptions. ---------------------------------------------------------------------------------

absl::StatusOr<RedisReply> SharedRedisConnection::AskOnPush(
    const std::string& channel, const std::vector<std::string>& question, const IsAnswer& is_answer,
    absl::Time deadline, bool& asked) {
  asked = false;
  const MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(BeginWriting(clock_.Now() + options().command_timeout));
  const int64_t epoch = epoch_;
  const std::string subscribe = Join(channel);
  const int64_t seen = channels_[channel].messages;
  absl::StatusOr<RedisReply> reply = Ask(question, subscribe, asked);
  if (epoch != epoch_) return reply;
  // The server has answered the subscription before it answers the question.
  const absl::Status refusal = Own(channels_[channel].refusal);
  if (reply.ok() && !is_answer(*reply) && !refusal.ok()) reply = refusal;
  const bool ended = !reply.ok() || is_answer(*reply);
  if (!ended) {
    DDP_RETURN_IF_ERROR(AwaitMessage(channel, seen, deadline));
  }
  const absl::Status begun = BeginWriting(clock_.Now() + options().command_timeout);
  if (!begun.ok()) {
    if (epoch == epoch_ && leaving_.ok()) Break(begun);
    if (ended) return reply;  // keep the reply: it may be an element that was taken from a queue
    return begun;
  }
  const std::string unsubscribe = Leave(channel);
  if (!ended) return Ask(question, unsubscribe, asked);
  bool sent = false;
  (void)Write(unsubscribe, clock_.Now() + options().command_timeout, sent);
  return reply;
}

// Adds a subscriber and returns the bytes to send, empty if the channel is subscribed already. Call
// it only between BeginWriting() and Write(): else another thread that relies on the subscription
// could send its question before it.
std::string SharedRedisConnection::Join(const std::string& channel) {
  if (channels_[channel].subscribers++ > 0) return "";
  Expect(Exchange::Kind::kSubscribe, channel, 1);
  return RedisWireForm({{"SUBSCRIBE", channel}});
}

std::string SharedRedisConnection::Leave(const std::string& channel) {
  const auto found = channels_.find(channel);
  if (found == channels_.end() || --found->second.subscribers > 0) return "";
  channels_.erase(found);
  Expect(Exchange::Kind::kUnsubscribe, channel, 1);
  return RedisWireForm({{"UNSUBSCRIBE", channel}});
}

// Writes `before` and the question, and blocks until the reply.
absl::StatusOr<RedisReply> SharedRedisConnection::Ask(const std::vector<std::string>& question,
                                                      const std::string& before, bool& asked) {
  const absl::Time deadline = clock_.Now() + options().command_timeout;
  const int64_t epoch = epoch_;
  const auto exchange = Expect(Exchange::Kind::kRequest, "", 1);
  absl::StatusOr<std::vector<RedisReply>> replies =
      Converse(*exchange, before + RedisWireForm({question}), deadline, asked);
  if (absl::IsDeadlineExceeded(replies.status()) && epoch == epoch_) Break(replies.status());
  DDP_RETURN_IF_ERROR(replies.status());
  asked = false;
  RedisReply& reply = replies->front();
  if (reply.IsError()) return StatusOfErrorReply(reply.error_text(), endpoint());
  return std::move(reply);
}

// Returns OK when a message has come since `seen`, or at the deadline.
absl::Status SharedRedisConnection::AwaitMessage(const std::string& name, int64_t seen,
                                                 absl::Time deadline) {
  const int64_t epoch = epoch_;
  Channel& channel = channels_[name];
  if (channel.messages == seen) {
    Waiter waiter;
    const auto place = channel.waiters.insert(channel.waiters.end(), &waiter);
    AwaitDone(waiter, deadline);
    if (epoch != epoch_) return Own(last_error_);  // Break() has removed the channel
    channel.waiters.erase(place);
  }
  return absl::OkStatus();
}

}  // namespace ddp::store
