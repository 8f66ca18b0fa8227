#include "elastic/rendezvous/script_channel.h"

#include <glog/logging.h>
#include <sys/epoll.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "store/redis_errors.h"
#include "store/redis_socket.h"

namespace ddp::elastic {

ScriptChannel::ScriptChannel(std::unique_ptr<store::RedisConnection> connection, EventLoop* loop,
                             absl::Duration reply_timeout)
    : connection_(std::move(connection)),
      loop_(loop),
      reply_timeout_(reply_timeout),
      dialer_(connection_->endpoint(), connection_->options(), loop) {
  dialer_.FoundAt(store::PeerAddress(connection_->fd()));
}

ScriptChannel::~ScriptChannel() { StopWaiting(); }

void ScriptChannel::Call(const store::RedisScript& script, std::vector<std::string> keys,
                         std::vector<std::string> args, Done done) {
  CHECK(!busy()) << "one call at a time";
  done_ = std::move(done);
  script_ = &script;
  rest_of_command_ = {absl::StrCat(keys.size())};
  for (std::string& key : keys) rest_of_command_.push_back(std::move(key));
  for (std::string& arg : args) rest_of_command_.push_back(std::move(arg));
  source_sent_ = false;
  Connect();
}

void ScriptChannel::Call(std::vector<std::string> words, Done done) {
  CHECK(!busy()) << "one call at a time";
  done_ = std::move(done);
  script_ = nullptr;
  words_ = std::move(words);
  Connect();
}

// One try: whoever calls decides about the next one.
void ScriptChannel::Connect() {
  if (connection_->connected()) return SendCall();
  dialer_.Dial([this](absl::StatusOr<UniqueFd> fd) {
    const absl::Status status = fd.ok() ? connection_->Adopt(*std::move(fd)) : fd.status();
    status.ok() ? SendCall() : Finish(status);
  });
}

void ScriptChannel::SendCall() {
  script_ == nullptr ? Send(std::move(words_)) : SendScript("EVALSHA", script_->sha1_hex());
}

void ScriptChannel::SendScript(const char* command, const std::string& script) {
  std::vector<std::string> words = {command, script};
  words.insert(words.end(), rest_of_command_.begin(), rest_of_command_.end());
  Send(std::move(words));
}

void ScriptChannel::Send(std::vector<std::string> words) {
  absl::Status status = connection_->Send({std::move(words)});
  if (status.ok() && watched_fd_ < 0) {
    const int fd = connection_->fd();
    status = loop_->Watch(fd, EPOLLIN, [this](uint32_t) { OnReadable(); });
    if (status.ok()) watched_fd_ = fd;
  }
  if (!status.ok()) {
    connection_->Disconnect();
    return FinishSoon(status);
  }
  loop_->CancelTimer(timer_);
  timer_ = loop_->AddTimer(reply_timeout_, [this] {
    Finish(absl::DeadlineExceededError(absl::StrCat("no reply from Redis at ",
                                                    connection_->endpoint().DebugString(), " in ",
                                                    absl::FormatDuration(reply_timeout_))));
  });
}

void ScriptChannel::OnReadable() {
  absl::StatusOr<store::RedisReply> reply = connection_->Receive(absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(reply.status())) return;  // half of it; the rest wakes us
  OnReply(std::move(reply));
}

void ScriptChannel::OnReply(absl::StatusOr<store::RedisReply> reply) {
  if (reply.ok() && reply->IsError()) {
    if (script_ != nullptr && store::IsUnknownScript(reply->error_text()) &&
        !std::exchange(source_sent_, true)) {
      return SendScript("EVAL", script_->source());
    }
    StopWaiting();
    Done done = std::exchange(done_, nullptr);
    return done(store::StatusOfErrorReply(reply->error_text(), connection_->endpoint()));
  }
  Finish(std::move(reply));
}

void ScriptChannel::Finish(absl::StatusOr<store::RedisReply> reply) {
  StopWaiting();
  // A reply that comes later must not be taken for that of the next call.
  if (!reply.ok()) connection_->Disconnect();
  Done done = std::exchange(done_, nullptr);
  done(std::move(reply));
}

void ScriptChannel::FinishSoon(absl::Status status) {
  StopWaiting();
  timer_ = loop_->AddTimer(absl::ZeroDuration(), [this, status] { Finish(status); });
}

void ScriptChannel::StopWaiting() {
  dialer_.Cancel();
  loop_->CancelTimer(std::exchange(timer_, 0));
  if (watched_fd_ >= 0) loop_->Unwatch(std::exchange(watched_fd_, -1));
}

}  // namespace ddp::elastic
