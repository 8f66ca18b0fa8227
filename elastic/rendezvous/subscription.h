#ifndef DDP_ELASTIC_RENDEZVOUS_SUBSCRIPTION_H_
#define DDP_ELASTIC_RENDEZVOUS_SUBSCRIPTION_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/redis_connection.h"
#include "store/redis_dialer.h"
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

  // `loop` is not owned. `options`: connect_timeout is for one try to connect. Nothing blocks.
  Subscription(const store::RedisEndpoint& endpoint, const store::RedisConnectionOptions& options,
               EventLoop* loop, Callbacks callbacks);
  ~Subscription();
  Subscription(const Subscription&) = delete;
  Subscription& operator=(const Subscription&) = delete;

  // Listens to `channel`, and to no other any more. One try; the callbacks tell what comes of it,
  // from the loop.
  void Listen(const std::string& channel);

  // The same for who may wait for the connection: the server is asked for the channel before it is
  // asked for anything that the caller sends after this.
  void ListenFirst(const std::string& channel);

 private:
  void Stop();
  void AskFor(const std::string& channel);
  void OnReadable();
  void EndSoon();

  EventLoop* const loop_;
  const Callbacks callbacks_;

  store::RedisDialer dialer_;
  const std::unique_ptr<store::RedisConnection> connection_;
  int watched_fd_ = -1;
  EventLoop::TimerId timer_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_SUBSCRIPTION_H_
