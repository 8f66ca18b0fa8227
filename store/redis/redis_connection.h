#ifndef DDP_STORE_REDIS_REDIS_CONNECTION_H_
#define DDP_STORE_REDIS_REDIS_CONNECTION_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_dialer.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_socket.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::store {

// A connection to one Redis server. Command(), Eval(), Pipeline() and Transaction() reconnect when
// the connection is broken. RedisCaller says when they send a command again, and lists the errors.
//
// Not thread-safe: one thread at a time. These four block for at most total_timeout (zero: for one
// attempt). Raises no SIGPIPE. Child programs do not inherit the descriptor.
//
// A failed attempt closes the connection. Only Receive() keeps it open after kDeadlineExceeded. In
// a call of these four, the refusal of a replica (READONLY, MASTERDOWN: the master is elsewhere)
// closes the connection too. The next attempt then looks up the server's name.
class RedisConnection final : public RedisCaller {
 public:
  using Options = RedisConnectionOptions;

  // Connects. Repeats failed attempts, with pauses, until total_timeout has passed.
  static absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const RedisEndpoint& endpoint,
                                                                  const Options& options = {});
  ~RedisConnection() override;

  // Returns a connection that connects in its first call.
  static std::unique_ptr<RedisConnection> Unconnected(const RedisEndpoint& endpoint,
                                                      const Options& options);

  // The lower level, for subscriptions and event loops. -------------------------------------------

  // Sends commands without waiting for replies. Never reconnects and never repeats. kUnavailable:
  // not connected, or the connection broke. After Send, the caller must Receive every reply before
  // it calls Command, Eval or Pipeline again. To abandon a reply that is due, call
  // Disconnect().
  absl::Status Send(const std::vector<std::vector<std::string>>& commands);

  // Returns the next reply, error replies included. In RESP2 also returns pushed messages; with
  // Options::resp3 these are dropped. Blocks until the reply is complete, for at most `timeout`
  // (zero: does not block). kDeadlineExceeded: the reply is not complete; nothing is lost and the
  // connection stays usable. kUnavailable: not connected, or the connection broke and is closed
  // now.
  absl::StatusOr<RedisReply> Receive(absl::Duration timeout);

  // Returns a descriptor that is readable when Receive() may have a reply; -1 while not connected.
  // A reconnect changes it. Before waiting on it, call Receive with a zero timeout until
  // kDeadlineExceeded: replies may have been read already.
  int fd() const { return socket_.fd(); }

  bool connected() const { return socket_.valid(); }

  // Connects, as Connect() does, if there is no connection.
  absl::Status Reconnect(const RedisCallOptions& call = {});

  // Closes the connection. The next call of Command, Eval or Pipeline makes a new one.
  void Disconnect();

  // Returns the socket, for a caller that uses it itself; an invalid one while not connected. Its
  // Receive(kMayBlock) blocks for at most 100 ms. Do not call Release() while replies are due.
  RedisSocket Release();

  // As RedisDialer::Doubt().
  void Doubt() { dialer_.Doubt(); }

  // For a caller that speaks to the server itself. Closes this object's connection. Makes one
  // attempt, by `deadline`, to connect and greet (AUTH, SELECT, PING; with Options::resp3, HELLO),
  // and returns the socket, as Release() does.
  absl::StatusOr<RedisSocket> Dial(absl::Time deadline);

 protected:
  absl::StatusOr<std::vector<RedisReply>> TryOnce(const Request& request, absl::Time deadline,
                                                  bool& sent) override;

 private:
  RedisConnection(const RedisEndpoint& endpoint, const Options& options);

  absl::StatusOr<std::vector<RedisReply>> Exchange(const Request& request, absl::Time deadline,
                                                   bool& sent);
  absl::Status Write(const std::string& bytes, absl::Time deadline, bool& sent);
  absl::Status Read(absl::Time deadline, RedisReply& reply);
  absl::Status ReceiveBytes(bool may_block);
  bool StillOpen();

  const MonotonicClock clock_;

  RedisDialer dialer_;
  RedisSocket socket_;
  RedisWire wire_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_CONNECTION_H_
