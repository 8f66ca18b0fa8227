// What RedisStore does, without LibTorch: a key-value store in Redis whose waits are woken.
//
// How the data lies. All values of one store are the fields of one Redis hash, `<prefix>values`;
// each queue is a list of its own, `<prefix>queue:<key>`. Therefore
//   - the number of keys is HLEN, O(1), and listing them touches this store only (HSCAN in pieces):
//     never KEYS or a scan of what others keep in the same server;
//   - many values are one HMGET (of 1,024 at most);
//   - one time-to-live covers all values, so a store cannot lose half of them: it is renewed by
//     every write and, at most once per 1% of it, by reads. (A queue's is renewed by each push.)
// The price: appending to a value costs its whole length in the server each time.
//
// How a wait is woken. Every script or transaction that creates or changes a key publishes on the
// key's channel, `<prefix>changed:<key>`, in the same atomic step. (A transaction where no decision
// is needed: it costs the server a fifth of a script.) A waiter asks once; when the key is missing
// it subscribes and asks again, in one round trip, so between the subscription and the question
// nothing can slip through. Then it sleeps and costs the server nothing until the push.
// When many keys are missing it subscribes to one of them, chosen at random, and asks again for the
// rest when that one has come: an expected log2(n) rounds for n keys that come in any order, where
// one subscription per key would cost n^2 messages for n clients that wait for each other.
// Publish/subscribe delivers at most once, yet nothing is lost: a subscription lives and dies with
// its connection, and whoever finds its connection broken asks again on a new one. A peer that
// vanished without a word is found by TCP keepalive. (Why not a blocking list per waiter: the
// waiter would have to be written down in the server, found by every write, and cleaned up after a
// waiter that died.)
//
// Connections. A store has one, for all threads that use it and all their waits (see
// shared_redis_connection.h): another thread's `Set` never stands behind a blocked `Wait`. It
// speaks RESP3: Redis 6 or newer.
//
// Sizes. This is a place for addresses, numbers and short texts. While a wait is blocked, Redis
// drops a client that is sent more than 32 MB at once (client-output-buffer-limit pubsub), so a
// single value should stay below 16 MB; many values are fetched in pieces.
//
// What a Redis user needs for this: keys ~<prefix>*, channels &<prefix>*, and the commands hget
// hmget hset hdel hlen hexists hscan hincrby exists lpop llen rpush pexpire publish subscribe
// unsubscribe multi exec eval evalsha ping select.
#ifndef DDP_STORE_REDIS_KEY_VALUE_STORE_H_
#define DDP_STORE_REDIS_KEY_VALUE_STORE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "store/redis_caller.h"
#include "store/redis_endpoint.h"
#include "store/redis_reply.h"
#include "store/redis_script.h"
#include "store/shared_redis_connection.h"

namespace ddp::store {

// A shared map from keys to byte strings, and queues of byte strings beside it. Keys and values may
// hold any bytes. Values and queues have separate names: a value "a" and a queue "a" do not meet,
// except that Wait and Check take either for present.
//
// Thread-safe: any number of threads may call any method at the same time.
//
// Every method has a `timeout`, within which it also survives the loss of the server, by connecting
// again. Errors are those of RedisCaller, and where a method waits for a key:
//   kDeadlineExceeded   the key did not come; the message names what is missing and for how long it
//                       was waited for.
// An operation that may have been applied when the connection broke (Add, CompareSet, Append,
// Delete, queue operations) is not repeated: kUnavailable. The others are.
class RedisKeyValueStore {
 public:
  struct Options {
    // How long the store's keys outlive the last use of the store.
    absl::Duration key_ttl = absl::Hours(24 * 7);
    // total_timeout is used for the first connect alone; afterwards each method's `timeout` rules.
    RedisConnectionOptions connection;
  };

  // Connects. Errors as SharedRedisConnection::Connect; kInvalidArgument: the prefix is empty.
  static absl::StatusOr<std::unique_ptr<RedisKeyValueStore>> Connect(const StoreAddress& address,
                                                                     const Options& options);
  ~RedisKeyValueStore();
  RedisKeyValueStore(const RedisKeyValueStore&) = delete;
  RedisKeyValueStore& operator=(const RedisKeyValueStore&) = delete;

  absl::Status Set(const std::string& key, const std::string& value, absl::Duration timeout);

  // Waits until the key has a value.
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout);

  // Sets the key to `desired` when its value is `expected`, or when it has none and `expected` is
  // empty. Returns the value the key has now; when it has none, `expected`.
  absl::StatusOr<std::string> CompareSet(const std::string& key, const std::string& expected,
                                         const std::string& desired, absl::Duration timeout);

