#ifndef DDP_STORE_REDIS_STORE_REDIS_STORE_H_
#define DDP_STORE_REDIS_STORE_REDIS_STORE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "store/redis/store_address.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::store {

class RedisKeyValueStore;

// A c10d::Store whose keys live in Redis. Pass it to any c10d backend or wrap it in a
// c10d::PrefixStore, like a TCPStore. Unlike with TCPStore, no rank hosts the server, so no rank's
// end stops all others. No port is needed, and many keys are read in one round trip.
//
//   auto store = c10::make_intrusive<ddp::store::RedisStore>(address);    // or, under ddprun:
//   auto store = ddp::store::RedisStore::connect(std::getenv("DDP_STORE"));
//   store->set("a", "1");
//
// Semantics are those of LibTorch 2.11's stores (one conformance suite runs over all of them). get,
// multiGet and wait block until the keys exist. add stores decimal text. redis_key_value_store.h
// describes the layout of the data in Redis and how waiters are woken. Where LibTorch's stores
// disagree with each other or do worse:
//   - getNumKeys and listKeys count and name the user's keys only;
//   - set, multiSet and append return when the server has applied them;
//   - getTimeout/setTimeout bound every operation, including the reconnect to a lost server. A
//     timeout of 0 (c10d's kNoTimeout) means no limit;
//   - a wait that times out names the missing keys.
//
// Threads: thread-safe, as the backends need. A thread that is blocked in wait, get or queuePop
// delays no other thread. All threads and all clones of a store share one connection: a worker with
// many process groups is one client of the server (see redis_key_value_store.h, Connections). Only
// setTimeout must not race getTimeout, which returns a reference.
//
// Errors:
//   c10::DistStoreError       a key did not appear, or the server did not reply, in time; add to a
//                             value that is not a number; the server refuses the user, the
//                             password, or a write for lack of memory
//   c10::DistQueueEmptyError  queuePop(key, false) on an empty queue
//   c10::DistNetworkError     the server could not be reached within the timeout, or the
//                             connection broke during an operation that must not be repeated
//   c10::ValueError           malformed address; lists of different length
class RedisStore final : public c10d::Store {
 public:
  // Connects within `timeout`, which becomes the timeout of the store's operations.
  explicit RedisStore(const StoreAddress& address,
                      std::chrono::milliseconds timeout = kDefaultTimeout);

  // Connects to the store at `url` (see ParseStoreAddress), as the user that the environment names
  // (DDP_REDIS_USER, DDP_REDIS_PASSWORD, DDP_REDIS_PASSWORD_FILE).
  static c10::intrusive_ptr<RedisStore> connect(
      const std::string& url, std::chrono::milliseconds timeout = kDefaultTimeout);

  ~RedisStore() override;

  // Returns a store with its own timeout, over the same keys and the same connection.
  c10::intrusive_ptr<c10d::Store> clone() override;

  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;

  using c10d::Store::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;

  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  // Removes the key's value (a queue of that name stays). Returns true when there was a value.
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;

  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

  void append(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys,
                const std::vector<std::vector<uint8_t>>& values) override;
  bool hasExtendedApi() const override { return true; }

  void queuePush(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;

  std::vector<std::string> listKeys() override;

  void setTimeout(const std::chrono::milliseconds& timeout) override;

  // Renews the time-to-live of the values (7 days from the last use of the store). For a program
  // that may leave its store unused for longer.
  void refresh_ttl();

  const StoreAddress& address() const;

 private:
  RedisStore(std::shared_ptr<RedisKeyValueStore> store, std::chrono::milliseconds timeout);

  std::chrono::milliseconds Timeout() const;

  const std::shared_ptr<RedisKeyValueStore> store_;
  std::atomic<std::chrono::milliseconds::rep> timeout_ms_;  // timeout_, readable by any thread
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_STORE_REDIS_STORE_H_
