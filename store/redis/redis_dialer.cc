#include "store/redis/redis_dialer.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/types/span.h"
#include "base/status_macros.h"
#include "glog/logging.h"
#include "store/redis/redis_errors.h"
#include "store/redis/redis_socket.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::store {
namespace {

constexpr size_t kReceiveBytes = 4096;
// Pause while no address is known. Each lookup starts a thread.
constexpr absl::Duration kFirstNamePause = absl::Seconds(1);

}  // namespace

RedisDialer::RedisDialer(const RedisEndpoint& endpoint, const RedisConnectionOptions& options,
                         EventLoop* loop)
    : endpoint_(endpoint),
      options_(options),
      loop_(loop),
      locator_(endpoint, {.first_name_pause = kFirstNamePause}),
      // Nothing is subscribed during the greeting, so there is no push to keep.
      wire_(options.resp3 ? RedisWire::Pushes::kDropped : RedisWire::Pushes::kAreReplies,
            options.limits) {}

RedisDialer::~RedisDialer() { Cancel(); }

void RedisDialer::Dial(Done done) {
  CHECK(done_ == nullptr) << "one attempt at a time";
  done_ = std::move(done);
  last_ = ConnectionError("cannot reach", endpoint_, ETIMEDOUT);
  timer_ = loop_->AddTimer(absl::ZeroDuration(), [this] {
    timer_ = loop_->AddTimer(options_.connect_timeout, [this] { Fail(last_); });
    Begin();
  });
}

void RedisDialer::Cancel() {
  StopWatching();
  loop_->CancelTimer(std::exchange(timer_, 0));
  fd_.reset();
  done_ = nullptr;
}

void RedisDialer::Begin() {
  if (lookup_ != nullptr && lookup_->done()) return TakeName();
  if (lookup_ == nullptr && locator_.NameIsDue(clock_.Now())) {
    const absl::Status asked = AskForName();
    if (!asked.ok() && !locator_.knows_address()) return Fail(asked);
  }
  if (locator_.knows_address()) return TryAddresses();
  if (lookup_ == nullptr) return Fail(locator_.name_error());
  WatchFor(lookup_->fd(), EPOLLIN, &RedisDialer::TakeName);
}

absl::Status RedisDialer::AskForName() {
  DDP_ASSIGN_OR_RETURN(lookup_, NameLookup::Start(endpoint_.host));
  return absl::OkStatus();
}

void RedisDialer::TakeName() {
  StopWatching();
  const absl::StatusOr<std::vector<std::string>> found = lookup_->Result();
  lookup_.reset();
  if (found.ok()) {
    locator_.NameFound(*found, clock_.Now());
  } else {
    locator_.NameFailed(found.status(), clock_.Now());
  }
  if (!locator_.knows_address()) return Fail(found.status());
  TryAddresses();
}

void RedisDialer::TryAddresses() {
  left_to_try_ = locator_.address_count();
  ConnectNext();
}

void RedisDialer::ConnectNext() {
  while (left_to_try_ > 0) {
    --left_to_try_;
    absl::StatusOr<UniqueFd> fd = BeginConnecting(locator_.NextTarget());
    if (!fd.ok()) {
      last_ = fd.status();
      continue;
    }
    fd_ = *std::move(fd);
    WatchFor(fd_.get(), EPOLLOUT, &RedisDialer::OnConnected);
    return;
  }
  Fail(last_);
}

void RedisDialer::OnConnected() {
  StopWatching();
  if (const absl::Status connected = FinishConnecting(fd_.get(), endpoint_); !connected.ok()) {
    last_ = connected;
    return ConnectNext();
  }
  wire_.Reset();
  greeting_.emplace(endpoint_, options_.client_name, options_.resp3);
  const std::string bytes = greeting_->WireForm();
  // The buffer of a new socket takes these few hundred bytes at once.
  const absl::StatusOr<size_t> sent = SendSome(fd_.get(), bytes, endpoint_);
  if (!sent.ok()) return Fail(sent.status());
  if (*sent != bytes.size()) {
    return Fail(ConnectionError("the connection broke to", endpoint_, EAGAIN));
  }
  WatchFor(fd_.get(), EPOLLIN, &RedisDialer::OnReadable);
}

void RedisDialer::OnReadable() {
  const absl::StatusOr<bool> greeted = ReadGreeting();
  if (!greeted.ok()) return Fail(greeted.status());
  if (!*greeted) return;
  StopWatching();
  locator_.Reached(PeerAddress(fd_.get()));
  Finish(std::move(fd_));
}

// Returns true when all replies to the greeting have come.
absl::StatusOr<bool> RedisDialer::ReadGreeting() {
  char buffer[kReceiveBytes];
  DDP_ASSIGN_OR_RETURN(const size_t count,
                       ReceiveSome(fd_.get(), absl::MakeSpan(buffer), MSG_DONTWAIT, endpoint_));
  DDP_RETURN_IF_ERROR(wire_.Feed(buffer, count));
  while (!greeting_->done()) {
    RedisReply reply;
    DDP_ASSIGN_OR_RETURN(const bool complete, wire_.NextReply(reply));
    if (!complete) return false;
    DDP_RETURN_IF_ERROR(greeting_->Take(reply));
  }
  return true;
}

void RedisDialer::WatchFor(int fd, uint32_t events, void (RedisDialer::*then)()) {
  StopWatching();
  const absl::Status watched =
      loop_->Watch(fd, events, [this, then](uint32_t) { (this->*then)(); });
  if (!watched.ok()) return Fail(watched);
  watched_fd_ = fd;
}

void RedisDialer::StopWatching() {
  if (watched_fd_ >= 0) loop_->Unwatch(std::exchange(watched_fd_, -1));
}

void RedisDialer::Fail(const absl::Status& status) {
  locator_.Lost(clock_.Now());
  Finish(status);
}

void RedisDialer::Finish(absl::StatusOr<UniqueFd> result) {
  const Done done = std::exchange(done_, nullptr);
  Cancel();
  done(std::move(result));
}

}  // namespace ddp::store
