#ifndef DDP_TESTING_REDIS_DELAYING_PROXY_H_
#define DDP_TESTING_REDIS_DELAYING_PROXY_H_

#include <memory>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "store/redis/redis_endpoint.h"
#include "testing/network/loopback_socket.h"

namespace ddp::testing {

// Makes a server look far away: forwards TCP connections to its unix socket, and holds every byte
// back for `delay` on each way. Owns one thread.
class DelayingProxy {
 public:
  DelayingProxy(const std::string& unix_path, absl::Duration delay);
  ~DelayingProxy();
  DelayingProxy(const DelayingProxy&) = delete;
  DelayingProxy& operator=(const DelayingProxy&) = delete;

  store::RedisEndpoint endpoint() const;

 private:
  struct Link;
  void Accept();
  void Forward(const std::shared_ptr<Link>& link, int from, int to);
  void Close(Link& link);

  const std::string unix_path_;
  const absl::Duration delay_;
  const LoopbackSocket listener_ = ListenOnLoopback();
  const std::unique_ptr<EventLoop> loop_ = *EventLoop::Create();
  const UniqueFd stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_REDIS_DELAYING_PROXY_H_
