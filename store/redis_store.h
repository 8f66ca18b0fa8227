#ifndef DDP_STORE_REDIS_STORE_H_
#define DDP_STORE_REDIS_STORE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "store/redis_endpoint.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace ddp::store {

class RedisKeyValueStore;

// A c10d::Store whose keys live in Redis: hand it to any c10d backend, wrap it in a
// c10d::PrefixStore, as you would a TCPStore. Unlike TCPStore it has no server inside one of the
// ranks that takes all others with it, it needs no port, and reading many keys is one round trip.
//
//   auto store = c10::make_intrusive<ddp::store::RedisStore>(address);    // or, under ddprun:
//   auto store = ddp::store::RedisStore::connect(std::getenv("DDP_STORE"));
//   store->set("a", "1");
//
// Semantics are those of LibTorch 2.11's stores (one conformance suite runs over all of them): get,
// multiGet and wait block until the keys are there; add keeps decimal text. redis_key_value_store.h
// says how the data lies in Redis and how waiters are woken. Where the stores of LibTorch differ
// among each other, or do worse:
//   - getNumKeys and listKeys count and name the user's keys only;
//   - set, multiSet and append return when the server has applied them;
//   - getTimeout/setTimeout bound every operation, reconnecting to a lost server included. A
//     timeout of 0 (c10d's kNoTimeout) in wait means: no limit;
//   - a wait that times out says which keys are missing.
//
// Threads: thread-safe, as the backends need; a thread that is blocked in wait, get or queuePop
// holds up no other. All of them share one connection to the server, and so do the clones of a
// store: however many process groups a worker has, it is one client (see redis_key_value_store.h,
// Connections). Only setTimeout must not race
// getTimeout, which returns a reference.
//
// Errors:
//   c10::DistStoreError       a key did not come in time; add to a value that is no number; the
//                             server refuses our user, our password, or a write for want of memory
//   c10::DistQueueEmptyError  queuePop(key, false) on an empty queue
//   c10::DistNetworkError     the server cannot be reached for as long as the timeout, or the
//                             connection broke during an operation that must not be done twice
//   c10::ValueError           malformed address; lists of different length
class RedisStore final : public c10d::Store {
 public:
  // Connects within `timeout`, which is then the timeout of the store's operations.
  explicit RedisStore(const StoreAddress& address,
                      std::chrono::milliseconds timeout = kDefaultTimeout);

  // The store at `url` (see ParseStoreAddress), as the user that the environment names
  // (DDP_REDIS_USER, DDP_REDIS_PASSWORD, DDP_REDIS_PASSWORD_FILE).
  static c10::intrusive_ptr<RedisStore> connect(
      const std::string& url, std::chrono::milliseconds timeout = kDefaultTimeout);

  ~RedisStore() override;

  // A store object with a timeout of its own, over the same keys and the same connection.
  c10::intrusive_ptr<c10d::Store> clone() override;

  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;

  using c10d::Store::compareSet;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& desired) override;

  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  // Removes the key's value (a queue of that name stays). Returns whether there was one.
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

  // Renews the keys' time-to-live (7 days from the last use of the store). For a program that may
  // leave its store untouched for longer.
  void refresh_ttl();

  const StoreAddress& address() const;

 private:
  RedisStore(std::shared_ptr<RedisKeyValueStore> store, std::chrono::milliseconds timeout);

  absl::Duration Timeout() const;

  const std::shared_ptr<RedisKeyValueStore> store_;
  std::atomic<std::chrono::milliseconds::rep> timeout_ms_;  // of timeout_, for any thread
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_STORE_H_
