#ifndef DDP_STORE_REDIS_REDIS_DIALER_H_
#define DDP_STORE_REDIS_REDIS_DIALER_H_

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/name_lookup.h"
#include "store/redis/redis_caller.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_greeting.h"
#include "store/redis/redis_socket.h"
#include "store/redis/server_locator.h"
#include "store/redis/wire/redis_wire.h"

namespace ddp::store {

// Connects to a Redis server without blocking the event loop: neither the connecting, nor the
// greeting, nor the lookup of the host's name blocks. NameLookup looks up the name on a thread of
// its own. Every client of this repository connects through a dialer.
//
// The addresses of a name race, as in RFC 8305: a socket to the next address starts 200 ms after
// the one before it, or at once when one of them has failed. The first server that passes the
// greeting and is a master wins. A replica is taken only when all others have failed. Sentinels are
// asked on that thread too, and their answer counts as the name's address.
//
// ServerLocator decides when the name is looked up. Attempts at the known addresses continue
// meanwhile. While no address is known, an attempt waits for the lookup, and fails with the last
// lookup's error where the next one is not due yet.
//
// After WRONGPASS or NOAUTH, the password is read again from RedisEndpoint::password_file. If it
// has changed, the attempt begins anew.
//
// Thread-compatible. While an attempt runs: the thread of its event loop.
class RedisDialer {
 public:
  RedisDialer(const RedisEndpoint& endpoint, const RedisConnectionOptions& options);
  ~RedisDialer();
  RedisDialer(const RedisDialer&) = delete;
  RedisDialer& operator=(const RedisDialer&) = delete;

  // Records that other code has reached the server at `address`, an AddressOf() the socket.
  void FoundAt(const std::string& address) { locator_.Reached(address); }

  // Returns the address of the server at the other end of `socket`: numeric, with the port where
  // Sentinel said it; "" for a unix socket.
  std::string AddressOf(const RedisSocket& socket) const {
    return PeerAddress(socket.fd(), endpoint_.is_behind_sentinels());
  }

  // Records that the server that was reached last is not the master: it never was, or it has been
  // demoted. The next attempt starts a lookup of the name and tries that address last. The first
  // attempt after the lookup's end uses the addresses of the name.
  void Doubt() { locator_.Doubt(); }

  // Makes one attempt. It ends by `deadline`, or earlier: when the lookup of the name has taken
  // connect_timeout while no address is known; or when, after the start of the last address's
  // socket, the time for an attempt has passed. That is first_connect_timeout, twice as much after
  // each attempt that was too short, and at most connect_timeout.
  //
  // CHECKs that no attempt is running. Calls `done` from `loop`, never from within Dial(). `done`
  // receives a greeted, non-blocking socket of which every reply was read. Errors: those of
  // RedisCaller. `loop` is not owned and must live until the attempt ends.
  using Done = std::function<void(absl::StatusOr<RedisSocket>)>;
  void Dial(EventLoop* loop, absl::Time deadline, Done done);

  // Cancels the attempt, if there is one, without calling its `done`.
  void Cancel();

 private:
  // A socket to one of the addresses.
  struct Racer {
    Racer(RedisSocket given, const RedisDialer& dialer);

    RedisSocket socket;
    RedisGreeting greeting;
    RedisWire wire;
    bool reached = false;    // the server has taken the connection
    bool connected = false;  // and the greeting may be sent
  };
  using RacerPlace = std::list<Racer>::iterator;

  void Begin();
  absl::Status AskForName();
  void TakeName();
  void TryAddresses();
  void StartNext();
  absl::Status StartOne(const std::string& address);
  void OnReady(RacerPlace racer);
  absl::StatusOr<bool> Advance(RacerPlace racer);
  absl::Status SendGreeting(Racer& racer) const;
  absl::StatusOr<bool> ReadGreeting(Racer& racer) const;
  void NoteError(const absl::Status& status);
  void LimitTo(absl::Duration limit, std::function<void()> at_end);
  absl::Duration TimeForAttempt() const;
  RedisSocket TakeOut(RacerPlace racer);
  void GiveUp();
  bool HasNewPassword();
  absl::Status TimeoutError() const;
  void Fail(const absl::Status& status);
  void Finish(absl::StatusOr<RedisSocket> result);

  RedisEndpoint endpoint_;  // its password may change
  const RedisConnectionOptions options_;
  const MonotonicClock clock_;

  ServerLocator locator_;
  std::unique_ptr<NameLookup> lookup_;
  int timeouts_in_a_row_ = 0;

  // State of the current attempt.
  EventLoop* loop_ = nullptr;  // null: none
  absl::Time deadline_;
  Done done_;
  std::vector<std::string> to_try_;  // addresses without a racer yet, the next one last
  bool is_only_address_ = false;
  std::list<Racer> racers_;
  RedisSocket replica_;  // the first one that passed the greeting
  bool read_password_again_ = false;
  bool waits_for_name_ = false;
  EventLoop::TimerId limit_timer_ = 0;
  EventLoop::TimerId next_timer_ = 0;
  absl::Status error_;  // the most telling one
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_REDIS_DIALER_H_
