#include "store/redis/redis_dialer.h"

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status_macros.h"
#include "glog/logging.h"
#include "store/redis/redis_errors.h"
#include "store/redis/sentinel.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::store {
namespace {

// The time from the start of one address's socket to that of the next, at most.
constexpr absl::Duration kHeadStart = absl::Milliseconds(200);
constexpr int kMaxDoublings = 20;

}  // namespace

RedisDialer::Racer::Racer(RedisSocket given, const RedisDialer& dialer)
    : socket(std::move(given)),
      greeting(dialer.endpoint_, dialer.options_.client_name, dialer.options_.resp3,
               /*asks_role=*/!dialer.is_only_address_),
      // Nothing is subscribed during the greeting, so there is no push to keep.
      wire(dialer.options_.resp3 ? RedisWire::Pushes::kDropped : RedisWire::Pushes::kAreReplies,
           dialer.options_.limits) {}

RedisDialer::RedisDialer(const RedisEndpoint& endpoint, const RedisConnectionOptions& options)
    : endpoint_(endpoint), options_(options), locator_(endpoint) {}

RedisDialer::~RedisDialer() { Cancel(); }

void RedisDialer::Dial(EventLoop* loop, absl::Time deadline, Done done) {
  CHECK(loop_ == nullptr) << "one attempt at a time";
  loop_ = loop;
  deadline_ = deadline;
  done_ = std::move(done);
  error_ = absl::OkStatus();
  read_password_again_ = false;
  limit_timer_ = loop_->AddTimer(absl::ZeroDuration(), [this] { Begin(); });
}

void RedisDialer::Cancel() {
  if (loop_ == nullptr) return;
  if (std::exchange(waits_for_name_, false)) loop_->Unwatch(lookup_->fd());
  while (!racers_.empty()) TakeOut(racers_.begin());
  to_try_.clear();
  replica_.reset();
  loop_->CancelTimer(std::exchange(limit_timer_, 0));
  loop_->CancelTimer(std::exchange(next_timer_, 0));
  done_ = nullptr;
  loop_ = nullptr;
}

// The name. --------------------------------------------------------------------------------------

void RedisDialer::Begin() {
  if (lookup_ != nullptr && lookup_->done()) return TakeName();
  if (lookup_ == nullptr && locator_.NameIsDue(clock_.Now())) {
    const absl::Status asked = AskForName();
    if (!asked.ok() && !locator_.knows_address()) return Fail(asked);
  }
  if (locator_.knows_address()) return TryAddresses();
  if (lookup_ == nullptr) return Fail(locator_.name_error());
  const absl::Status watched = loop_->Watch(lookup_->fd(), EPOLLIN, [this](uint32_t) {
    loop_->Unwatch(lookup_->fd());
    waits_for_name_ = false;
    TakeName();
  });
  if (!watched.ok()) return Fail(watched);
  waits_for_name_ = true;
  LimitTo(options_.connect_timeout, [this] {
    Fail(absl::UnavailableError(absl::StrCat("cannot reach Redis at ", endpoint_.DebugString(),
                                             ": the lookup of its host name has not ended yet")));
  });
}

absl::Status RedisDialer::AskForName() {
  if (endpoint_.is_behind_sentinels()) {
    DDP_ASSIGN_OR_RETURN(
        lookup_, NameLookup::Start([endpoint = endpoint_] { return AskSentinels(endpoint); }));
  } else {
    DDP_ASSIGN_OR_RETURN(lookup_, NameLookup::Start(endpoint_.host));
  }
  return absl::OkStatus();
}

void RedisDialer::TakeName() {
  const absl::StatusOr<std::vector<std::string>> found = lookup_->Result();
  lookup_.reset();
  if (found.ok()) {
    locator_.NameFound(*found, clock_.Now());
  } else {
    locator_.NameFailed(
        absl::UnavailableError(absl::StrCat("cannot reach Redis at ", endpoint_.DebugString(), ": ",
                                            found.status().message())),
        clock_.Now());
  }
  if (!locator_.knows_address()) return Fail(locator_.name_error());
  TryAddresses();
}

// The addresses. ---------------------------------------------------------------------------------

void RedisDialer::TryAddresses() {
  to_try_.assign(locator_.addresses().rbegin(), locator_.addresses().rend());
  // A sentinel may not know yet that its master has become a replica.
  is_only_address_ = to_try_.size() == 1 && !endpoint_.is_behind_sentinels();
  StartNext();
}

// Starts the socket to the next address, and the time that it has. Ends the attempt when no socket
// and no address is left.
void RedisDialer::StartNext() {
  loop_->CancelTimer(std::exchange(next_timer_, 0));
  while (!to_try_.empty()) {
    const std::string address = std::move(to_try_.back());
    to_try_.pop_back();
    if (const absl::Status started = StartOne(address); !started.ok()) {
      NoteError(started);
      continue;
    }
    const absl::Duration limit = TimeForAttempt();
    LimitTo(limit, [this] {
      ++timeouts_in_a_row_;
      GiveUp();
    });
    if (!to_try_.empty()) {
      next_timer_ = loop_->AddTimer(std::min(kHeadStart, limit / 2), [this] { StartNext(); });
    }
    return;
  }
  if (racers_.empty()) GiveUp();
}

absl::Status RedisDialer::StartOne(const std::string& address) {
  RedisEndpoint target = endpoint_;
  target.host = address;
  if (endpoint_.is_behind_sentinels()) {
    DDP_ASSIGN_OR_RETURN(target, ParseRedisEndpoint(address));
  }
  DDP_ASSIGN_OR_RETURN(RedisSocket socket, RedisSocket::BeginConnecting(target));
  const RacerPlace racer = racers_.emplace(racers_.end(), std::move(socket), *this);
  const absl::Status watched =
      loop_->Watch(racer->socket.fd(), EPOLLOUT, [this, racer](uint32_t) { OnReady(racer); });
  if (!watched.ok()) racers_.erase(racer);
  return watched;
}

