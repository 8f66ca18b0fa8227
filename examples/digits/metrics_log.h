#ifndef DDP_EXAMPLES_DIGITS_METRICS_LOG_H_
#define DDP_EXAMPLES_DIGITS_METRICS_LOG_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace ddp::examples {

// The metrics of a job's epochs, as JSON lines in one file beside its checkpoints:
//   {"step":180,"epoch":1,"loss":0.32,"test_accuracy":0.95,"samples_per_second":4100}
// Thread-compatible; only one rank may write the file.
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

  // Appends a line. kUnavailable: the file cannot be written; the message names it.
  absl::Status Append(const Entry& entry) const;

  // Removes the lines of steps after `step`, because the job trains these steps again, and lines
  // that are incomplete. Replaces the file as a whole or not at all; creates a missing file.
  // kUnavailable: the file cannot be written; the message names it.
  absl::Status CutBackTo(int64_t step) const;

 private:
  const std::string path_;
};

}  // namespace ddp::examples

#endif  // DDP_EXAMPLES_DIGITS_METRICS_LOG_H_
