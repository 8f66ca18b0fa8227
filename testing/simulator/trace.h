#ifndef DDP_TESTING_SIMULATOR_TRACE_H_
#define DDP_TESTING_SIMULATOR_TRACE_H_

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "testing/simulator/event_queue.h"

namespace ddp::testing {

// Writes the lines of a story for people: "  12.345678 node-3: ...". A caller checks on() before it
// builds a line, so a trace that is off costs nothing. Thread-compatible.
class Trace {
 public:
  using Writer = std::function<void(const std::string& line)>;

  // Without a writer the trace is off.
  Trace(const EventQueue* queue, Writer writer) : queue_(queue), writer_(std::move(writer)) {}

  bool on() const { return writer_ != nullptr; }

  void Add(const std::string& who, const std::string& what) const {
    if (!on()) return;
    const auto seconds = static_cast<double>(queue_->now_us()) / 1e6;
    std::string line = absl::StrFormat("%12.6f %s: %s", seconds, who, what);
    std::replace(line.begin(), line.end(), '\n', ' ');
    writer_(line);
  }

 private:
  const EventQueue* const queue_;
  const Writer writer_;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_TRACE_H_
