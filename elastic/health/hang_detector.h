#ifndef DDP_ELASTIC_HEALTH_HANG_DETECTOR_H_
#define DDP_ELASTIC_HEALTH_HANG_DETECTOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "elastic/health/health_page.h"
#include "elastic/health/phase.h"

namespace ddp::elastic {

// Decides whether a living rank that commits no step is hung. The limit is learned from the job: a
// multiple of its longest step so far. WorkerGroup owns the detector.
//
//   each generation:  Begin(now, nodes)
//   each look:        Observe(rank, page.Read(), now) for each local rank, then Check(now)
//
// The caller looks at least four times within Options::floor.
//
// No rank is hung before min_steps steps have been seen. Learned values are kept over generations,
// so a restarted job is watched from its start. A program that never attaches to its page is not
// watched.
//
// Interruptions of training have a limit of their own, slow_floor: the start, a wait for data (a
// file system may stall), checkpoints, evaluations, and the end of a rank that was asked to stop.
// The other ranks of this node are likely to wait for such a rank, so they get this limit too.
// Ranks that wait for peers on other nodes get waiting_floor, and no limit at all while a rank of
// another node is known to work (SetOthersAtWork).
// HealthPage::Progress restarts the time of an interruption, for the rank and for those that may
// wait for it.
//
// Times are those of MonotonicClock, as the stamps in the page. The worker writes the page, so
// impossible stamps are replaced by bounds. If Observe was not called for most of a floor, the
// caller was stopped, and likely its workers too: the time of all ranks starts again.
//
// Pure and thread-compatible.
class HangDetector {
 public:
  struct Options {
    absl::Duration floor = absl::Seconds(30);  // least limit for a step; zero: no detection
    // Least limit for startup, data, checkpoint, evaluation and the end of a stopping rank.
    absl::Duration slow_floor = absl::Minutes(10);
    // Least limit for a rank that waits for peers in a job of several nodes. The timeout of a
    // collective: a rank of another node may evaluate or save for long, and that node watches it.
    absl::Duration waiting_floor = absl::Minutes(30);
    double factor = 5;       // limit as a multiple of the longest step
    int64_t min_steps = 10;  // steps of the job before detection begins
    bool operator==(const Options&) const = default;
  };

  // A hang of this node: the local rank that most likely holds up the others.
  struct Hang {
    int local_rank = 0;
    absl::Duration stalled_for;
    absl::Duration longest_step;  // of the job
    absl::Duration limit;         // of the rank
    Phase phase = Phase::kOther;
    // True: this rank waits for peers, and so do all stalled ranks of this node. The cause may be
    // on another node.
    bool waits_for_peers = false;
    int64_t step = -1;  // last committed step; -1: none in this generation
  };

  explicit HangDetector(const Options& options);

  // Begins a generation of the job on `nodes` nodes: forgets the ranks, keeps learned values.
  void Begin(absl::Time now, int nodes);

  void Observe(int local_rank, const HealthPage::Snapshot& page, absl::Time now);

  // Time before `now` does not count, as a stall or as part of a step: ranks were held from
  // outside.
  void Excuse(absl::Time now);

  // Tells whether a rank of another node works, so that the others may wait for it. Its own node
  // watches it: no wait of this node counts as a hang meanwhile.
  void SetOthersAtWork(bool are_at_work, absl::Time now);

  // A local rank that has made no progress for a while, and does not wait for peers.
  struct AtWork {
    int local_rank = 0;
    Phase phase = Phase::kOther;
    absl::Duration stalled_for;
  };
  // Returns the one that has made none for longest, at least kWorthTelling. Nullopt before
  // min_steps steps: others could wait for a hang that this node does not look for.
  static constexpr absl::Duration kWorthTelling = absl::Seconds(2);
  std::optional<AtWork> FindAtWork(absl::Time now) const;

  // Returns the rank that has waited for longest while another node's rank works, if half of the
  // time that a wait may last has passed: to be told, not to be ended.
  std::optional<Hang> FindLongWait(absl::Time now) const;

  // Stops watching a rank whose process has ended, for this generation.
  void Forget(int local_rank);

  // Of the job, as far as this node has seen.
  absl::Duration longest_step() const { return longest_step_; }

  // Returns the hang at `now`, or nullopt. The answer does not change the detector's state.
  // `share`: of the limits; half of them, for a warning.
  std::optional<Hang> Check(absl::Time now, double share = 1) const;

 private:
  struct Rank {
    HealthPage::Snapshot page;
    absl::Time since;      // time of its last progress
    bool is_slow = false;  // slow_floor applies to its phase
    absl::Time slow_since;
    absl::Time observed;
    absl::Time commit_after;  // lower bound of the time of its last commit
  };

  bool IsOn() const;
  // Returns true when a rank of this node interrupts training, so that the others may wait for it.
  bool SomebodyIsSlow() const;
  absl::Duration Limit(const Rank& rank) const;
  absl::Duration StalledFor(const Rank& rank, absl::Time now) const;
  Hang Describe(const std::pair<const int, Rank>& entry, absl::Time now) const;
  absl::Time Stamp(int64_t monotonic_ns, absl::Time now) const;
  void Learn(Rank& rank, const HealthPage::Snapshot& page, absl::Time now);

  const Options options_;
  int nodes_ = 1;
  absl::Time begin_ = absl::InfinitePast();
  absl::Time looked_ = absl::InfinitePast();  // time of the last Observe
  // Time before this does not count as a stall: there was a gap in the calls of Observe, or a rank
  // interrupted training for all.
  absl::Time counted_since_ = absl::InfinitePast();
  // The same for waits for peers: a rank of another node was at work.
  absl::Time waits_counted_since_ = absl::InfinitePast();
  bool others_at_work_ = false;
  std::map<int, Rank> ranks_;
  std::set<int> attached_;  // local ranks that have ever attached

  // Learned values.
  int64_t earlier_steps_ = 0;     // committed in earlier generations
  int64_t generation_steps_ = 0;  // in this generation, by the rank with the most
  absl::Duration longest_step_ = absl::ZeroDuration();
};

// Returns a text to follow a rank's name: "made no step for 42s, in backward; the longest step took
// 1.2s".
std::string DescribeHang(const HangDetector::Hang& hang);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_HEALTH_HANG_DETECTOR_H_
