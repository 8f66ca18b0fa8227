#include "launcher/server_guard.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(100);
constexpr absl::Duration kLongestPause = absl::Seconds(5);

store::PrivateRedisServer::Options OfReplacement(store::PrivateRedisServer::Options options) {
  options.start_timeout = std::min(options.start_timeout, ServerGuard::kReplacementTimeout);
  return options;
}

}  // namespace

ServerGuard::ServerGuard(store::PrivateRedisServer::Options options, store::RedisEndpoint endpoint,
                         std::unique_ptr<store::PrivateRedisServer> server)
    : options_(OfReplacement(std::move(options))),
      server_(std::move(server)),
      endpoint_(std::move(endpoint)) {}

ServerGuard::~ServerGuard() {
  if (event_loop_ == nullptr) return;
  event_loop_->CancelTimer(retry_);
  if (server_ != nullptr) event_loop_->Unwatch(server_->exit_fd());
}

absl::StatusOr<std::unique_ptr<ServerGuard>> ServerGuard::Start(const std::string& folder) {
  store::PrivateRedisServer::Options options;
  options.directory = folder;
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<store::PrivateRedisServer> server,
                       store::PrivateRedisServer::Start(options));
  store::RedisEndpoint endpoint = server->endpoint();
  return std::unique_ptr<ServerGuard>(
      new ServerGuard(std::move(options), std::move(endpoint), std::move(server)));
}

absl::StatusOr<std::unique_ptr<ServerGuard>> ServerGuard::Start(
    const store::PrivateRedisServer::Options& options, const store::RedisEndpoint& endpoint) {
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<store::PrivateRedisServer> server,
                       store::PrivateRedisServer::Start(options));
  return std::unique_ptr<ServerGuard>(new ServerGuard(options, endpoint, std::move(server)));
}

absl::Status ServerGuard::Watch(EventLoop* event_loop, Hooks hooks) {
  event_loop_ = event_loop;
  hooks_ = std::move(hooks);
  return WatchServer();
}

absl::Status ServerGuard::WatchServer() {
  return event_loop_->Watch(server_->exit_fd(), EPOLLIN, [this](uint32_t) { OnDeath(); });
}

void ServerGuard::OnDeath() {
  event_loop_->Unwatch(server_->exit_fd());
  server_.reset();
  tries_ = 0;
  if (++replacements_ > kMaxReplacements) {
    return hooks_.say("the private Redis server died once more and is not replaced");
  }
  Replace();
}

void ServerGuard::Replace() {
  const auto is_doomed = [this] { return hooks_.doomed != nullptr && hooks_.doomed->load(); };
  if (is_doomed()) return;
  auto server = store::PrivateRedisServer::Start(options_);
  // Whoever kills all processes kills the new one, too.
  if (is_doomed()) return;
  if (!server.ok()) {
    const bool is_last = ++tries_ >= kMaxTries;
    if (tries_ == 1 || is_last) {
      hooks_.say(absl::StrCat("the private Redis server died and cannot be replaced",
                              is_last ? ": " : " yet: ", std::string(server.status().message())));
    }
    if (is_last) return;
    const absl::Duration pause = std::min(kFirstPause * (1 << std::min(tries_, 10)), kLongestPause);
    retry_ = event_loop_->AddTimer(pause, [this] { Replace(); });
    return;
  }
  server_ = *std::move(server);
  hooks_.say("the private Redis server died: started another one");
  hooks_.on_replaced(server_->pid());
  if (const absl::Status status = WatchServer(); !status.ok())
    hooks_.say(std::string(status.message()));
}

}  // namespace ddp::launcher
