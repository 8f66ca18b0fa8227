#ifndef DDP_LAUNCHER_SERVER_GUARD_H_
#define DDP_LAUNCHER_SERVER_GUARD_H_

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/task_thread.h"
#include "store/private_redis_server.h"
#include "store/redis_endpoint.h"

namespace ddp::launcher {

// The job's private Redis server, for this machine alone or at an address that others reach, and a
// new one at the same place when it dies.
//
// What the old one held is lost: the agent presents the generation that it has seen to the new one,
// so the job goes on, and the next generation's store is empty anyway. Not thread-safe; on the
// thread that outlives the server (see PrivateRedisServer).
class ServerGuard {
 public:
  // After that many replacements the server stays dead: something kills it on purpose.
  static constexpr int kMaxReplacements = 3;

  // How often a replacement is tried that cannot be started: something may hold its port for a
  // moment, or the disk be full. The pauses grow, and are nearly five minutes in all; one that
  // starts and does not answer takes kReplacementTimeout more each time.
  static constexpr int kMaxTries = 60;

  // For the first answer of a replacement. The event loop does not wait for it: what may block is
  // done on a thread ("server-guard").
  static constexpr absl::Duration kReplacementTimeout = absl::Seconds(5);

  // Starts the first server in `folder`, on its unix socket. Errors: those of
  // PrivateRedisServer::Start.
  static absl::StatusOr<std::unique_ptr<ServerGuard>> Start(const std::string& folder);

  // Starts the first server by `options`, which every later one is started by, too, but for its
  // start_timeout; `endpoint` is where it is reached. Errors: as above.
  static absl::StatusOr<std::unique_ptr<ServerGuard>> Start(
      const store::PrivateRedisServer::Options& options, const store::RedisEndpoint& endpoint);
  // Kills a replacement that has not answered yet.
  ~ServerGuard();

  // The same for every server that there will be.
  const store::RedisEndpoint& endpoint() const { return endpoint_; }
  pid_t pid() const { return server_ == nullptr ? -1 : server_->pid(); }

  struct Hooks {
    std::function<void(pid_t)> on_replaced;  // with the new one's pid, once it answers
    // With the pid of each that is tried, at once: it is a child that nobody else may kill or reap.
    // May be empty.
    std::function<void(pid_t)> on_launched;
    std::function<void(const std::string& line)> say;  // for the user; must not wait
    // True once all processes are being killed: replace nothing any more. Not owned; may be null.
    const std::atomic<bool>* doomed = nullptr;
  };

  // From now on replaces the server when it dies. `event_loop` is not owned and must outlive the
  // guard. Errors: kInternal.
  absl::Status Watch(EventLoop* event_loop, Hooks hooks);

 private:
  ServerGuard(store::PrivateRedisServer::Options options, store::RedisEndpoint endpoint,
              std::unique_ptr<store::PrivateRedisServer> server);

  absl::Status WatchServer();
  struct Attempt;
  void OnDeath();
  bool is_doomed() const { return hooks_.doomed != nullptr && hooks_.doomed->load(); }
  void Replace();
  void Launch();
  void Conclude();
  void TryAgain(const absl::Status& why);

  const store::PrivateRedisServer::Options options_;  // of a replacement
  std::unique_ptr<store::PrivateRedisServer> server_;
  const store::RedisEndpoint endpoint_;
  EventLoop* event_loop_ = nullptr;
  std::unique_ptr<TaskThread> thread_;
  std::shared_ptr<Attempt> attempt_;  // while one is under way
  Hooks hooks_;
  int replacements_ = 0;
  int tries_ = 0;         // of the present one
  bool closing_ = false;  // in the destructor
  EventLoop::TimerId retry_ = 0;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_SERVER_GUARD_H_
