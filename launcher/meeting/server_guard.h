#ifndef DDP_LAUNCHER_MEETING_SERVER_GUARD_H_
#define DDP_LAUNCHER_MEETING_SERVER_GUARD_H_

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
#include "store/redis/redis_endpoint.h"
#include "store/redis_server/private_redis_server.h"

namespace ddp::launcher {

// The job's private Redis server, for this machine alone or at an address that others reach. After
// Watch(), the guard starts a new server at the same place when the old one dies. Owned by the
// MeetingPlace of the node.
//
// The data of the dead server is lost. The agent presents the highest generation that it has seen
// to the new server, so the job continues; the next generation's store is empty anyway.
//
// Thread: that of the event loop, which must outlive the server (see PrivateRedisServer).
class ServerGuard {
 public:
  // Maximum of replacements. After that the server stays dead: it would be killed again.
  static constexpr int kMaxReplacements = 3;

  // Maximum of tries for one replacement that cannot be started: a program may hold its port for a
  // moment, or the disk may be full. The growing pauses are nearly five minutes in all. A server
  // that starts and does not answer adds kReplacementTimeout per try.
  static constexpr int kMaxTries = 60;

  // Longest wait for the first answer of a replacement. The event loop does not block: the thread
  // "server-guard" waits.
  static constexpr absl::Duration kReplacementTimeout = absl::Seconds(5);

  // Starts the first server in `folder`, on its unix socket. Errors: those of
  // PrivateRedisServer::Start.
  static absl::StatusOr<std::unique_ptr<ServerGuard>> Start(const std::string& folder);

  // Starts the first server with `options`. Every later server gets the same options, with a
  // start_timeout of at most kReplacementTimeout. `endpoint` is its address. Errors: as above.
  static absl::StatusOr<std::unique_ptr<ServerGuard>> Start(
      const store::PrivateRedisServer::Options& options, const store::RedisEndpoint& endpoint);
  // Kills the server. Blocks for at most 2 s if a replacement is being started.
  ~ServerGuard();

  // Address of the server, equal for every replacement.
  const store::RedisEndpoint& endpoint() const { return endpoint_; }
  pid_t pid() const { return server_ == nullptr ? -1 : server_->pid(); }

  struct Hooks {
    std::function<void(pid_t)> on_replaced;  // receives the new server's pid once it answers
    // Receives the pid of each replacement as soon as it is forked. No other code may kill or reap
    // this child. May be empty.
    std::function<void(pid_t)> on_launched;
    std::function<void(const std::string& line)> say;  // prints a line for the user; must not block
    // Flag that is true once all processes are being killed: no server is replaced any more. Not
    // owned; may be null.
    const std::atomic<bool>* doomed = nullptr;
  };

  // Replaces the server from now on when it dies. `event_loop` is not owned and must outlive the
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

  const store::PrivateRedisServer::Options options_;  // options of a replacement
  std::unique_ptr<store::PrivateRedisServer> server_;
  const store::RedisEndpoint endpoint_;
  EventLoop* event_loop_ = nullptr;
  std::unique_ptr<TaskThread> thread_;
  std::shared_ptr<Attempt> attempt_;  // replacement in progress
  Hooks hooks_;
  int replacements_ = 0;
  int tries_ = 0;         // tries of the present replacement
  bool closing_ = false;  // true in the destructor
  EventLoop::TimerId retry_ = 0;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_SERVER_GUARD_H_
