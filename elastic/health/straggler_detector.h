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

// Finds the ranks that all others wait for. In synchronous training every rank's step takes the
// same time, so it is a rank's own time in a step that tells: what it does not spend waiting
// (WaitsForPeers). A rank is a straggler when its own time is longer than the median by a factor in
// several windows in a row, and by enough to be felt in the step.
//
//   each generation:    Begin(now)
//   about once a second Observe(rank, page.Read(), now) for each local rank, then Check(now, ...)
//
// Own time is known of a rank that tells its waits, as ranks of //ddp do on the CPU, and of one
// that names its phases. A rank that does neither may wait anywhere, and nothing is said about it.
//
// Pure and thread-compatible; `now` and bounds on what a page says as in HangDetector.
class StragglerDetector {
 public:
  struct Options {
    double factor = 1.5;  // times the median; zero: no detection
    // A window is as long as this and as min_steps steps of each rank.
    absl::Duration window = absl::Seconds(10);
    int64_t min_steps = 5;
    int windows = 3;  // in a row
    // What the rank costs must be at least this share of a step.
    double min_share = 0.05;
  };

  struct Straggler {
    int local_rank = 0;
    double factor = 1;            // own time over the median
    absl::Duration own;           // per step, in the last window
    absl::Duration reference;     // the median
    Phase phase = Phase::kOther;  // in which it loses the most
  };

  explicit StragglerDetector(const Options& options);

  // A generation starts: everything is forgotten.
  void Begin(absl::Time now);

  void Observe(int local_rank, const HealthPage::Snapshot& page, absl::Time now);

  // Closes the window when it is long enough. Returns those that have become stragglers with it;
  // a straggler is told once, until it has kept up for a window. `job_median_us` is the own time
  // of a step in the job, the median over its nodes, negative when it is not known: the ranks are
  // compared with it or with each other, whichever is less, so that a node is found that is slow
  // as a whole. One rank alone has nobody to be compared with.
  std::vector<Straggler> Check(absl::Time now, int64_t job_median_us);

  // Of the last window that was closed, by local rank.
  const std::vector<Straggler>& stragglers() const { return stragglers_; }

  // Own time per step of the slowest local rank in the last window, to be reported to the job;
  // -1: not known.
  int64_t busy_us() const { return busy_us_; }

 private:
  struct Rank {
    HealthPage::Snapshot first;  // of the window
    HealthPage::Snapshot last;
    int slow_windows = 0;
  };
  // One rank's share of a window, per step, in microseconds.
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

// "takes 46ms of its own for a step, 2.3 times the median of 20ms, most of it lost in data": what
// follows a rank's name.
std::string DescribeStraggler(const StragglerDetector::Straggler& straggler);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_HEALTH_STRAGGLER_DETECTOR_H_
