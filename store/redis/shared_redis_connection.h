#ifndef DDP_STORE_REDIS_SHARED_REDIS_CONNECTION_H_
#define DDP_STORE_REDIS_SHARED_REDIS_CONNECTION_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_socket.h"
#include "store/redis/wire/redis_reply.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::store {

// The connection to a Redis server that all threads of a process share. A thread that is blocked
// until a message is published delays no other thread's commands. So the server has one client,
// however many threads call or wait. The methods and errors are those of RedisCaller. A broken
// connection is replaced, as in RedisConnection.
//
// How. The connection speaks RESP3, in which a subscribed client may still run commands (Redis 6
// and newer). Requests are written one after another, and replies belong to them in this order.
// There is no extra thread: of the threads that wait, one reads and hands out all replies and
// messages. When its own reply has come, another waiting thread takes over the reading. So a single
// thread pays no more than on a connection of its own, and an idle process costs nothing.
//
// The price of sharing:
//   - When a request is unanswered for command_timeout, the next caller whose deadline expires
//     closes the connection. The requests of all other callers then end with kUnavailable or, if
//     idempotent, are repeated on a new connection.
//   - Redis treats a client with a subscription as a reader of pushes. It drops the client when a
//     single reply is larger than client-output-buffer-limit for pubsub (32 MB as delivered).
//
// Failover. A server that answers READONLY or MASTERDOWN was demoted. The connection then starts no
// new request, waits for the replies that are due, and closes. Waits for a push end with
// kUnavailable. The next request looks up the server's name and connects there.
//
// Thread-safe. No thread may be inside a method when the object is destroyed. Raises no SIGPIPE.
// Child programs do not inherit its descriptor.
class SharedRedisConnection final : public RedisCaller {
 public:
  // Connects. Repeats failed attempts, with pauses, until total_timeout has passed.
  static absl::StatusOr<std::unique_ptr<SharedRedisConnection>> Connect(
      const RedisEndpoint& endpoint, const RedisConnectionOptions& options);
  ~SharedRedisConnection() override;

  using IsAnswer = std::function<bool(const RedisReply&)>;

  // Subscribes to `channel` and then asks `question`, so a message published after the reply cannot
  // be missed. Returns the reply if `is_answer` accepts it. Otherwise blocks until a message on the
  // channel or until `deadline` (of MonotonicClock), asks once more, and returns that reply, answer
  // or not. The subscription ends with the call. `is_answer` must not call this object.
  //
  // The call is not repeated and makes no connection. kUnavailable: there is no connection, or it
  // broke during the call. kDeadlineExceeded: a question had no reply within command_timeout. After
  // an error, `asked` is true if the server may have received a question that it has not answered.
  absl::StatusOr<RedisReply> AskOnPush(const std::string& channel,
                                       const std::vector<std::string>& question,
                                       const IsAnswer& is_answer, absl::Time deadline, bool& asked);

 protected:
  absl::StatusOr<std::vector<RedisReply>> TryOnce(const Request& request, absl::Time deadline,
                                                  bool& sent) override;

 private:
  // A waiting thread. The object lives on its stack; no other thread uses it after the wait.
  struct Waiter {
    CondVar wake;
    bool done = false;  // the wait is over, successful or not
  };

  // A request, or a part of one, for which the server still owes a reply.
  struct Exchange {
    enum class Kind {
      kRequest,
      kHello,      // an error reply means that the server does not know RESP3
      kSubscribe,  // confirmed by a push, or refused by an error among the replies
      kUnsubscribe,
    };
    Kind kind = Kind::kRequest;
    std::string channel;  // of a subscription
    absl::Time sent_at;   // when its writing started
    size_t wanted = 1;    // number of replies
    std::vector<RedisReply> replies;
    absl::Status status;  // why there are fewer replies
    Waiter* waiter = nullptr;
  };

  // A channel to which threads are subscribed.
  struct Channel {
    int subscribers = 0;
    int64_t messages = 0;
    std::list<Waiter*> waiters;  // for the next message
    absl::Status refusal;        // of the subscription
  };

  SharedRedisConnection(const RedisEndpoint& endpoint, const RedisConnectionOptions& options);

  // The connection.
  bool Usable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return socket_.valid() && !broken_; }
  // Returns true when a new request may start.
  bool TakesRequests() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return Usable() && leaving_.ok();
  }
  absl::Status Ensure(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Dial(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveReplica(const std::string& refusal) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Break(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CloseIfUnused() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WaitForChange(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Silence() const;
  bool HasBeenSilentSince(absl::Time start) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Writing, by one thread at a time: BeginWriting(), Expect() for each due reply, Write().
  absl::Status BeginWriting(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Exchange> Expect(Exchange::Kind kind, const std::string& channel, size_t wanted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Write(const std::string& bytes, absl::Time deadline, bool& sent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WriteAll(const std::string& bytes, absl::Time deadline, bool& sent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Writes a request and blocks until its replies have come.
  absl::StatusOr<std::vector<RedisReply>> Converse(Exchange& exchange, const std::string& bytes,
                                                   absl::Time deadline, bool& sent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Waiting, and reading meanwhile.
  absl::StatusOr<std::vector<RedisReply>> Await(Exchange& exchange, absl::Time deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitDone(Waiter& waiter, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadFor(const Waiter& waiter, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SeeWhetherOpen() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Received(const char* data, const absl::StatusOr<size_t>& count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Dispatch(const char* data, size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeReply(RedisReply reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakePush(const RedisPush& push) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Finish(Waiter* waiter);

  // Subscriptions.
  absl::StatusOr<RedisReply> Ask(const std::vector<std::string>& question,
                                 const std::string& before, bool& asked)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Join(const std::string& channel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Leave(const std::string& channel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AwaitMessage(const std::string& channel, int64_t seen, absl::Time deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const MonotonicClock clock_;
  // Knows where the server is, and makes connections to it. The thread that set dialing_ uses it
  // without mutex_. While dialing_ is false, the holder of mutex_ uses it.
  const std::unique_ptr<RedisConnection> dialer_;

  Mutex mutex_;
  CondVar changed_;  // notified at the end of a dial or a write, and when socket_ is closed

  // Closed only when no thread reads or writes.
  RedisSocket socket_ ABSL_GUARDED_BY(mutex_);
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool dialing_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  // The refusal of a demoted server. No new request starts, and the connection closes after the
  // last reply that is due. OK: no reply has shown that the server is a replica.
  absl::Status leaving_ ABSL_GUARDED_BY(mutex_);
  int conversing_ ABSL_GUARDED_BY(mutex_) = 0;  // threads in Converse()
  int64_t failed_dials_ ABSL_GUARDED_BY(mutex_) = 0;

  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;  // number of connections that have broken
  absl::Status last_error_ ABSL_GUARDED_BY(mutex_);

  RedisWire wire_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Exchange>> exchanges_ ABSL_GUARDED_BY(mutex_);  // in send order
  std::map<std::string, Channel> channels_ ABSL_GUARDED_BY(mutex_);
  std::list<Waiter*> followers_ ABSL_GUARDED_BY(mutex_);  // waiting while another thread reads
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_SHARED_REDIS_CONNECTION_H_
