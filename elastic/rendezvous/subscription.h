#ifndef DDP_ELASTIC_RENDEZVOUS_SUBSCRIPTION_H_
#define DDP_ELASTIC_RENDEZVOUS_SUBSCRIPTION_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/event_loop.h"
#include "store/redis_connection.h"
#include "store/redis_endpoint.h"

namespace ddp::elastic {

// Listens to one Redis channel over a connection of its own, from the event loop. Delivery is at
// most once: what is published while the connection is broken is never seen.
//
// Thread: that of the event loop.
class Subscription {
 public:
  struct Callbacks {
    std::function<void()> on_subscribed;
    std::function<void(std::string text)> on_push;
    std::function<void()> on_end;  // could not subscribe, or the connection broke; once
  };

  // `loop` is not owned. `options`: connect_timeout is for how long Listen() may block.
  Subscription(const store::RedisEndpoint& endpoint, const store::RedisConnectionOptions& options,
               EventLoop* loop, Callbacks callbacks);
  ~Subscription();
  Subscription(const Subscription&) = delete;
  Subscription& operator=(const Subscription&) = delete;

  // Listens to `channel`, and to no other any more. One try; the callbacks tell what comes of it,
  // from the loop.
  void Listen(const std::string& channel);

 private:
  void Stop();
  void OnReadable();
  void EndSoon();

  const store::RedisEndpoint endpoint_;
  const store::RedisConnectionOptions options_;
  EventLoop* const loop_;
  const Callbacks callbacks_;

  std::unique_ptr<store::RedisConnection> connection_;
  int watched_fd_ = -1;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_SUBSCRIPTION_H_
