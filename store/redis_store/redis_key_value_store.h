// A key-value store in Redis with blocking waits: RedisStore without LibTorch.
//
// Layout. All values of one store are the fields of one Redis hash, `<prefix>values`. Each queue is
// a Redis list, `<prefix>queue:<key>`. Consequences:
//   - The number of keys is HLEN, O(1). Listing the keys reads this store only (HSCAN in pieces),
//     never KEYS or a scan of other data in the same server.
//   - Many values are one HMGET (of 1,024 at most).
//   - One time-to-live covers all values, so a store cannot lose half of them. Every operation that
//     sets a value renews it; the others renew it at most once per 1% of it. (Each queue has its
//     own time-to-live, which each push renews.)
//   - The cost: an append makes the server copy the whole value each time.
//
// Waking. Every script or transaction that creates or changes a key publishes on the key's channel,
// `<prefix>changed:<key>`, in the same atomic step. (A change that a single Redis command can make
// is a transaction, which costs the server a fifth of a script.) A waiter first asks for the key.
// If the key is missing, the waiter subscribes and asks again, in one round trip, so it cannot miss
// a change between the two. Then the waiter sleeps until the push and costs the server nothing.
//
// When many keys are missing, the waiter subscribes to one of them, chosen at random. When that key
// has appeared, the waiter asks again for the rest: an expected log2(n) rounds for n keys that
// appear in any order. One subscription per key would cost n^2 messages for n clients that wait for
// each other.
//
// Publish/subscribe delivers at most once, yet no change is lost: a subscription ends with its
// connection, and a waiter whose connection is broken asks again on a new one. TCP keepalive
// detects a server that vanished silently. (A blocking list per waiter was rejected: the server
// would have to record each waiter, every write would have to find the record, and dead waiters
// would have to be cleaned up.)
//
// Connections. A store has one connection for all its threads and all their waits (see
// shared_redis_connection.h): a thread's `Set` never waits behind another's blocked `Wait`. The
// connection speaks RESP3: Redis 6 or newer.
//
// Sizes. The store is made for addresses, numbers and short texts. While a wait is blocked, Redis
// drops a client to which it sends more than 32 MB at once (client-output-buffer-limit pubsub). So
// a single value should stay below 16 MB; many values are fetched in pieces.
//
// Rights. The Redis user needs keys ~<prefix>* and channels &<prefix>*. The commands are hget hmget
// hset hdel hlen hexists hscan hincrby exists lpop llen rpush pexpire publish subscribe unsubscribe
// multi exec eval evalsha ping select.
#ifndef DDP_STORE_REDIS_STORE_REDIS_KEY_VALUE_STORE_H_
#define DDP_STORE_REDIS_STORE_REDIS_KEY_VALUE_STORE_H_

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
#include "store/redis/redis_caller.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_script.h"
#include "store/redis/shared_redis_connection.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::store {

// A shared map from keys to byte strings, and queues of byte strings beside it. Keys and values may
// hold any bytes. Values and queues have separate names: a value "a" and a queue "a" are
// independent, except that Wait and Check count either as present.
//
// Thread-safe: any number of threads may call any method at the same time.
//
// Every method has a `timeout`, and reconnects to a lost server within it. (Each command has at
// least 1 s for its reply, so a method may overrun a short `timeout`.) Errors are those of
// RedisCaller. A method that waits for a key also has:
//   kDeadlineExceeded   the key did not appear; the message names the missing keys and how long the
//                       method waited.
// Add, CompareSet, Append, Delete, pushes and pops are not repeated when the connection broke and
// they may have been applied: kUnavailable. All other operations are repeated.
class RedisKeyValueStore {
 public:
  struct Options {
    // Time for which the store's keys outlive the last use of the store.
    absl::Duration key_ttl = absl::Hours(24 * 7);
    // total_timeout applies to the first connect only; later each method's `timeout` applies.
    RedisConnectionOptions connection;
  };

  // Connects. Errors: those of SharedRedisConnection::Connect; kInvalidArgument: the prefix is
  // empty.
  static absl::StatusOr<std::unique_ptr<RedisKeyValueStore>> Connect(const StoreAddress& address,
                                                                     const Options& options);
  ~RedisKeyValueStore();
  RedisKeyValueStore(const RedisKeyValueStore&) = delete;
  RedisKeyValueStore& operator=(const RedisKeyValueStore&) = delete;

  absl::Status Set(const std::string& key, const std::string& value, absl::Duration timeout);

