#ifndef DDP_STORE_REDIS_REDIS_DIALER_H_
#define DDP_STORE_REDIS_REDIS_DIALER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/name_lookup.h"
#include "base/unique_fd.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_greeting.h"
#include "store/redis/server_locator.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::store {

// Connects to a Redis server without blocking the event loop: neither the connecting, nor the
// greeting, nor the lookup of the host's name blocks. NameLookup looks up the name on a thread of
// its own.
//
// Once the server was reached, the dialer uses the address that it had. While the server is away,
// the name is looked up again only once in half a minute, and attempts continue meanwhile. While no
// address is known, the name is looked up at most once a second; an attempt in between fails with
// the last lookup's error.
//
// Thread: the event loop's.
class RedisDialer {
 public:
  // `loop` is not owned and must outlive the dialer.
  RedisDialer(const RedisEndpoint& endpoint, const RedisConnectionOptions& options,
              EventLoop* loop);
  ~RedisDialer();
  RedisDialer(const RedisDialer&) = delete;
  RedisDialer& operator=(const RedisDialer&) = delete;

  // Records that other code has reached the server at `address`: a numeric address, or "" for a
  // unix socket.
  void FoundAt(const std::string& address) { locator_.Reached(address); }

  // Records that the server at the known address is not the master: it never was, or it has been
  // demoted. The next attempt starts a lookup of the name and still tries the known address. The
  // first attempt after the lookup's end uses the addresses of the name.
  void Doubt() { locator_.Doubt(); }

  // Makes one attempt, for at most connect_timeout. CHECKs that no attempt is running. Calls `done`
  // from the loop, never from within Dial(). `done` receives a greeted, non-blocking socket of
  // which every reply was read. Errors: those of RedisCaller.
  using Done = std::function<void(absl::StatusOr<UniqueFd>)>;
  void Dial(Done done);

  // Cancels the attempt, if there is one, without calling its `done`.
  void Cancel();

 private:
  void Begin();
  absl::Status AskForName();
  void TakeName();
  void TryAddresses();
  void ConnectNext();
  void OnConnected();
  void OnReadable();
  absl::StatusOr<bool> ReadGreeting();
  void WatchFor(int fd, uint32_t events, void (RedisDialer::*then)());
  void StopWatching();
  void Fail(const absl::Status& status);
  void Finish(absl::StatusOr<UniqueFd> result);

  const RedisEndpoint endpoint_;
  const RedisConnectionOptions options_;
  EventLoop* const loop_;
  const MonotonicClock clock_;

  ServerLocator locator_;
  std::unique_ptr<NameLookup> lookup_;

  // State of the current attempt.
  Done done_;
  size_t left_to_try_ = 0;  // addresses
  UniqueFd fd_;
  int watched_fd_ = -1;
  EventLoop::TimerId timer_ = 0;
  absl::Status last_;  // error of the last address
  std::optional<RedisGreeting> greeting_;
  RedisWire wire_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_DIALER_H_
