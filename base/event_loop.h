#ifndef DDP_BASE_EVENT_LOOP_H_
#define DDP_BASE_EVENT_LOOP_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ddp {

// An epoll loop: calls callbacks for ready descriptors and expired timers. An agent has one.
//
// Thread-compatible: every call and every callback runs on the thread that calls Run(). A callback
// may call every method but Run(), and may unwatch its own descriptor.
class EventLoop {
 public:
  using TimerId = uint64_t;

  static absl::StatusOr<std::unique_ptr<EventLoop>> Create();
  ~EventLoop();

  // Calls `callback` with the ready epoll events each time `fd` has one of `events` (EPOLLIN, ...;
  // level-triggered). Does not own `fd`: call Unwatch() before closing it. Errors: kAlreadyExists
  // when `fd` is watched already, kInternal from epoll_ctl.
  absl::Status Watch(int fd, uint32_t events, std::function<void(uint32_t events)> callback);

  // Does nothing when `fd` is not watched. After the return, the callback is never called again.
  void Unwatch(int fd);

  // Calls `callback` once, `delay` from now.
  TimerId AddTimer(absl::Duration delay, std::function<void()> callback);
  // Does nothing when the timer has fired or is unknown.
  void CancelTimer(TimerId id);

  // Blocks and calls callbacks until one of them calls Stop(). Errors: kInternal from epoll_wait.
  absl::Status Run();
  void Stop();

 private:
  struct State;
  explicit EventLoop(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ddp

#endif  // DDP_BASE_EVENT_LOOP_H_