  // Blocks until the key has a value, and returns the value.
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout);

  // Sets the key to `desired` when its value is `expected`, or when it has no value and `expected`
  // is empty. Returns the key's value after the call, or `expected` when it has none.
  absl::StatusOr<std::string> CompareSet(const std::string& key, const std::string& expected,
                                         const std::string& desired, absl::Duration timeout);

  // Adds `value` to the key's decimal number; a missing key counts as 0. Returns the sum.
  // kFailedPrecondition: the key's value is not a 64-bit decimal number, or the sum does not fit.
  absl::StatusOr<int64_t> Add(const std::string& key, int64_t value, absl::Duration timeout);

  // Removes the key's value. Returns true when there was a value.
  absl::StatusOr<bool> Delete(const std::string& key, absl::Duration timeout);

  // Returns true when all keys are present now.
  absl::StatusOr<bool> Check(const std::vector<std::string>& keys, absl::Duration timeout);

  // Blocks until all keys are present at one moment.
  absl::Status Wait(const std::vector<std::string>& keys, absl::Duration timeout);

  // Appends `value` to the key's value; a missing key counts as empty.
  absl::Status Append(const std::string& key, const std::string& value, absl::Duration timeout);

  // Blocks until every key has a value. Returns the values in the order of `keys`, each as it was
  // at some moment during the call: one HMGET per 1,024 keys when all are present.
  absl::StatusOr<std::vector<std::string>> MultiGet(const std::vector<std::string>& keys,
                                                    absl::Duration timeout);

  // Sets all keys or none of them. kInvalidArgument: the lists differ in length.
  absl::Status MultiSet(const std::vector<std::string>& keys,
                        const std::vector<std::string>& values, absl::Duration timeout);

  absl::Status QueuePush(const std::string& key, const std::string& value, absl::Duration timeout);

  // Takes the oldest element of the queue. Blocks until there is one.
  absl::StatusOr<std::string> QueuePop(const std::string& key, absl::Duration timeout);

  // Takes the oldest element of the queue. Returns nullopt at once when the queue is empty.
  absl::StatusOr<std::optional<std::string>> QueueTryPop(const std::string& key,
                                                         absl::Duration timeout);

  absl::StatusOr<int64_t> QueueLength(const std::string& key, absl::Duration timeout);

  // Returns the number of keys with a value.
  absl::StatusOr<int64_t> NumKeys(absl::Duration timeout);

  // Returns the keys with a value, sorted. A key that is set or removed during the call may or may
  // not be listed.
  absl::StatusOr<std::vector<std::string>> ListKeys(absl::Duration timeout);

  // Renews the time-to-live of the values now. For a store that may be unused for longer than
  // key_ttl.
  absl::Status RefreshTtl(absl::Duration timeout);

  const StoreAddress& address() const { return address_; }
  const Options& options() const { return options_; }

 private:
  using Question = std::vector<std::string>;  // a Redis command that asks whether a wait is over
  using IsAnswer = std::function<bool(const RedisReply&)>;  // true: the reply ends the wait

  RedisKeyValueStore(const StoreAddress& address, const Options& options,
                     std::unique_ptr<SharedRedisConnection> connection);

  std::string QueueKey(const std::string& key) const;
  std::string Channel(const std::string& key) const;
  std::string Ttl() const;
  absl::Time DeadlineOf(absl::Duration timeout) const;
  RedisCallOptions CallOptions(bool idempotent, absl::Time deadline) const;

  // Renews the values' time-to-live when renewal_interval_ has passed. Runs before each operation.
  absl::Status RenewWhenDue(absl::Time deadline);

  absl::StatusOr<RedisReply> Run(const std::vector<std::string>& command, bool idempotent,
                                 absl::Time deadline);
  // Runs one command that changes the value or the queue of `key`, and wakes the waiters. Renews
  // the time-to-live of the Redis key, which is the command's second word. Returns the command's
  // reply.
  absl::StatusOr<RedisReply> Change(const std::string& key, const std::vector<std::string>& command,
                                    bool idempotent, absl::Time deadline);
  // As Change(), by a script over the values. Its arguments: time-to-live, channels, `args`.
  absl::StatusOr<RedisReply> ChangeByScript(const RedisScript& script,
                                            const std::vector<std::string>& args, bool idempotent,
                                            absl::Time deadline);

  Question WhichValues(const std::vector<std::string>& keys,
                       const std::vector<size_t>& places) const;
  // Returns KEYS for missing_keys.lua.
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
  const std::string channels_;             // prefix of the name of each key's channel
  const absl::Duration renewal_interval_;  // between renewals of the time-to-live
  const MonotonicClock clock_;
  const std::unique_ptr<SharedRedisConnection> connection_;

  Mutex mutex_;
  absl::Time renewed_ ABSL_GUARDED_BY(mutex_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mutex_);
};

// Returns all scripts that a RedisKeyValueStore runs, for a server whose clients may not send any.
std::vector<RedisScript> KeyValueScripts();

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_STORE_REDIS_KEY_VALUE_STORE_H_
