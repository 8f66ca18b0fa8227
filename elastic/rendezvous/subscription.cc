#include "elastic/rendezvous/subscription.h"

#include <sys/epoll.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "store/redis_reply.h"
#include "store/redis_socket.h"

namespace ddp::elastic {
namespace {

// Replies taken in one turn of the loop, so that a flood does not keep it from its other work.
constexpr int kRepliesPerTurn = 64;

// Between a Listen() and the server's word that it listens.
constexpr absl::Duration kConfirmTimeout = absl::Seconds(5);

}  // namespace

Subscription::Subscription(const store::RedisEndpoint& endpoint,
                           const store::RedisConnectionOptions& options, EventLoop* loop,
                           Callbacks callbacks)
    : loop_(loop),
      callbacks_(std::move(callbacks)),
      dialer_(endpoint, options, loop),
      connection_(store::RedisConnection::Unconnected(endpoint, options)) {}

Subscription::~Subscription() { Stop(); }

void Subscription::Stop() {
  loop_->CancelTimer(std::exchange(timer_, 0));
  if (watched_fd_ >= 0) loop_->Unwatch(std::exchange(watched_fd_, -1));
  dialer_.Cancel();
  connection_->Disconnect();
}

void Subscription::EndSoon() {
  Stop();
  timer_ = loop_->AddTimer(absl::ZeroDuration(), [this] {
    timer_ = 0;
    callbacks_.on_end();
  });
}

void Subscription::Listen(const std::string& channel) {
  Stop();
  dialer_.Dial([this, channel](absl::StatusOr<UniqueFd> fd) {
    if (!fd.ok() || !connection_->Adopt(*std::move(fd)).ok()) return EndSoon();
    AskFor(channel);
  });
}

void Subscription::ListenFirst(const std::string& channel) {
  Stop();
  if (!connection_->Reconnect({.total_timeout = absl::ZeroDuration()}).ok()) return EndSoon();
  dialer_.FoundAt(store::PeerAddress(connection_->fd()));
  AskFor(channel);
}

void Subscription::AskFor(const std::string& channel) {
  if (!connection_->Send({{"SUBSCRIBE", channel}}).ok()) return EndSoon();
  const int fd = connection_->fd();
  if (!loop_->Watch(fd, EPOLLIN, [this](uint32_t) { OnReadable(); }).ok()) return EndSoon();
  watched_fd_ = fd;
  timer_ = loop_->AddTimer(kConfirmTimeout, [this] {
    timer_ = 0;
    EndSoon();
  });
}

void Subscription::OnReadable() {
  for (int i = 0; i < kRepliesPerTurn && connection_->connected(); ++i) {
    const absl::StatusOr<store::RedisReply> reply = connection_->Receive(absl::ZeroDuration());
    if (absl::IsDeadlineExceeded(reply.status())) return;  // the rest wakes us
    if (!reply.ok() || reply->IsError()) return EndSoon();
    const auto parts = reply->AsArray();
    if (!parts.ok() || parts->size() != 3) return EndSoon();
    const std::string kind = (*parts)[0].AsString().value_or("");
    if (kind == "subscribe") {
      loop_->CancelTimer(std::exchange(timer_, 0));
      callbacks_.on_subscribed();
    } else if (kind == "message") {
      callbacks_.on_push((*parts)[2].AsString().value_or(""));
    }
  }
  // Replies that were read with others are in no socket that could wake us.
  if (!connection_->connected() || timer_ != 0) return;
  timer_ = loop_->AddTimer(absl::ZeroDuration(), [this] {
    timer_ = 0;
    OnReadable();
  });
}

}  // namespace ddp::elastic
