#ifndef DDP_TESTING_SIMULATOR_SIMULATED_STORE_H_
#define DDP_TESTING_SIMULATOR_SIMULATED_STORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "store/redis/redis_script.h"
#include "store/redis/wire/redis_reply.h"
#include "testing/simulator/event_queue.h"
#include "testing/simulator/random.h"
#include "testing/simulator/redis/lua_redis.h"
#include "testing/simulator/redis/memory_database.h"
#include "testing/simulator/trace.h"

namespace ddp::testing {

// Conditions of the network between clients and store. A probability is per message.
struct NetworkConditions {
  int64_t delay_min_us = 50;
  double delay_mean_us = 300;  // added to the minimum; exponential
  double lose_request = 0;     // the connection breaks, the script does not run
  double lose_reply = 0;       // the script runs, then the connection breaks
  double swallow = 0;          // no run, no broken connection: the client waits for its timeout
  double duplicate = 0;        // the script runs again, about `duplicate_mean_us` later
  double duplicate_mean_us = 300000;
  double lose_push = 0;           // the connection breaks; the client learns it at the next use
  double break_subscription = 0;  // the connection breaks, and the client is told at once
};

// A Redis server and the network to it, in simulated time. Scripts run in the order of their
// arrival. Requests, replies and pushed messages are delayed or lost; a request may arrive twice.
// The server pauses, dies, and comes back with all data, without its last writes, or empty.
// Thread-compatible.
class SimulatedStore {
 public:
  using ClientId = int;
  using ReplyDone = std::function<void(absl::StatusOr<store::RedisReply>)>;

  // Counts of messages, for the report.
  struct Counts {
    uint64_t scripts = 0, lost_requests = 0, lost_replies = 0, swallowed = 0, duplicates = 0,
             pushed = 0, lost_pushes = 0, broken_subscriptions = 0;
  };

  // The pointers are not owned and must outlive the store. `on_run` gets the reply of each script.
  SimulatedStore(EventQueue* queue, Random random, const NetworkConditions& conditions,
                 const Trace* trace, std::function<void(const store::RedisReply&)> on_run);

  ClientId AddClient(std::string name);

  // Sends a script; `done` is called later, once, unless the client is removed. Errors:
  // kUnavailable (the connection broke or was refused), kDeadlineExceeded (no answer within
  // `timeout_us`; the script may have run, or may run later).
  void Call(ClientId client, const store::RedisScript& script, std::vector<std::string> keys,
            std::vector<std::string> args, int64_t timeout_us, ReplyDone done);

  // Subscribes to a channel until the connection breaks; then calls `on_end`, once. A client has
  // one connection, and closes it when a call fails. If the client cannot subscribe now, `on_end`
  // is called without `on_subscribed`. A new subscription replaces the old one without `on_end`.
  using OnPush = std::function<void(const std::string& text)>;
  void Subscribe(ClientId client, std::string channel, OnPush on_push,
                 std::function<void()> on_subscribed, std::function<void()> on_end);

  // Removes a client whose process is gone. No callback of the client is called any more.
  void RemoveClient(ClientId client);

  // While a client is cut off, no message from or to it arrives. Its calls time out, and it cannot
  // subscribe.
  void SetCutOff(ClientId client, bool cut_off);

  // Faults of the server. A paused server takes requests, and runs them when it continues.
  void Pause();
  void Continue();
  enum class Memory { kAll, kSnapshot, kNothing };
  void TakeSnapshot() { snapshot_ = redis_.database(); }
  // Takes a snapshot before the next script for whose reply `is_it` returns true. That reply is
  // lost, and `then` is called.
  void TakeSnapshotBefore(std::function<bool(const store::RedisReply&)> is_it,
                          std::function<void()> then);
  void Kill();
  void Start(Memory memory, int64_t clock_jump_us);
  bool up() const { return state_ == State::kUp; }
  // Ends all random faults of the network. Delays and cut-off clients remain.
  void Heal();

  // Microseconds of Unix time as the server sees it.
  int64_t server_now_us() const { return kEpochUs + queue_->now_us() + clock_offset_us_; }

  LuaRedis& redis() { return redis_; }
  const Counts& counts() const { return counts_; }

 private:
  static constexpr int64_t kEpochUs = 1700000000000000;
  enum class State { kUp, kPaused, kDown };

  struct Subscription {
    std::string channel;
    OnPush on_push;
    std::function<void()> on_end;
    uint64_t serial = 0;
  };
  struct Request {
    ClientId client = 0;
    const store::RedisScript* script = nullptr;
    std::vector<std::string> keys, args;
    int64_t gives_up_at_us = 0;
    ReplyDone done;
    bool is_answered = false;
  };
  using RequestPtr = std::shared_ptr<Request>;
  struct Client {
    std::string name;
    bool gone = false;
    bool cut_off = false;
    bool is_broken = false;  // no message arrives by the connection any more
    RequestPtr request;      // the last one
    std::optional<Subscription> subscription;
  };

  int64_t Delay();
  void Arrive(const RequestPtr& request);
  bool IsAwaited(const store::RedisReply& reply);
  store::RedisReply Run(const Request& request);
  void Answer(const RequestPtr& request, absl::StatusOr<store::RedisReply> reply);
  void AnswerNever(const RequestPtr& request);
  void Deliver(const RequestPtr& request, const absl::StatusOr<store::RedisReply>& reply);
  int64_t Publish(std::string_view channel, std::string_view text);
  void Push(ClientId client, uint64_t serial, const std::shared_ptr<const std::string>& text);
  void EndSubscription(ClientId client);
  void BreakConnection(ClientId client);

  EventQueue* const queue_;
  Random random_;
  NetworkConditions conditions_;
  const Trace* const trace_;
  const std::function<void(const store::RedisReply&)> on_run_;

  State state_ = State::kUp;
  int64_t clock_offset_us_ = 0;
  int starts_ = 1;
  LuaRedis redis_;
  MemoryDatabase snapshot_;
  // Arguments of TakeSnapshotBefore(), or null.
  std::function<bool(const store::RedisReply&)> is_awaited_;
  std::function<void()> then_;
  std::vector<Client> clients_;
  std::map<std::string, std::vector<ClientId>, std::less<>> channels_;
  std::vector<RequestPtr> waiting_;  // requests that came while the server was paused
  uint64_t next_serial_ = 1;
  Counts counts_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_SIMULATED_STORE_H_
