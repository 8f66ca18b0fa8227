#ifndef DDP_STORE_SHARED_REDIS_CONNECTION_H_
#define DDP_STORE_SHARED_REDIS_CONNECTION_H_

#include <sys/types.h>

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
#include "base/unique_fd.h"
#include "store/redis_caller.h"
#include "store/redis_connection.h"
#include "store/redis_push_splitter.h"
#include "store/redis_reply.h"
#include "store/redis_reply_reader.h"

namespace ddp::store {

// One connection to a Redis server for all threads of a process, with waits that hold up no
// commands: however many threads call, and however many of them are blocked until something is
// published, the server has one client. It mends itself as RedisConnection does; the methods of
// RedisCaller and their errors are the same.
//
// How. The connection speaks RESP3, in which a subscribed client may go on with commands (Redis 6
// and newer). Requests are written as they come, one behind the other, and replies belong to them
// in this order. There is no thread of its own: of the threads that wait for something, one reads,
// hands out what comes, and leaves the reading to another when it has got its own. So one thread
// alone pays no more than on a connection of its own, and an idle process costs nothing.
//
// The price of sharing: when a request is unanswered for command_timeout the connection is given
// up, for all of its callers, by the next one whose own time ends; and Redis counts a client with a
// subscription as one that reads pushes, so it drops it when a single reply is larger than its
// client-output-buffer-limit for pubsub (32 MB as delivered).
//
// A server that answers READONLY or MASTERDOWN was demoted. The connection then begins no request
// any more, waits for the replies that are due, which are refusals too, and closes; waits for a
// push end with kUnavailable. The next request looks up the server's name and connects there.
//
// Thread-safe; nobody may be inside when it is destroyed. Raises no SIGPIPE; its descriptor is not
// inherited by programs that are started.
class SharedRedisConnection final : public RedisCaller {
 public:
  // Connects, trying again with pauses until total_timeout has passed.
  static absl::StatusOr<std::unique_ptr<SharedRedisConnection>> Connect(
      const RedisEndpoint& endpoint, const RedisConnectionOptions& options);
  ~SharedRedisConnection() override;

  using IsAnswer = std::function<bool(const RedisReply&)>;

  // Subscribes to `channel` and asks `question`, in this order, so that nothing published after the
  // question was answered is missed. Unless the reply is an answer, waits for a message on the
  // channel or for `deadline` (of MonotonicClock), asks once more and returns that reply, answer
  // or not. The subscription ends with the call. `is_answer` must not call this object.
  //
  // Is not repeated and makes no connection: kUnavailable where there is none, or when it breaks
  // meanwhile. kDeadlineExceeded: no reply to a question within command_timeout. After an error,
  // `asked` says whether the server may have got a question that it has not answered.
  absl::StatusOr<RedisReply> AskOnPush(const std::string& channel,
                                       const std::vector<std::string>& question,
                                       const IsAnswer& is_answer, absl::Time deadline, bool& asked);

 protected:
  absl::StatusOr<std::vector<RedisReply>> TryOnce(const Request& request, absl::Time deadline,
                                                  bool& sent) override;

 private:
  // A thread that waits. Lives on its stack; nobody else knows it once its wait is over.
  struct Waiter {
    CondVar wake;
    bool done = false;  // what it waits for has come, or never will
  };

  // A request, or a part of one, that the server has yet to answer.
  struct Exchange {
    enum class Kind {
      kRequest,
      kHello,      // refused: this server does not know RESP3
      kSubscribe,  // answered by a push, or by an error among the replies
      kUnsubscribe,
    };
    Kind kind = Kind::kRequest;
    std::string channel;  // of a subscription
    absl::Time sent_at;   // when its writing began
    size_t wanted = 1;    // replies
    std::vector<RedisReply> replies;
    absl::Status status;  // why there are not as many
    Waiter* waiter = nullptr;
  };

  // What threads are subscribed to.
  struct Channel {
    int subscribers = 0;
    int64_t messages = 0;
    std::list<Waiter*> waiters;  // for one more message
    absl::Status refusal;        // of the subscription
  };

  SharedRedisConnection(const RedisEndpoint& endpoint, const RedisConnectionOptions& options);

  // The connection.
  bool Usable() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return fd_.valid() && !broken_; }
  // Whether requests may be begun by it.
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

  // Writing: begun, then said what is to be answered, then written, by one thread at a time.
  absl::Status BeginWriting(absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Exchange> Expect(Exchange::Kind kind, const std::string& channel, size_t wanted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Write(const std::string& bytes, absl::Time deadline, bool& sent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WriteAll(const std::string& bytes, absl::Time deadline, bool& sent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Writes a request and waits for its replies.
  absl::StatusOr<std::vector<RedisReply>> Converse(Exchange& exchange, const std::string& bytes,
                                                   absl::Time deadline, bool& sent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Waiting, and reading meanwhile.
  absl::StatusOr<std::vector<RedisReply>> Await(Exchange& exchange, absl::Time deadline)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitDone(Waiter& waiter, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReadFor(const Waiter& waiter, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SeeWhetherOpen() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Received(const char* data, ssize_t count, int error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Dispatch(const char* data, size_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeReply(RedisReply reply) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakePush(const RedisReply& push) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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
  const std::unique_ptr<RedisConnection> dialer_;  // belongs to the thread that has set dialing_

  Mutex mutex_;
  CondVar changed_;  // any of the five below

  UniqueFd fd_ ABSL_GUARDED_BY(mutex_);  // closed only when nobody is reading or writing
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool dialing_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  // Why no request is begun any more and the connection is closed after the last one's replies; OK:
  // the server is a master, as far as it has said.
  absl::Status leaving_ ABSL_GUARDED_BY(mutex_);
  int conversing_ ABSL_GUARDED_BY(mutex_) = 0;   // threads in Converse()
  bool doubts_ ABSL_GUARDED_BY(mutex_) = false;  // look up the name for the next connection
  int64_t failed_dials_ ABSL_GUARDED_BY(mutex_) = 0;

  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;  // how many connections have broken
  absl::Status last_error_ ABSL_GUARDED_BY(mutex_);

  RedisPushSplitter splitter_ ABSL_GUARDED_BY(mutex_);
  RedisReplyReader replies_ ABSL_GUARDED_BY(mutex_);
  RedisReplyReader pushes_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Exchange>> exchanges_ ABSL_GUARDED_BY(mutex_);  // as they were sent
  std::map<std::string, Channel> channels_ ABSL_GUARDED_BY(mutex_);
  std::list<Waiter*> followers_ ABSL_GUARDED_BY(mutex_);  // wait while another thread reads
};

}  // namespace ddp::store

#endif  // DDP_STORE_SHARED_REDIS_CONNECTION_H_
