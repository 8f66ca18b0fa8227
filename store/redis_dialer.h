#ifndef DDP_STORE_REDIS_DIALER_H_
#define DDP_STORE_REDIS_DIALER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/name_lookup.h"
#include "store/redis_caller.h"
#include "store/redis_endpoint.h"
#include "store/redis_push_splitter.h"
#include "store/redis_reply_reader.h"

namespace ddp::store {

// Makes connections to a Redis server without making the event loop wait: not for the server's
// machine, not for its greeting, and not for the name of its host, which is looked up on a thread
// of its own (NameLookup).
//
// A server that was reached once is looked for at the address that it had; its name is asked for
// again only once in half a minute while it is away, meanwhile. A name that had no address yet is
// asked for once in a second: an attempt that is made earlier fails with what the last one heard.
//
// On the event loop's thread.
class RedisDialer {
 public:
  // `loop` is not owned and must outlive the dialer.
  RedisDialer(const RedisEndpoint& endpoint, const RedisConnectionOptions& options,
              EventLoop* loop);
  ~RedisDialer();
  RedisDialer(const RedisDialer&) = delete;
  RedisDialer& operator=(const RedisDialer&) = delete;

  // The server was reached, by somebody else, at this address, a number; "": by a unix socket.
  void FoundAt(const std::string& address);

  // What is at the known address is not the server that was meant, or is it no more: the next
  // attempt asks for the name, goes to the known address once more meanwhile, and the one after
  // that where the name leads.
  void Doubt() { name_due_ = absl::InfinitePast(); }

  // Makes one attempt, for connect_timeout at most; one at a time. `done` is called from the loop,
  // never from within Dial(), with a greeted, non-blocking socket of which every reply was
  // read. Errors: those of RedisCaller.
  using Done = std::function<void(absl::StatusOr<UniqueFd>)>;
  void Dial(Done done);

  // Gives up the attempt, if there is one: its `done` is not called.
  void Cancel();

 private:
  void Begin();
  absl::Status AskForName();
  void TakeName();
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

  std::vector<std::string> addresses_;  // that the server has, as far as we know
  size_t next_address_ = 0;             // the first to be tried
  size_t left_to_try_ = 0;              // of them, in this attempt
  absl::Time name_due_ = absl::InfinitePast();
  absl::Status no_name_;  // why the name had no address, when it was asked for last
  std::unique_ptr<NameLookup> lookup_;

  // Of the attempt.
  Done done_;
  UniqueFd fd_;
  int watched_fd_ = -1;
  EventLoop::TimerId timer_ = 0;
  absl::Status last_;  // why the last address failed
  std::vector<std::vector<std::string>> greeting_;
  size_t replies_ = 0;          // to it
  RedisPushSplitter splitter_;  // with options_.resp3
  RedisReplyReader reader_;
};

}  // namespace ddp::store

#endif  // DDP_STORE_REDIS_DIALER_H_
