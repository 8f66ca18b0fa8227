#ifndef DDP_ELASTIC_HEALTH_STRAGGLER_DETECTOR_H_
#define DDP_ELASTIC_HEALTH_STRAGGLER_DETECTOR_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "elastic/health/health_page.h"
#include "elastic/health/phase.h"

namespace ddp::elastic {

// Finds ranks that hold up the others. In synchronous training the steps of all ranks take equally
// long, so a rank is judged by its own time in a step: the part in which it does not wait
// (WaitsForPeers). A straggler's own time exceeds the median by a factor in several windows in a
// row, and costs a noticeable share of the step. WorkerGroup owns the detector.
//
//   each generation:    Begin(now)
//   about once a second Observe(rank, page.Read(), now) for each local rank, then Check(now, ...)
//
// Own time is known only if the rank reports its waits, as ranks of //ddp do on the CPU, or names a
// phase in which it waits (kBackward or kSynchronize). Other ranks are never reported.
//
// Pure and thread-compatible. `now` and the bounds on a page's values are as in HangDetector.
class StragglerDetector {
 public:
  struct Options {
    double factor = 1.5;  // times the median; zero: no detection
    // A window lasts at least this long, and at least min_steps steps of each rank.
    absl::Duration window = absl::Seconds(10);
    int64_t min_steps = 5;
    int windows = 3;  // in a row
    // Least excess of own time over the median, as a share of the step.
    double min_share = 0.05;
    bool operator==(const Options&) const = default;
  };

  struct Straggler {
    int local_rank = 0;
    double factor = 1;            // own time over the median
    absl::Duration own;           // per step, in the last window
    absl::Duration reference;     // the median that `own` is compared with; see Check()
    Phase phase = Phase::kOther;  // in which it loses the most time
  };

  explicit StragglerDetector(const Options& options);

  // Begins a generation: forgets everything.
  void Begin(absl::Time now);

  void Observe(int local_rank, const HealthPage::Snapshot& page, absl::Time now);

  // Closes the window if it is long enough. Returns ranks that have become stragglers with it. A
  // straggler is returned once, and again only after a window in which it kept up. `job_median_us`:
  // own time per step, the median over the job's nodes; negative: not known. Ranks are compared
  // with the lesser of it and the median of this node's ranks, so a node that is slow as a whole is
  // found. Without job_median_us a single rank is never a straggler.
  std::vector<Straggler> Check(absl::Time now, int64_t job_median_us);

  // Returns the stragglers of the last closed window, by local rank.
  const std::vector<Straggler>& stragglers() const { return stragglers_; }

  // Returns own time per step of the slowest local rank in the last window, for the job's median;
  // -1: not known.
  int64_t busy_us() const { return busy_us_; }

 private:
  struct Rank {
    HealthPage::Snapshot first;  // at the start of the window
    HealthPage::Snapshot last;
    int slow_windows = 0;
  };
  // Averages of one rank over a window, per step, in microseconds.
  struct Share {
    int local_rank = 0;
    bool tells_waits = false;
    double own_us = 0;
    double step_us = 0;
    std::array<double, kPhaseCount> phase_us{};
  };

  std::vector<Share> CloseWindow(absl::Duration length);
  Straggler Compare(const Share& share, const std::vector<Share>& all, double reference_us) const;

  const Options options_;
  absl::Time window_start_ = absl::InfinitePast();
  std::map<int, Rank> ranks_;
  std::vector<Straggler> stragglers_;
  int64_t busy_us_ = -1;
};

// Returns a text to follow a rank's name: "takes 46ms of its own for a step, 2.3 times the median
// of 20ms, most of it lost in data".
std::string DescribeStraggler(const StragglerDetector::Straggler& straggler);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_HEALTH_STRAGGLER_DETECTOR_H_
