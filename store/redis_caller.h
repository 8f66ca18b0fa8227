#ifndef DDP_STORE_REDIS_CALLER_H_
#define DDP_STORE_REDIS_CALLER_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "store/redis_endpoint.h"
#include "store/redis_reply.h"
#include "store/redis_reply_reader.h"
#include "store/redis_script.h"

namespace ddp::store {

// How long a connection tries, and what it accepts.
struct RedisConnectionOptions {
  // One attempt to connect: socket, AUTH, SELECT, PING and HELLO together. (Resolving a host name
  // is the one step that this cannot cut short; a server that was reached once is looked for at the
  // address that it had, and by its name only once in half a minute; after a replica's refusal at
  // once.)
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

  // Greets the server in RESP3 (HELLO 3), so that what subscribes may run commands as well. Needs
  // Redis 6 or newer: one that does not know HELLO is kFailedPrecondition.
  bool resp3 = false;

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

// The wire form of commands, one after the other: each is an array of byte strings.
std::string RedisWireForm(const std::vector<std::vector<std::string>>& commands);

// What the connections to a Redis server have in common: the commands, and when a call is made
// again. How one attempt is made is the business of the derived class, RedisConnection (one thread)
// or SharedRedisConnection (any number of them).
//
// A call finds a broken connection, makes a new one and goes on, within its deadline. It blocks its
// caller, at most for total_timeout. A server that answers READONLY or MASTERDOWN is a replica: the
// call leaves it, looks up the server's name at once and tries there.
//
// Errors, of every method that talks to the server:
//   kUnavailable         no connection for total_timeout (the message says where, for how long, how
//                        often it was tried and what failed last); or the connection broke after a
//                        command was sent that is not idempotent; or the server answers LOADING,
//                        BUSY, READONLY or the like for as long.
//   kUnauthenticated     the server wants a password, or does not accept this one. Not repeated.
//   kPermissionDenied    the server's rules for our user forbid the command (NOPERM).
//   kDeadlineExceeded    connected, but no reply within command_timeout or total_timeout. The
//                        command may have been applied.
//   kResourceExhausted   the server is out of memory (OOM) and refuses writes.
//   kFailedPrecondition  any other error reply, a script's error among them: the text of Redis.
//   kInternal            what came is not the Redis protocol, or exceeds the limits.
class RedisCaller {
 public:
  virtual ~RedisCaller() = default;
  RedisCaller(const RedisCaller&) = delete;
  RedisCaller& operator=(const RedisCaller&) = delete;

  // Sends one command and returns its reply, which is never of type kError. A nil reply is OK.
  absl::StatusOr<RedisReply> Command(const std::vector<std::string>& args,
                                     const RedisCallOptions& call = {});

  // Runs `script` (EVALSHA; with its source when the server does not know it yet).
  absl::StatusOr<RedisReply> Eval(const RedisScript& script, const std::vector<std::string>& keys,
                                  const std::vector<std::string>& args,
                                  const RedisCallOptions& call = {});

  // Sends all commands in one go and returns their replies in order. When one of them is answered
  // by an error, the result is that error (of the first such one), although all were sent: for
  // MULTI or for commands of which each may fail by itself, use RedisConnection::Send.
  absl::StatusOr<std::vector<RedisReply>> Pipeline(
      const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call = {});

  // Runs the commands as one transaction (MULTI, EXEC) in one round trip and returns their replies:
  // nobody sees a part of it, and what is refused before EXEC (no memory, no right, loading) is
  // refused as a whole. An error of a single command does not undo the others, and is the result.
  absl::StatusOr<std::vector<RedisReply>> Transaction(
      const std::vector<std::vector<std::string>>& commands, const RedisCallOptions& call = {});

  const RedisEndpoint& endpoint() const { return endpoint_; }
  const RedisConnectionOptions& options() const { return options_; }

 protected:
  struct Request {
    std::string bytes{};      // commands in wire form
    size_t replies = 0;       // how many they bring
    std::string what{};       // names them in messages
    RedisCallOptions call{};  // nothing left to the defaults, once Call has it
  };

  RedisCaller(const RedisEndpoint& endpoint, const RedisConnectionOptions& options)
      : endpoint_(endpoint), options_(options) {}

  // Connects if need be, sends the request and returns its replies, error replies among them.
  // `sent`: whether the server may have got any of it. After an error, what still comes for this
  // request must not be taken for another's.
  virtual absl::StatusOr<std::vector<RedisReply>> TryOnce(const Request& request,
                                                          absl::Time deadline, bool& sent) = 0;

  // Tries until there are replies, or the reason why there are none is final.
  absl::StatusOr<std::vector<RedisReply>> Call(Request request);

  RedisCallOptions WithDefaults(RedisCallOptions call) const;

 private:
  absl::Status FirstError(const std::vector<RedisReply>& replies) const;
  bool Pause(int attempt, absl::Time deadline) const;

  // Constant after construction.
  const RedisEndpoint endpoint_;
  const RedisConnectionOptions options_;
  const MonotonicClock clock_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_CALLER_H_
