#include "launcher/server_guard.h"

#include <sys/epoll.h>

#include <cstdio>
#include <utility>

#include "base/status_macros.h"

namespace ddp::launcher {

ServerGuard::ServerGuard(store::PrivateRedisServer::Options options, store::RedisEndpoint endpoint,
                         std::unique_ptr<store::PrivateRedisServer> server)
    : options_(std::move(options)), server_(std::move(server)), endpoint_(std::move(endpoint)) {}

ServerGuard::~ServerGuard() {
  if (event_loop_ != nullptr && server_ != nullptr) event_loop_->Unwatch(server_->exit_fd());
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

absl::Status ServerGuard::Watch(EventLoop* event_loop, std::function<void(pid_t)> on_replaced) {
  event_loop_ = event_loop;
  on_replaced_ = std::move(on_replaced);
  return WatchServer();
}

absl::Status ServerGuard::WatchServer() {
  return event_loop_->Watch(server_->exit_fd(), EPOLLIN, [this](uint32_t) { Replace(); });
}

void ServerGuard::Replace() {
  event_loop_->Unwatch(server_->exit_fd());
  server_.reset();
  if (++replacements_ > kMaxReplacements) {
    std::fprintf(stderr, "ddprun: the private Redis server died once more and is not replaced\n");
    return;
  }
  auto server = store::PrivateRedisServer::Start(options_);
  if (!server.ok()) {
    std::fprintf(stderr, "ddprun: the private Redis server died and cannot be replaced: %s\n",
                 std::string(server.status().message()).c_str());
    return;
  }
  server_ = *std::move(server);
  std::fprintf(stderr, "ddprun: the private Redis server died: started another one\n");
  on_replaced_(server_->pid());
  if (const absl::Status status = WatchServer(); !status.ok()) {
    std::fprintf(stderr, "ddprun: %s\n", std::string(status.message()).c_str());
  }
}

}  // namespace ddp::launcher
