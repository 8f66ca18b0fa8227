#ifndef DDP_STORE_REDIS_CONNECTION_H_
#define DDP_STORE_REDIS_CONNECTION_H_

#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "store/redis_endpoint.h"
#include "store/redis_reply.h"
#include "store/redis_reply_reader.h"
#include "store/redis_script.h"

namespace ddp::store {

// How long a connection tries, and what it accepts.
struct RedisConnectionOptions {
  // One attempt to connect: socket, AUTH, SELECT and PING together. (Resolving a host name is the
  // one step that this cannot cut short; a server that was reached once is looked for at the
  // address that it had, and by its name only once in half a minute.)
  absl::Duration connect_timeout = absl::Seconds(5);

  // One attempt at a command: from its first byte out to the last byte of its reply.
  absl::Duration command_timeout = absl::Seconds(10);

  // One call of a method, with all reconnects, repeats and pauses inside it. Zero: a single
  // attempt.
  absl::Duration total_timeout = absl::Seconds(30);

  // The pause before the n-th repeat is drawn evenly from [0, min(max, initial * 2^n)], so that the
  // clients of a server that comes back do not all call in the same moment.
  absl::Duration backoff_initial = absl::Milliseconds(10);
  absl::Duration backoff_max = absl::Seconds(1);

  // What a reply may hold before it is taken for an attack or a fault.
  RedisReplyReader::Limits limits;

  // Shown by CLIENT LIST, for the person who looks after the server. No blanks. Empty: none.
  std::string client_name;
};

// What one call wants to differ from the connection's options.
struct RedisCallOptions {
  // The caller says that doing the command twice is as good as doing it once. Only such a command
  // is sent again when the connection breaks between sending and reply; any other fails then with
  // kUnavailable, "may or may not have been applied".
  bool idempotent = false;

  // In place of command_timeout, for commands that block in the server. Negative: command_timeout.
  absl::Duration command_timeout = absl::Seconds(-1);

  // In place of total_timeout. Negative: total_timeout.
  absl::Duration total_timeout = absl::Seconds(-1);
};

// A connection to one Redis server that mends itself: a call finds a broken connection, makes a new
// one and goes on, within its deadline.
//
// Threads: not thread-safe; one thread at a time. Blocks its caller, at most for total_timeout per
// call. Raises no SIGPIPE; its descriptor is not inherited by programs that are started.
//
// Errors, of every method that talks to the server:
//   kUnavailable         no connection for total_timeout (the message says where, for how long, how
//                        often it was tried and what failed last); or the connection broke after a
//                        command was sent that is not idempotent; or the server answers LOADING,
//                        BUSY, READONLY or the like for as long.
//   kUnauthenticated     the server wants a password, or does not accept this one. Not repeated.
//   kPermissionDenied    the server's rules for our user forbid the command (NOPERM).
//   kDeadlineExceeded    connected, but no reply within command_timeout or total_timeout. The
//                        connection is dropped, the command may have been applied.
//   kResourceExhausted   the server is out of memory (OOM) and refuses writes.
//   kFailedPrecondition  any other error reply, a script's error among them: the text of Redis.
//   kInternal            what came is not the Redis protocol, or exceeds the limits.
class RedisConnection {
 public:
  using Options = RedisConnectionOptions;

  // Connects, trying again with pauses until total_timeout has passed.
  static absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const RedisEndpoint& endpoint,
                                                                  const Options& options = {});
  ~RedisConnection();
  RedisConnection(const RedisConnection&) = delete;
  RedisConnection& operator=(const RedisConnection&) = delete;

  // Sends one command and returns its reply, which is never of type kError. A nil reply is OK.
  absl::StatusOr<RedisReply> Command(const std::vector<std::string>& args,
                                     const RedisCallOptions& call = {});

