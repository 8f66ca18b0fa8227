#ifndef DDP_LAUNCHER_SERVER_GUARD_H_
#define DDP_LAUNCHER_SERVER_GUARD_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
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

  // Starts the first server in `folder`, on its unix socket. Errors: those of
  // PrivateRedisServer::Start.
  static absl::StatusOr<std::unique_ptr<ServerGuard>> Start(const std::string& folder);

  // Starts the first server by `options`, which every later one is started by, too; `endpoint` is
  // where it is reached. Errors: as above.
  static absl::StatusOr<std::unique_ptr<ServerGuard>> Start(
      const store::PrivateRedisServer::Options& options, const store::RedisEndpoint& endpoint);
  ~ServerGuard();

  // The same for every server that there will be.
  const store::RedisEndpoint& endpoint() const { return endpoint_; }
  pid_t pid() const { return server_ == nullptr ? -1 : server_->pid(); }

  // From now on replaces the server when it dies, says so on stderr, and calls `on_replaced` with
  // the new one's pid. `event_loop` is not owned and must outlive the guard. Errors: kInternal.
  absl::Status Watch(EventLoop* event_loop, std::function<void(pid_t)> on_replaced);

 private:
  ServerGuard(store::PrivateRedisServer::Options options, store::RedisEndpoint endpoint,
              std::unique_ptr<store::PrivateRedisServer> server);

  absl::Status WatchServer();
  void Replace();

  const store::PrivateRedisServer::Options options_;
  std::unique_ptr<store::PrivateRedisServer> server_;
  const store::RedisEndpoint endpoint_;
  EventLoop* event_loop_ = nullptr;
  std::function<void(pid_t)> on_replaced_;
  int replacements_ = 0;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_SERVER_GUARD_H_
