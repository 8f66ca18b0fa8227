#ifndef DDP_LAUNCHER_CHECKPOINT_PROGRESS_LINE_H_
#define DDP_LAUNCHER_CHECKPOINT_PROGRESS_LINE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/time/time.h"

namespace ddp::launcher {

// The text of a line that shows how far a reading is: "verifying step-...: 3.2 GB of 12.0 GB (26%),
// 1.1 GB/s". Thread-compatible. Holds no clock.
class ProgressLine {
 public:
  // A terminal gets a new line at most so often. The first comes after one interval, so that a
  // short reading shows none.
  static constexpr absl::Duration kInterval = absl::Milliseconds(200);

  ProgressLine(std::string title, absl::Time now);

  // Returns the line to show at `now`; nullopt: not yet. `done` of `total` bytes are read.
  std::optional<std::string> Update(uint64_t done, uint64_t total, absl::Time now);

 private:
  const std::string title_;
  const absl::Time begin_;
  absl::Time shown_;  // the last time
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_CHECKPOINT_PROGRESS_LINE_H_