  // Runs `script` (EVALSHA; with its source when the server does not know it yet).
  absl::StatusOr<RedisReply> Eval(const RedisScript& script, const std::vector<std::string>& keys,
                                  const std::vector<std::string>& args,
                                  const RedisCallOptions& call = {});

  // Sends all commands in one go and returns their replies in order. When one of them is answered
  // by an error, the result is that error (of the first such one), although all were sent: for
  // MULTI or for commands of which each may fail by itself, use Send and Receive.
  absl::StatusOr<std::vector<RedisReply>> Pipeline(
      const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call = {});

  // Runs the commands as one transaction (MULTI, EXEC) in one round trip and returns their replies:
  // nobody sees a part of it, and what is refused before EXEC (no memory, no right, loading) is
  // refused as a whole. An error of a single command does not undo the others, and is the result.
  absl::StatusOr<std::vector<RedisReply>> Transaction(
      const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call = {});

  // The lower level, for subscriptions and event loops. -------------------------------------------

  // Sends commands without waiting for replies. Never reconnects and never repeats: kUnavailable
  // when not connected or when the connection breaks. After Send, the caller must Receive every
  // reply before calling Command, Eval or Pipeline again; a connection that is out of step is
  // dropped with Disconnect().
  absl::Status Send(const std::vector<std::vector<std::string>>& commands);

  // The next reply or pushed message, error replies included, when it has come in full by `timeout`
  // (zero: only what can be had without waiting). kDeadlineExceeded: not yet; nothing is lost and
  // the connection stays usable. kUnavailable: the connection broke, and is closed now.
  absl::StatusOr<RedisReply> Receive(absl::Duration timeout);

  // Readable when Receive() may have something; -1 while not connected. It changes on a reconnect.
  // Before waiting on it, Receive(0) until kDeadlineExceeded: replies may have been read already.
  int fd() const { return fd_.get(); }

  bool connected() const { return fd_.valid(); }

  // Makes a connection where there is none, as Connect does.
  absl::Status Reconnect(const RedisCallOptions& call = {});

  // Closes the connection; the next call of Command, Eval or Pipeline makes a new one.
  void Disconnect();

  const RedisEndpoint& endpoint() const { return endpoint_; }
  const Options& options() const { return options_; }

 private:
  RedisConnection(const RedisEndpoint& endpoint, const Options& options);

  // `replies` is how many replies `request`, which is commands in wire form, brings. Error replies
  // are returned among them. `what` names the commands in messages.
  absl::StatusOr<std::vector<RedisReply>> Call(const std::string& request, size_t replies,
                                               const std::string& what,
                                               const RedisCallOptions& call);
  absl::StatusOr<std::vector<RedisReply>> TryOnce(const std::string& request, size_t replies,
                                                  const RedisCallOptions& call, absl::Time deadline,
                                                  bool& sent);
  absl::Status FirstError(const std::vector<RedisReply>& replies) const;
  absl::StatusOr<UniqueFd> ConnectAgain(absl::Time deadline);
  absl::Status MakeConnection(absl::Time deadline);
  absl::Status Greet(absl::Time deadline);
  absl::Status Write(const std::string& bytes, absl::Time deadline, bool& sent);
  absl::Status Read(absl::Time deadline, RedisReply& reply);
  absl::Status ReceiveBytes(bool may_block);
  bool StillOpen() const;
  bool Pause(int attempt, absl::Time deadline);
  absl::Status GiveUp(const absl::Status& last, int attempts, absl::Duration tried) const;
  RedisCallOptions WithDefaults(RedisCallOptions call) const;

  // Constant after construction.
  const RedisEndpoint endpoint_;
  const Options options_;

  const MonotonicClock clock_;

  std::string known_address_;  // that the server had last; empty: none yet, or a unix socket
  absl::Time name_due_ = absl::InfiniteFuture();  // when its name is to be asked for again

  UniqueFd fd_;
  RedisReplyReader reader_;
  std::mt19937_64 jitter_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_CONNECTION_H_
