#ifndef DDP_EXAMPLES_DIGITS_METRICS_LOG_H_
#define DDP_EXAMPLES_DIGITS_METRICS_LOG_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ddp::examples {

// What a job reports of its epochs, as JSON lines in one file beside its checkpoints:
//   {"step":180,"epoch":1,"loss":0.32,"test_accuracy":0.95,"samples_per_second":4100}
// Thread-compatible; written by one rank.
class MetricsLog {
 public:
  struct Entry {
    int64_t step = 0;
    int64_t epoch = 0;
    double loss = 0;
    double test_accuracy = 0;
    double samples_per_second = 0;
  };

  explicit MetricsLog(std::string path);

  // Adds a line. kUnavailable, naming the file, when it cannot be written.
  absl::Status Append(const Entry& entry) const;

  // Removes the lines of steps after `step`, and one that was not written to its end: what the job
  // is about to do again. Replaces the file at once or not at all; makes it where there is none.
  // kUnavailable, naming the file, when it cannot be written.
  absl::Status CutBackTo(int64_t step) const;

 private:
  const std::string path_;
};

}  // namespace ddp::examples

#endif  // DDP_EXAMPLES_DIGITS_METRICS_LOG_H_
