#include "store/shared_redis_connection.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "store/redis_errors.h"
#include "store/redis_greeting.h"
#include "store/redis_socket.h"

namespace ddp::store {
namespace {

constexpr size_t kReceiveBytes = 32 * 1024;
// What comes is first awaited in recv() itself, this long: see RedisConnection::Dial.
constexpr absl::Duration kBlockingReceive = absl::Milliseconds(100);
// A condition variable's clock cannot count to "never".
constexpr absl::Duration kLongestWait = absl::Hours(1);

std::vector<std::string> HelloCommand() { return {"HELLO", "3"}; }

// A status that shares nothing with another thread's. (The system's abseil counts references where
// ThreadSanitizer does not see it.)
absl::Status Own(const absl::Status& status) {
  return absl::Status(status.code(), std::string(status.message()));
}

std::string TextOf(const RedisReply& reply) {
  const absl::StatusOr<std::string> text = reply.AsString();
  return text.ok() ? *text : "";
}

}  // namespace

SharedRedisConnection::SharedRedisConnection(const RedisEndpoint& endpoint,
                                             const RedisConnectionOptions& options)
    : RedisCaller(endpoint, options),
      dialer_(RedisConnection::Unconnected(endpoint, options)),
      replies_(options.limits),
      pushes_(options.limits) {}

SharedRedisConnection::~SharedRedisConnection() = default;

absl::StatusOr<std::unique_ptr<SharedRedisConnection>> SharedRedisConnection::Connect(
    const RedisEndpoint& endpoint, const RedisConnectionOptions& options) {
  std::unique_ptr<SharedRedisConnection> connection(new SharedRedisConnection(endpoint, options));
  // A call of no commands is nothing but its connection.
  DDP_RETURN_IF_ERROR(connection->Call({.what = "connecting"}).status());
  return connection;
}

absl::StatusOr<std::vector<RedisReply>> SharedRedisConnection::TryOnce(const Request& request,
                                                                       absl::Time deadline,
                                                                       bool& sent) {
  const MutexLock lock(mutex_);
  DDP_RETURN_IF_ERROR(Ensure(deadline));
  if (request.replies == 0) return std::vector<RedisReply>();
  // A server that was restarted since has closed the connection. To see that before sending is what
  // lets a command go on that must not be sent twice.
  if (!request.call.idempotent) {
    const int64_t epoch = epoch_;
    SeeWhetherOpen();
    // It may have said something worse as well.
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
  // Whoever has little time gives up alone; a server that is silent for long is lost to all.
  if (absl::IsDeadlineExceeded(replies.status()) && epoch == epoch_ && HasBeenSilentSince(start)) {
    Break(replies.status());
  }
  return replies;
}

// The connection. --------------------------------------------------------------------------------

absl::Status SharedRedisConnection::Ensure(absl::Time deadline) {
  const int64_t failed_dials = failed_dials_;
  while (!TakesRequests()) {
    if (!fd_.valid() && !dialing_) return Dial(deadline);
    if (clock_.Now() >= deadline) {
      return absl::UnavailableError(
          absl::StrCat("not connected to Redis at ", endpoint().DebugString()));
    }
    WaitForChange(deadline);
    // Another thread's attempt was as good as one of ours.
    if (failed_dials != failed_dials_) return Own(last_error_);
  }
  return absl::OkStatus();
}

absl::Status SharedRedisConnection::Dial(absl::Time deadline) {
  dialing_ = true;
  const bool doubts = std::exchange(doubts_, false);
  mutex_.Unlock();
  if (doubts) dialer_->Doubt();
  absl::StatusOr<UniqueFd> fd = dialer_->Dial(deadline);
  mutex_.Lock();
  dialing_ = false;
  changed_.NotifyAll();
  if (!fd.ok()) {
    ++failed_dials_;
    last_error_ = Own(fd.status());
    return fd.status();
  }
  fd_ = *std::move(fd);
  splitter_.Reset();
  replies_.Reset();
  pushes_.Reset();
  // Its answer is looked at when it comes: requests need not wait for it.
  DDP_RETURN_IF_ERROR(BeginWriting(deadline));
  Expect(Exchange::Kind::kHello, "", 1);
  bool sent = false;
  return Write(RedisWireForm({HelloCommand()}), clock_.Now() + options().connect_timeout, sent);
}

// A fail-over has left us with the old master. Requests that were sent before its first refusal are
// answered as well: only their replies tell a refusal from a change that was made.
void SharedRedisConnection::LeaveReplica(const std::string& refusal) {
  if (!leaving_.ok()) return;
  leaving_ = StatusOfErrorReply(refusal, endpoint());
  doubts_ = true;
}

// Nobody gets anything from this connection any more.
void SharedRedisConnection::Break(const absl::Status& why) {
  if (!Usable()) return;
  broken_ = true;
  leaving_ = absl::OkStatus();
  ++epoch_;
  // It is not their time that is over.
  const bool silent = absl::IsDeadlineExceeded(why);
  last_error_ = silent ? absl::UnavailableError(why.message()) : Own(why);
  shutdown(fd_.get(), SHUT_RDWR);  // wakes who is reading or writing
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
  fd_.reset();
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

// Whether a request has been unanswered for command_timeout: that of a caller who began at `start`,
// or an earlier one. (If one's own alone counted, a server would never be given up whose callers
// all have less time.)
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
  // After a part of a request nothing else can be said.
  if (!status.ok()) Break(status);
  CloseIfUnused();
  return status;
}

absl::Status SharedRedisConnection::WriteAll(const std::string& bytes, absl::Time deadline,
                                             bool& sent) {
  size_t done = 0;
  while (done < bytes.size()) {
    if (broken_) return Own(last_error_);
    const int fd = fd_.get();
    const ssize_t count =
        send(fd, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      done += count;
      sent = true;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      mutex_.Unlock();
      const bool ready = AwaitSocket(fd, POLLOUT, deadline);
      mutex_.Lock();
      if (!ready) {
        return absl::DeadlineExceededError(
            absl::StrCat("Redis at ", endpoint().DebugString(), " does not take what we send"));
      }
    } else if (errno != EINTR) {
      return ConnectionError("the connection broke to", endpoint(), errno);
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

// One of those who wait reads for all.
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
  std::array<char, kReceiveBytes> buffer;
  reading_ = true;
  bool may_block = true;  // in recv(): a system call less than to poll before it
  while (!waiter.done && !broken_) {
    const absl::Duration left = deadline - clock_.Now();
    if (left <= absl::ZeroDuration()) break;
    const bool blocking = may_block && left > kBlockingReceive;
    const int fd = fd_.get();
    mutex_.Unlock();
    ssize_t count = -1;
    int error = EAGAIN;
    if (blocking || AwaitSocket(fd, POLLIN, deadline)) {
      count = recv(fd, buffer.data(), buffer.size(), blocking ? 0 : MSG_DONTWAIT);
      error = errno;
    }
    mutex_.Lock();
    may_block = !broken_ && Received(buffer.data(), count, error);
  }
  reading_ = false;
  CloseIfUnused();
}

// Whatever has come, without waiting: the end of the connection, perhaps.
void SharedRedisConnection::SeeWhetherOpen() {
  std::array<char, kReceiveBytes> buffer;
  bool more = true;
  while (more && Usable()) {
    // Where another thread reads, it is not to miss anything.
    const int flags = MSG_DONTWAIT | (reading_ ? MSG_PEEK : 0);
    const ssize_t count = recv(fd_.get(), buffer.data(), reading_ ? 1 : buffer.size(), flags);
    const int error = errno;
    if (count > 0 && reading_) return;
    more = Received(buffer.data(), count, error);
  }
}

// What recv() returned. Returns whether anything came.
bool SharedRedisConnection::Received(const char* data, ssize_t count, int error) {
  if (count > 0) {
    const absl::Status status = Dispatch(data, count);
    if (!status.ok()) Break(status);
    return status.ok();
  }
  if (count == 0) {
    Break(absl::UnavailableError(
        absl::StrCat("Redis at ", endpoint().DebugString(), " closed the connection")));
  } else if (error != EAGAIN && error != EWOULDBLOCK && error != EINTR) {
    Break(ConnectionError("the connection broke to", endpoint(), error));
  }
  return false;
}

absl::Status SharedRedisConnection::Dispatch(const char* data, size_t size) {
  std::string replies;
  std::string pushes;
  DDP_RETURN_IF_ERROR(splitter_.Split(data, size, replies, pushes));
  RedisReply next;
  // Pushes first: a subscription is confirmed before what was asked after it is answered.
  if (!pushes.empty()) DDP_RETURN_IF_ERROR(pushes_.Feed(pushes.data(), pushes.size()));
  while (true) {
    DDP_ASSIGN_OR_RETURN(const bool complete, pushes_.Next(next));
    if (!complete) break;
    DDP_RETURN_IF_ERROR(TakePush(next));
  }
  if (!replies.empty()) DDP_RETURN_IF_ERROR(replies_.Feed(replies.data(), replies.size()));
  while (true) {
    DDP_ASSIGN_OR_RETURN(const bool complete, replies_.Next(next));
    if (!complete) return absl::OkStatus();
    DDP_RETURN_IF_ERROR(TakeReply(std::move(next)));
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
      DDP_RETURN_IF_ERROR(JudgeGreeting(HelloCommand(), reply, endpoint()));
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
  // Whoever asked has given up waiting.
  return conversing_ == 0 ? Own(leaving_) : absl::OkStatus();
}

absl::Status SharedRedisConnection::TakePush(const RedisReply& push) {
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> parts, push.AsArray());
  if (parts.size() != 3) return absl::OkStatus();
  const std::string kind = TextOf(parts[0]);
  const std::string name = TextOf(parts[1]);
  if (kind == "message") {
    const auto channel = channels_.find(name);
    if (channel == channels_.end()) return absl::OkStatus();  // left meanwhile
    ++channel->second.messages;
    for (Waiter* const waiter : channel->second.waiters) Finish(waiter);
    return absl::OkStatus();
  }
  const auto is_confirmed = [&](const std::shared_ptr<Exchange>& exchange) {
    return exchange->channel == name &&
           ((exchange->kind == Exchange::Kind::kSubscribe && kind == "subscribe") ||
            (exchange->kind == Exchange::Kind::kUnsubscribe && kind == "unsubscribe"));
  };
  const auto exchange = std::find_if(exchanges_.begin(), exchanges_.end(), is_confirmed);
  if (exchange != exchanges_.end()) exchanges_.erase(exchange);
  return absl::OkStatus();
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
  // What the server says to the subscription is known when it has answered the question.
  const absl::Status refusal = Own(channels_[channel].refusal);
  if (reply.ok() && !is_answer(*reply) && !refusal.ok()) reply = refusal;
  const bool ended = !reply.ok() || is_answer(*reply);
  if (!ended) {
    DDP_RETURN_IF_ERROR(AwaitMessage(channel, seen, deadline));
  }
  const absl::Status begun = BeginWriting(clock_.Now() + options().command_timeout);
  if (!begun.ok()) {
    if (epoch == epoch_ && leaving_.ok()) Break(begun);
    if (ended) return reply;  // it stands, it may have been taken from a queue
    return begun;
  }
  const std::string unsubscribe = Leave(channel);
  if (!ended) return Ask(question, unsubscribe, asked);
  bool sent = false;
  (void)Write(unsubscribe, clock_.Now() + options().command_timeout, sent);
  return reply;
}

// Returns what is to be sent for it. Only between BeginWriting and Write, so that no other thread
// that counts on the subscription is sent before it.
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

// Writes what `before` holds and the question, and waits for its reply.
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

// OK: there was one since `seen`, or the deadline has come.
absl::Status SharedRedisConnection::AwaitMessage(const std::string& name, int64_t seen,
                                                 absl::Time deadline) {
  const int64_t epoch = epoch_;
  Channel& channel = channels_[name];
  if (channel.messages == seen) {
    Waiter waiter;
    const auto place = channel.waiters.insert(channel.waiters.end(), &waiter);
    AwaitDone(waiter, deadline);
    if (epoch != epoch_) return Own(last_error_);  // and the channel is gone
    channel.waiters.erase(place);
  }
  return absl::OkStatus();
}

}  // namespace ddp::store