  // Adds to a decimal number; a missing key counts as 0. Returns the sum. kFailedPrecondition: the
  // value is not a 64-bit decimal number, or the sum does not fit.
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t value, absl::Duration timeout);

  // Removes the key's value. Returns whether there was one.
  absl::StatusOr<bool> Delete(const std::string& key, absl::Duration timeout);

  // Whether all keys are present, now.
  absl::StatusOr<bool> Check(const std::vector<std::string>& keys, absl::Duration timeout);

  // Waits until all keys are present at one moment.
  absl::Status Wait(const std::vector<std::string>& keys, absl::Duration timeout);

  // Puts `value` behind what the key has; a missing key counts as empty.
  absl::Status Append(const std::string& key, const std::string& value, absl::Duration timeout);

  // Waits for the keys that have no value yet, and returns all values in the order of `keys`, each
  // as it was at some moment during the call: one HMGET when all are there.
  absl::StatusOr<std::vector<std::string>> MultiGet(const std::vector<std::string>& keys,
                                                    absl::Duration timeout);

  // Sets all, or in case of an error none. kInvalidArgument: the lists differ in length.
  absl::Status MultiSet(const std::vector<std::string>& keys,
                        const std::vector<std::string>& values, absl::Duration timeout);

  absl::Status QueuePush(const std::string& key, const std::string& value, absl::Duration timeout);

  // Takes the oldest element of the queue; waits until there is one.
  absl::StatusOr<std::string> QueuePop(const std::string& key, absl::Duration timeout);

  // As QueuePop, but nullopt at once when the queue is empty.
  absl::StatusOr<std::optional<std::string>> QueueTryPop(const std::string& key,
                                                         absl::Duration timeout);

  absl::StatusOr<int64_t> QueueLength(const std::string& key, absl::Duration timeout);

  // The number of keys with a value.
  absl::StatusOr<int64_t> NumKeys(absl::Duration timeout);

  // The keys with a value, sorted. A key that is set or removed meanwhile may or may not be listed.
  absl::StatusOr<std::vector<std::string>> ListKeys(absl::Duration timeout);

  // Renews the time-to-live of the values now; for a store that may be idle for longer than
  // key_ttl.
  absl::Status RefreshTtl(absl::Duration timeout);

  const StoreAddress& address() const { return address_; }
  const Options& options() const { return options_; }

 private:
  using Question = std::vector<std::string>;  // a command that asks for something to come
  using IsAnswer = std::function<bool(const RedisReply&)>;  // has it come?

  RedisKeyValueStore(const StoreAddress& address, const Options& options,
                     std::unique_ptr<SharedRedisConnection> connection);

  std::string QueueKey(const std::string& key) const;
  std::string Channel(const std::string& key) const;
  std::string Ttl() const;
  absl::Time DeadlineOf(absl::Duration timeout) const;
  RedisCallOptions CallOptions(bool idempotent, absl::Time deadline) const;

  // Before each operation, since it may be the first for long.
  absl::Status RenewWhenDue(absl::Time deadline);

  absl::StatusOr<RedisReply> Run(const std::vector<std::string>& command, bool idempotent,
                                 absl::Time deadline);
  // Changes what belongs to `key` by one command, renews the time-to-live of the Redis key, which
  // is the command's second word, and wakes the waiters. Returns the command's reply.
  absl::StatusOr<RedisReply> Change(const std::string& key, const std::vector<std::string>& command,
                                    bool idempotent, absl::Time deadline);
  // The same by a script over the values, with the arguments time-to-live, channels, `args`.
  absl::StatusOr<RedisReply> ChangeByScript(const RedisScript& script,
                                            const std::vector<std::string>& args, bool idempotent,
                                            absl::Time deadline);

  Question WhichValues(const std::vector<std::string>& keys,
                       const std::vector<size_t>& places) const;
  // For missing_keys.lua.
  std::vector<std::string> KeysOfWait(const std::vector<std::string>& keys) const;
  Question WhichAreMissing(const std::vector<std::string>& keys) const;
  size_t Draw(size_t count);
  absl::Status AwaitNarrowing(std::vector<std::string> missing, absl::Time start,
                              absl::Time deadline);
  absl::StatusOr<RedisReply> AwaitOne(const std::string& key, const Question& question,
                                      bool idempotent, absl::Time deadline);
  absl::Status AwaitValues(const std::vector<std::string>& keys, std::vector<size_t> missing,
                           absl::Time start, absl::Time deadline, std::vector<std::string>& values);
  absl::Status TimedOut(const std::vector<std::string>& missing, absl::Time start) const;

  // Constant after construction.
  const StoreAddress address_;
  const Options options_;
  const std::string values_key_;
  const std::string channels_;             // what the name of each key's channel begins with
  const absl::Duration renewal_interval_;  // of the time-to-live
  const MonotonicClock clock_;
  const std::unique_ptr<SharedRedisConnection> connection_;

  Mutex mutex_;
  absl::Time renewed_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
};

// All scripts that a RedisKeyValueStore runs, for a server whose clients may not send any.
std::vector<RedisScript> KeyValueScripts();

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_KEY_VALUE_STORE_H_
