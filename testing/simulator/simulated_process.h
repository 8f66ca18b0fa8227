#ifndef DDP_TESTING_SIMULATOR_SIMULATED_PROCESS_H_
#define DDP_TESTING_SIMULATOR_SIMULATED_PROCESS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "testing/simulator/event_queue.h"

namespace ddp::testing {

// An agent's process in simulated time: it has its own clock, can be stopped and continued, and
// ends. Every event of the process is delivered through it. It must outlive the queue's events, so
// a story keeps its processes until its end. Thread-compatible.
class SimulatedProcess {
 public:
  using Callback = std::function<void()>;

  // The process's clock is off by `skew_us` and gains `drift` of the elapsed time.
  SimulatedProcess(EventQueue* queue, int64_t skew_us, double drift)
      : queue_(queue), skew_us_(skew_us), rate_(1 + drift) {}

  absl::Time now() const {
    const auto own_us = static_cast<int64_t>(static_cast<double>(queue_->now_us()) * rate_);
    return absl::FromUnixMicros(kEpochUs + skew_us_ + own_us);
  }

  bool is_over() const { return is_over_; }
  bool is_stopped() const { return is_stopped_; }

  // Runs `callback` now. A stopped process runs it when it continues; an ended one never does.
  void Deliver(const Callback& callback) {
    if (is_over_) return;
    if (is_stopped_) {
      held_.push_back(callback);
    } else {
      callback();
    }
  }

  // Delivers `callback` when the process's own clock reaches `at`.
  void DeliverAt(absl::Time at, Callback callback) {
    // Rounds up to the next microsecond, and adds one for rounding errors: a timer is never early.
    const auto own_us = static_cast<double>(absl::ToUnixMicros(at) + 1 - kEpochUs - skew_us_);
    const int64_t at_us =
        at <= now() ? queue_->now_us()
                    : std::max(queue_->now_us() + 1, static_cast<int64_t>(own_us / rate_) + 1);
    queue_->At(at_us, [this, callback = std::move(callback)] { Deliver(callback); });
  }

  void Stop() { is_stopped_ = true; }
  void Continue() {
    is_stopped_ = false;
    for (const Callback& callback : std::exchange(held_, {})) Deliver(callback);
  }
  void End() {
    is_over_ = true;
    held_.clear();
  }

 private:
  static constexpr int64_t kEpochUs = 1600000000000000;

  EventQueue* const queue_;
  const int64_t skew_us_;
  const double rate_;
  bool is_over_ = false;
  bool is_stopped_ = false;
  std::vector<Callback> held_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_SIMULATED_PROCESS_H_
