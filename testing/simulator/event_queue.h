#ifndef DDP_TESTING_SIMULATOR_EVENT_QUEUE_H_
#define DDP_TESTING_SIMULATOR_EVENT_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace ddp::testing {

// Simulated time, in microseconds since the story began, and its events. Callbacks run one at
// a time, in the order of their times; callbacks of equal times run in the order of adding.
// Thread-compatible.
class EventQueue {
 public:
  using Callback = std::function<void()>;

  int64_t now_us() const { return now_us_; }
  uint64_t events_run() const { return events_run_; }

  // Adds an event. A time in the past means now.
  void At(int64_t at_us, Callback callback) {
    events_.push_back({std::max(at_us, now_us_), next_order_++, std::move(callback)});
    std::push_heap(events_.begin(), events_.end(), Later);
  }
  void After(int64_t delay_us, Callback callback) { At(now_us_ + delay_us, std::move(callback)); }

  // Runs the next event. Returns false when there is none up to `until_us`.
  bool RunNext(int64_t until_us) {
    if (events_.empty() || events_.front().at_us > until_us) return false;
    std::pop_heap(events_.begin(), events_.end(), Later);
    Event event = std::move(events_.back());
    events_.pop_back();
    now_us_ = event.at_us;
    ++events_run_;
    event.callback();
    return true;
  }

 private:
  struct Event {
    int64_t at_us;
    uint64_t order;
    Callback callback;
  };
  static bool Later(const Event& a, const Event& b) {
    return a.at_us != b.at_us ? a.at_us > b.at_us : a.order > b.order;
  }

  int64_t now_us_ = 0;
  uint64_t next_order_ = 0;
  uint64_t events_run_ = 0;
  std::vector<Event> events_;  // a heap
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_EVENT_QUEUE_H_
