#include "launcher/meeting/server_guard.h"

#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(100);
constexpr absl::Duration kLongestPause = absl::Seconds(5);
// Longest wait of the destructor until the thread sees that its server was killed.
constexpr absl::Duration kKillTimeout = absl::Seconds(2);

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

// A replacement in progress. The thread owns it during the steps that may block.
struct ServerGuard::Attempt {
  absl::Status status;
  std::unique_ptr<store::PrivateRedisServer> server;
  bool launched = false;
};

ServerGuard::~ServerGuard() {
  if (event_loop_ == nullptr) return;
  event_loop_->CancelTimer(retry_);
  if (server_ != nullptr) event_loop_->Unwatch(server_->exit_fd());
  if (attempt_ == nullptr) return;
  // The thread must have released the server before its files are removed.
  closing_ = true;
  if (attempt_->launched) attempt_->server->Kill();
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + kKillTimeout;
  while (thread_->pending() > 0 && clock.Now() < deadline) {
    pollfd polled{.fd = thread_->fd(), .events = POLLIN, .revents = 0};
    (void)::poll(&polled, 1, static_cast<int>(absl::ToInt64Milliseconds(kKillTimeout)));
    thread_->Dispatch();
  }
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
  DDP_ASSIGN_OR_RETURN(thread_, TaskThread::Create(event_loop, "server-guard"));
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
  if (is_doomed()) return;
  attempt_ = std::make_shared<Attempt>();
  thread_->Run(
      [attempt = attempt_, options = options_] {
        auto server = store::PrivateRedisServer::Prepare(options);
        attempt->status = server.status();
        if (server.ok()) attempt->server = *std::move(server);
      },
      [this] { Launch(); });
}

// Forks on this thread: the server dies with the thread that forks it.
void ServerGuard::Launch() {
  if (closing_ || is_doomed()) return;
  if (attempt_->status.ok()) attempt_->status = attempt_->server->Launch();
  if (!attempt_->status.ok()) return TryAgain(attempt_->status);
  attempt_->launched = true;
  if (hooks_.on_launched) hooks_.on_launched(attempt_->server->pid());
  thread_->Run([attempt = attempt_] { attempt->status = attempt->server->AwaitAnswer(); },
               [this] { Conclude(); });
}

void ServerGuard::Conclude() {
  // The code that kills all processes kills the replacement too.
  if (closing_ || is_doomed()) return;
  if (!attempt_->status.ok()) return TryAgain(attempt_->status);
  server_ = std::move(attempt_->server);
  attempt_.reset();
  hooks_.say("the private Redis server died: started another one");
  hooks_.on_replaced(server_->pid());
  if (const absl::Status status = WatchServer(); !status.ok())
    hooks_.say(std::string(status.message()));
}

void ServerGuard::TryAgain(const absl::Status& why) {
  const std::string text(why.message());
  attempt_.reset();
  const bool is_last = ++tries_ >= kMaxTries;
  if (tries_ == 1 || is_last) {
    hooks_.say(absl::StrCat("the private Redis server died and cannot be replaced",
                            is_last ? ": " : " yet: ", text));
  }
  if (is_last) return;
  const absl::Duration pause = std::min(kFirstPause * (1 << std::min(tries_, 10)), kLongestPause);
  retry_ = event_loop_->AddTimer(pause, [this] { Replace(); });
}

}  // namespace ddp::launcher
