#ifndef DDP_STORE_REDIS_REDIS_CALLER_H_
#define DDP_STORE_REDIS_REDIS_CALLER_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::store {

// The timeouts, limits and greeting of a connection.
struct RedisConnectionOptions {
  // Limit of one attempt to connect to an address: socket, AUTH, SELECT, PING and HELLO together.
  // The wait for the lookup of a host name before that has the same limit (see RedisDialer).
  absl::Duration connect_timeout = absl::Seconds(5);

  // The limit of the first attempt. It doubles after each attempt that it ended, up to
  // connect_timeout. Infinite: every attempt has connect_timeout.
  absl::Duration first_connect_timeout = absl::InfiniteDuration();

  // Limit of one attempt at a command, from its first byte sent to the last byte of its reply.
  absl::Duration command_timeout = absl::Seconds(10);

  // Limit of one method call, with all reconnects, repeats and pauses. Zero: a single attempt.
  // While the server is away, the limit counts from the first call that found it so: a call that
  // comes later has what is left of its limit, a second at least. So ten calls in a row do not wait
  // for a dead server ten times. A call that comes its limit after the last failure has all of it.
  absl::Duration total_timeout = absl::Seconds(30);

  // The pause before the n-th repeat is drawn evenly from [0, min(max, initial * 2^n)]. So the
  // clients of a server that comes back do not all call at the same moment.
  absl::Duration backoff_initial = absl::Milliseconds(10);
  absl::Duration backoff_max = absl::Seconds(1);

  // Limits of a reply. A larger one is treated as an attack or a fault.
  RedisWire::Limits limits;

  // Greets the server in RESP3 (HELLO 3), so that a subscribed client may still run commands. Needs
  // Redis 6 or newer: kFailedPrecondition when the server does not know HELLO.
  bool resp3 = false;

  // Shown by CLIENT LIST to the operator of the server. No blanks. Empty: no name.
  std::string client_name;
};

// The options of one call that differ from the connection's.
struct RedisCallOptions {
  // True: to apply the command twice has the same effect as to apply it once. Only such a command
  // is sent again when the connection breaks between sending and reply. Any other then fails with
  // kUnavailable, "may or may not have been applied".
  bool idempotent = false;

  // Replaces command_timeout, for commands that block in the server. Negative: command_timeout.
  absl::Duration command_timeout = absl::Seconds(-1);

  // Replaces total_timeout. Negative: total_timeout.
  absl::Duration total_timeout = absl::Seconds(-1);
};

// Sends commands to a Redis server, and decides when a failed attempt is repeated. The derived
// class makes each attempt: RedisConnection (one thread) or SharedRedisConnection (any number of
// threads).
//
// A call that finds the connection broken makes a new one and continues, within its deadline. It
// blocks its caller for at most total_timeout (zero: for one attempt). A server that answers
// READONLY or MASTERDOWN is a replica: the call leaves it, looks up the server's name at once and
// tries there.
//
// Errors, of every method that talks to the server:
//   kUnavailable         no connection for total_timeout (the message has the server, the time, the
//                        number of attempts and the last failure); or the connection broke after a
//                        command was sent that is not idempotent; or the server answered LOADING,
//                        BUSY, READONLY or the like for total_timeout.
//   kUnauthenticated     the server demands a password, or refuses this one. Not repeated.
//   kPermissionDenied    the server's rules for the user forbid the command (NOPERM).
//   kDeadlineExceeded    connected, but no reply within command_timeout or total_timeout. The
//                        command may have been applied.
//   kResourceExhausted   the server is out of memory (OOM) and refuses writes.
//   kNotFound            the server does not know the script of an EVALSHA. Eval() avoids this.
//   kFailedPrecondition  any other error reply, a script's error and NOPERM for EVAL among them.
//                        The message has the text of Redis.
//   kInternal            the received bytes are not the Redis protocol, or exceed the limits.
class RedisCaller {
 public:
  virtual ~RedisCaller() = default;
  RedisCaller(const RedisCaller&) = delete;
  RedisCaller& operator=(const RedisCaller&) = delete;

  // Sends one command and returns its reply, which is never of type kError. A nil reply is OK.
  absl::StatusOr<RedisReply> Command(const std::vector<std::string>& args,
                                     const RedisCallOptions& call = {});

  // Runs `script` by EVALSHA, or by EVAL with its source when the server does not know it yet.
  absl::StatusOr<RedisReply> Eval(const RedisScript& script, const std::vector<std::string>& keys,
                                  const std::vector<std::string>& args,
                                  const RedisCallOptions& call = {});

  // Sends all commands at once and returns their replies in order. If replies are errors, the
  // result is the first of them, although all commands were sent. For MULTI use Transaction(). For
  // commands that may fail one by one use RedisConnection::Send().
  absl::StatusOr<std::vector<RedisReply>> Pipeline(
      const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call = {});

  // Runs the commands as one transaction (MULTI, EXEC) in one round trip and returns their replies.
  // No client sees a part of it. A command that is refused before EXEC (no memory, no right,
  // loading) makes the server refuse all. The error of a single command is the result; it does not
  // undo the others.
  absl::StatusOr<std::vector<RedisReply>> Transaction(
      const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call = {});

  const RedisEndpoint& endpoint() const { return endpoint_; }
  const RedisConnectionOptions& options() const { return options_; }

 protected:
  struct Request {
    std::string bytes{};      // commands in wire form
    size_t replies = 0;       // number of their replies
    std::string what{};       // name for messages
    RedisCallOptions call{};  // Call() fills in the defaults
  };

  RedisCaller(const RedisEndpoint& endpoint, const RedisConnectionOptions& options)
      : endpoint_(endpoint), options_(options) {}

  // Makes one attempt: connects if necessary, sends the request and returns its replies, error
  // replies among them. Sets `sent` when the server may have received a part of it. After an error,
  // late replies to this request must not be given to another request.
  virtual absl::StatusOr<std::vector<RedisReply>> TryOnce(const Request& request,
                                                          absl::Time deadline, bool& sent) = 0;

  // Repeats TryOnce() until it returns replies, its error is final, or the time is over.
  absl::StatusOr<std::vector<RedisReply>> Call(Request request);

  RedisCallOptions WithDefaults(RedisCallOptions call) const;

 private:
  absl::Status FirstError(const std::vector<RedisReply>& replies) const;
  absl::Time DeadlineOf(const RedisCallOptions& call, absl::Time start);
  void NoteAttempt(absl::Time begun, const absl::Status& result);
  absl::Status GiveUp(const absl::Status& last, int attempts, absl::Time start);
  bool Pause(int attempt, absl::Time deadline) const;

  // Constant after construction.
  const RedisEndpoint endpoint_;
  const RedisConnectionOptions options_;
  const MonotonicClock clock_;

  Mutex mutex_;
  // The begin of the first attempt that has failed since the last reply.
  absl::Time away_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  absl::Time last_failure_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // its end
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_CALLER_H_
