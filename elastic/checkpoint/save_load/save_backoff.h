#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_BACKOFF_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_BACKOFF_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace ddp::elastic {

// Returns true when a later save may succeed after `error` of a save.
bool MayPass(const absl::Status& error);

// Decides whether a save may be tried after earlier saves have failed. The pause after the n-th
// failure in a row is min(max, first * 2^(n-1)).
//
// Pure and thread-compatible. Holds no clock: the caller passes the time.
class SaveBackoff {
 public:
  struct Options {
    absl::Duration first = absl::Seconds(1);
    absl::Duration max = absl::Minutes(5);
  };

  explicit SaveBackoff(const Options& options) : options_(options) {}

  void Failed(absl::Time now);
  void Saved();

  bool MayTry(absl::Time now) const { return now >= next_; }
  int64_t failures() const { return failures_; }   // in a row
  absl::Duration pause() const { return pause_; }  // after the last failure

 private:
  const Options options_;
  int64_t failures_ = 0;
  absl::Duration pause_;
  absl::Time next_ = absl::InfinitePast();
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_BACKOFF_H_