void RedisDialer::OnReady(RacerPlace racer) {
  const absl::StatusOr<bool> greeted = Advance(racer);
  if (greeted.ok() && !*greeted) return;
  const bool is_replica = racer->greeting.is_replica();
  RedisSocket socket = TakeOut(racer);
  if (greeted.ok() && (!is_replica || is_only_address_)) {
    timeouts_in_a_row_ = 0;
    locator_.Reached(AddressOf(socket));
    return Finish(std::move(socket));
  }
  if (!greeted.ok()) {
    NoteError(greeted.status());
  } else if (!replica_.valid()) {
    replica_ = std::move(socket);
  }
  StartNext();
}

// Takes the next step of a racer. Returns true when all replies to the greeting have come.
absl::StatusOr<bool> RedisDialer::Advance(RacerPlace racer) {
  if (racer->connected) return ReadGreeting(*racer);
  DDP_ASSIGN_OR_RETURN(const short awaited, racer->socket.FinishConnecting(endpoint_));
  racer->reached = true;
  racer->connected = awaited == 0;
  if (racer->connected) DDP_RETURN_IF_ERROR(SendGreeting(*racer));
  const int fd = racer->socket.fd();
  loop_->Unwatch(fd);
  DDP_RETURN_IF_ERROR(loop_->Watch(fd, awaited == POLLOUT ? EPOLLOUT : EPOLLIN,
                                   [this, racer](uint32_t) { OnReady(racer); }));
  return false;
}

absl::Status RedisDialer::SendGreeting(Racer& racer) const {
  const std::string bytes = racer.greeting.WireForm();
  // The buffer of a new socket takes these few hundred bytes at once.
  DDP_ASSIGN_OR_RETURN(const size_t sent, racer.socket.Send(bytes, endpoint_));
  if (sent == bytes.size()) return absl::OkStatus();
  return ConnectionError("the connection broke to", endpoint_, EAGAIN);
}

absl::StatusOr<bool> RedisDialer::ReadGreeting(Racer& racer) const {
  char buffer[RedisSocket::kReceiveBytes];
  DDP_ASSIGN_OR_RETURN(
      const size_t count,
      racer.socket.Receive(absl::MakeSpan(buffer), RedisSocket::Blocking::kNever, endpoint_));
  DDP_RETURN_IF_ERROR(racer.wire.Feed(buffer, count));
  while (!racer.greeting.done()) {
    RedisReply reply;
    DDP_ASSIGN_OR_RETURN(const bool complete, racer.wire.NextReply(reply));
    if (!complete) return false;
    DDP_RETURN_IF_ERROR(racer.greeting.Take(reply));
  }
  return true;
}

RedisSocket RedisDialer::TakeOut(RacerPlace racer) {
  loop_->Unwatch(racer->socket.fd());
  RedisSocket socket = std::move(racer->socket);
  racers_.erase(racer);
  return socket;
}

// Times and ends. --------------------------------------------------------------------------------

// Keeps a refusal, which says more than an address that could not be reached.
void RedisDialer::NoteError(const absl::Status& status) {
  if (error_.ok() || IsTransient(error_)) error_ = status;
}

void RedisDialer::LimitTo(absl::Duration limit, std::function<void()> at_end) {
  loop_->CancelTimer(limit_timer_);
  limit_timer_ = loop_->AddTimer(std::min(limit, deadline_ - clock_.Now()), std::move(at_end));
}

absl::Duration RedisDialer::TimeForAttempt() const {
  const int64_t factor = int64_t{1} << std::min(timeouts_in_a_row_, kMaxDoublings);
  return std::min(options_.first_connect_timeout * factor, options_.connect_timeout);
}

// No address has a master that answered in time.
void RedisDialer::GiveUp() {
  if (replica_.valid()) {
    locator_.Lost();
    return Finish(std::move(replica_));
  }
  if (absl::IsUnauthenticated(error_) && clock_.Now() < deadline_ && HasNewPassword()) {
    while (!racers_.empty()) TakeOut(racers_.begin());
    error_ = absl::OkStatus();
    return TryAddresses();
  }
  Fail(error_.ok() ? TimeoutError() : error_);
}

// A server that takes connections and says nothing is not one that is out of reach.
absl::Status RedisDialer::TimeoutError() const {
  const bool is_silent =
      std::any_of(racers_.begin(), racers_.end(), [](const Racer& racer) { return racer.reached; });
  if (!is_silent) return ConnectionError("cannot reach", endpoint_, ETIMEDOUT);
  const bool is_greeted = std::any_of(racers_.begin(), racers_.end(),
                                      [](const Racer& racer) { return racer.connected; });
  return absl::UnavailableError(
      absl::StrCat("Redis at ", endpoint_.DebugString(), " did not answer in time",
                   is_greeted ? "" : " to the beginning of TLS (does it speak TLS at this port?)"));
}

// Reads the password file again, once in an attempt.
bool RedisDialer::HasNewPassword() {
  if (endpoint_.password_file.empty() || std::exchange(read_password_again_, true)) return false;
  absl::StatusOr<std::string> password = ReadRedisPasswordFile(endpoint_.password_file);
  if (!password.ok() || *password == endpoint_.password) return false;
  endpoint_.password = *std::move(password);
  return true;
}

void RedisDialer::Fail(const absl::Status& status) {
  locator_.Lost();
  Finish(status);
}

void RedisDialer::Finish(absl::StatusOr<RedisSocket> result) {
  const Done done = std::exchange(done_, nullptr);
  Cancel();
  done(std::move(result));
}

}  // namespace ddp::store
