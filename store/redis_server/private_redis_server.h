#ifndef DDP_STORE_REDIS_SERVER_PRIVATE_REDIS_SERVER_H_
#define DDP_STORE_REDIS_SERVER_PRIVATE_REDIS_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"

namespace ddp::store {

// A redis-server process of one job: a child of this process, which serves the job's agents and
// workers. It listens on a unix socket in a folder that only this user can enter. Other hosts reach
// the server only when Options::port is set. It keeps nothing on disk and evicts no keys.
//
// The server does not outlive this process. The destructor stops the server. The kernel kills the
// server when the *thread* that called Start() or Launch() ends in any way, SIGKILL of the process
// included. So call them on the main thread, or on a thread that outlives the server. The server
// runs in a session of its own, so Ctrl-C on the terminal does not reach it.
//
// The folder holds redis.sock, redis.conf and redis.log (the server's output). The destructor
// removes these files, and the folder too when Start() made it. When this process is killed, the
// files stay. A process that cleans up after it (ddprun's keeper) needs directory() and pid().
//
// Thread-compatible, except Kill().
class PrivateRedisServer {
 public:
  struct Options {
    // An existing folder of this user with mode 0700. Empty: a new folder under TMPDIR, or under
    // /tmp when TMPDIR is unset, relative, or too long for the path of a unix socket (107 bytes).
    std::string directory;

    // A path, or a name that is searched on PATH.
    std::string redis_server = "redis-server";

    // Time limit of AwaitAnswer() for the server's first answer.
    absl::Duration start_timeout = absl::Seconds(10);

    // Scripts that the server knows from its first client on, so that clients need no EVAL. A
    // start-up user with a random name loads them and opens the port. This user has no other
    // rights, and loses its password and its rights before Start() returns.
    std::vector<RedisScript> scripts;

    // The TCP port that the server opens after the scripts are loaded, at the addresses of a "bind"
    // line in `extra_config`. 0: no port. Needs redis-server 6.2 or newer.
    int port = 0;

    // More lines for redis.conf, after our own. The file has mode 0600, so a line may hold a
    // password.
    std::vector<std::string> extra_config;
  };

  // Starts the server. Blocks until the server answers.
  //
  // kNotFound: the program ("install redis-server") or the given folder does not exist.
  // kInvalidArgument: the folder's path is too long for a socket. kFailedPrecondition: the folder
  // is not a folder of this user with mode 0700, or already holds a socket. kUnavailable: the
  // server ended during its start, or cannot listen on `port`; the message has the end of the
  // server's output. kDeadlineExceeded: the server did not answer within start_timeout. Other
  // codes: a system call failed; the message names the call.
  static absl::StatusOr<std::unique_ptr<PrivateRedisServer>> Start(const Options& options);
  static absl::StatusOr<std::unique_ptr<PrivateRedisServer>> Start() { return Start(Options()); }

  // The steps of Start(), for a caller that must not block. Call each once, in this order. Errors:
  // those of Start(). Prepare() and AwaitAnswer() may block and may run on any thread. Launch()
  // does not block, and its thread must outlive the server. No process exists before Launch().
  static absl::StatusOr<std::unique_ptr<PrivateRedisServer>> Prepare(const Options& options);
  absl::Status Launch();
  absl::Status AwaitAnswer();

  // Kills the server with SIGKILL. An AwaitAnswer() that runs on another thread then ends.
  // Thread: any, from Launch() until Stop().
  void Kill();

  ~PrivateRedisServer();
  PrivateRedisServer(const PrivateRedisServer&) = delete;
  PrivateRedisServer& operator=(const PrivateRedisServer&) = delete;

  // The server's unix socket.
  const RedisEndpoint& endpoint() const { return endpoint_; }
  const std::string& directory() const { return directory_; }
  pid_t pid() const { return pid_; }

  // Returns a pidfd, for an event loop: readable once the server has ended. -1 before Launch() and
  // after Stop().
  int exit_fd() const { return pidfd_.get(); }

  // Kills the server, waits for its end and removes its files. The server's data is lost.
  // Idempotent.
  void Stop();

 private:
  PrivateRedisServer(std::string directory, bool owns_directory);

  absl::Status WriteConfig() const;
  absl::Status AwaitExec(absl::Time deadline);
  absl::Status AwaitConnection(absl::Time deadline);
  absl::Status Open() const;
  std::string LogTail() const;

  const std::string directory_;
  const bool owns_directory_;
  // Set by Prepare() and Launch().
  Options options_;
  std::string program_;
  std::optional<RedisEndpoint> starter_;  // the start-up user; see Options::scripts
  RedisEndpoint endpoint_;
  UniqueFd exec_error_;  // readable after exec: errno, or the end of the file when exec succeeded
  pid_t pid_ = -1;
  UniqueFd pidfd_;
  bool stopped_ = false;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_SERVER_PRIVATE_REDIS_SERVER_H_
