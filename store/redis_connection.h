#ifndef DDP_STORE_REDIS_CONNECTION_H_
#define DDP_STORE_REDIS_CONNECTION_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "store/redis_caller.h"
#include "store/redis_endpoint.h"
#include "store/redis_push_splitter.h"
#include "store/redis_reply.h"
#include "store/redis_reply_reader.h"

namespace ddp::store {

// A connection to one Redis server that mends itself: a call finds a broken connection, makes a new
// one and goes on, within its deadline.
//
// Threads: not thread-safe; one thread at a time. Blocks its caller, at most for total_timeout per
// call. Raises no SIGPIPE; its descriptor is not inherited by programs that are started.
//
// The commands and the errors are RedisCaller's. kDeadlineExceeded: the connection is dropped. A
// call that a replica refuses (READONLY: the master was demoted) drops it too and looks up the
// name.
class RedisConnection final : public RedisCaller {
 public:
  using Options = RedisConnectionOptions;

  // Connects, trying again with pauses until total_timeout has passed.
  static absl::StatusOr<std::unique_ptr<RedisConnection>> Connect(const RedisEndpoint& endpoint,
                                                                  const Options& options = {});
  ~RedisConnection() override;

  // One that connects with its first call.
  static std::unique_ptr<RedisConnection> Unconnected(const RedisEndpoint& endpoint,
                                                      const Options& options);

  // The lower level, for subscriptions and event loops. -------------------------------------------

  // Sends commands without waiting for replies. Never reconnects and never repeats: kUnavailable
  // when not connected or when the connection breaks. After Send, the caller must Receive every
  // reply before calling Command, Eval or Pipeline again; a connection that is out of step is
  // dropped with Disconnect().
  absl::Status Send(const std::vector<std::vector<std::string>>& commands);

  // The next reply or, in RESP2, pushed message (with Options::resp3 such are dropped), error
  // replies included, when it has come in full by `timeout` (zero: only what can be had without
  // waiting). kDeadlineExceeded: not yet; nothing is lost and the connection stays usable.
  // kUnavailable: the connection broke, and is closed now.
  absl::StatusOr<RedisReply> Receive(absl::Duration timeout);

  // Readable when Receive() may have something; -1 while not connected. It changes on a reconnect.
  // Before waiting on it, Receive(0) until kDeadlineExceeded: replies may have been read already.
  int fd() const { return fd_.get(); }

  bool connected() const { return fd_.valid(); }

  // Makes a connection where there is none, as Connect does.
  absl::Status Reconnect(const RedisCallOptions& call = {});

  // Closes the connection; the next call of Command, Eval or Pipeline makes a new one.
  void Disconnect();

  // Hands over the socket, for whoever goes on with it himself; none while not connected. Its
  // recv() blocks for at most 100 ms, unless it is told MSG_DONTWAIT. Not while replies are due.
  UniqueFd Release();

  // The server at the known address is not the master: the next attempt to connect looks up the
  // host's name, whenever that was looked up last.
  void Doubt() { name_due_ = absl::InfinitePast(); }

  // For whoever speaks to the server himself: makes one attempt, by `deadline`, to connect and to
  // be greeted (AUTH, SELECT, PING; with Options::resp3, HELLO), and hands over the socket, as
  // Release() does. What this object is connected to is closed.
  absl::StatusOr<UniqueFd> Dial(absl::Time deadline);

 protected:
  absl::StatusOr<std::vector<RedisReply>> TryOnce(const Request& request, absl::Time deadline,
                                                  bool& sent) override;

 private:
  RedisConnection(const RedisEndpoint& endpoint, const Options& options);

  absl::StatusOr<std::vector<RedisReply>> Exchange(const Request& request, absl::Time deadline,
                                                   bool& sent);
  absl::StatusOr<UniqueFd> ConnectAgain(absl::Time deadline);
  absl::Status MakeConnection(absl::Time deadline);
  absl::Status Greet(absl::Time deadline);
  absl::Status Write(const std::string& bytes, absl::Time deadline, bool& sent);
  absl::Status Read(absl::Time deadline, RedisReply& reply);
  absl::Status ReceiveBytes(bool may_block);
  bool StillOpen() const;

  const MonotonicClock clock_;

  std::string known_address_;  // that the server had last; empty: none yet, or a unix socket
  absl::Time name_due_ = absl::InfiniteFuture();  // when its name is to be asked for again

  UniqueFd fd_;
  RedisPushSplitter splitter_;  // with Options::resp3
  RedisReplyReader reader_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_CONNECTION_H_
