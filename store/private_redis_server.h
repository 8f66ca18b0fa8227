#ifndef DDP_STORE_PRIVATE_REDIS_SERVER_H_
#define DDP_STORE_PRIVATE_REDIS_SERVER_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "store/redis_endpoint.h"
#include "store/redis_script.h"

namespace ddp::store {

// A real redis-server for this process alone: on a unix socket inside a folder that only this user
// can enter, without a TCP port unless Options::port says so, keeping nothing on disk and evicting
// nothing.
//
// Its life is bound to ours: it is stopped by the destructor, and killed by the kernel when the
// *thread* that called Start() ends in any way, SIGKILL of the process included. So call Start()
// from the main thread, or from one that outlives the server. It runs in a session of its own, so
// that Ctrl-C on the terminal does not reach it.
//
// In its folder it has redis.sock, redis.conf and redis.log (what it printed); the destructor
// removes them, and the folder too when Start() made it. When we are killed, that is left to
// whoever cleans up after us (ddprun's keeper), who needs directory() and pid().
//
// Thread-compatible.
class PrivateRedisServer {
 public:
  struct Options {
    // An existing folder of this user with mode 0700, or empty: a new one under TMPDIR, or under
    // /tmp when TMPDIR is unset or too long for the path of a unix socket (107 bytes).
    std::string directory;

    // A path, or a name that is looked for on PATH.
    std::string redis_server = "redis-server";

    // From the start of the program to its first answer.
    absl::Duration start_timeout = absl::Seconds(10);

    // Scripts that the server knows from its first client on, so that clients need no EVAL. A user
    // of the server's own loads them, who exists until Start() returns and may do nothing else.
    std::vector<RedisScript> scripts;

    // A TCP port to listen on, once the scripts are loaded, at the addresses of a "bind" line in
    // `extra_config`. 0: none. Needs redis-server 6.2 or newer.
    int port = 0;

    // More lines for redis.conf (mode 0600, so a password may stand there), after our own.
    std::vector<std::string> extra_config;
  };

  // Starts the server and returns when it answers.
  //
  // kNotFound: there is no such program ("install redis-server"). kInvalidArgument: the folder's
  // path is too long for a socket. kFailedPrecondition: the folder is not a folder of ours with
  // mode 0700, or already holds a socket. kUnavailable: the server ended at once, or cannot
  // listen on `port`; the end of what it printed is in the message. kDeadlineExceeded: it did not
  // answer within start_timeout. Other codes: a system call failed; it is named.
  static absl::StatusOr<std::unique_ptr<PrivateRedisServer>> Start(const Options& options);
  static absl::StatusOr<std::unique_ptr<PrivateRedisServer>> Start() { return Start(Options()); }

  // The steps of Start(), for a caller that must not wait: Prepare() and AwaitAnswer() may block
  // and may be called on any thread, Launch() does not and is bound to its thread as Start() is.
  // Each once, in this order, with the errors of Start(). Before Launch() there is no process.
  static absl::StatusOr<std::unique_ptr<PrivateRedisServer>> Prepare(const Options& options);
  absl::Status Launch();
  absl::Status AwaitAnswer();

  // From Launch() on any thread may call it, also while another one is in AwaitAnswer(), which then
  // ends.
  void Kill();

  ~PrivateRedisServer();
  PrivateRedisServer(const PrivateRedisServer&) = delete;
  PrivateRedisServer& operator=(const PrivateRedisServer&) = delete;

  // The unix socket.
  const RedisEndpoint& endpoint() const { return endpoint_; }
  const std::string& directory() const { return directory_; }
  pid_t pid() const { return pid_; }

  // Readable once the server has ended (a pidfd), for an event loop. -1 after Stop().
  int exit_fd() const { return pidfd_.get(); }

  // Kills the server, waits for its end and removes its files. What it held is lost. Idempotent.
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
  // From Prepare() on.
  Options options_;
  std::string program_;
  std::optional<RedisEndpoint> starter_;
  RedisEndpoint endpoint_;
  UniqueFd exec_error_;  // readable after exec: errno, or the end of the file
  pid_t pid_ = -1;
  UniqueFd pidfd_;
  bool stopped_ = false;
};

}  // namespace ddp::store

#endif  // DDP_STORE_PRIVATE_REDIS_SERVER_H_
