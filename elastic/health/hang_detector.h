#ifndef DDP_ELASTIC_HEALTH_HANG_DETECTOR_H_
#define DDP_ELASTIC_HEALTH_HANG_DETECTOR_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "absl/time/time.h"
#include "elastic/health/health_page.h"
#include "elastic/health/phase.h"

namespace ddp::elastic {

// Decides whether a rank that lives but commits no step is hung. How long is too long is learned
// from the job itself: some times the longest step that it has made.
//
//   each generation:        Begin(now, nodes)
//   several times a floor:  Observe(rank, page.Read(), now) for each local rank, then Check(now)
//
// Until enough steps were seen there is nothing to learn from, and nobody is called hung. What was
// learned is kept over generations, so that a restarted job is watched from its start. A rank that
// is no program of ours (it has never attached to its page) is not watched.
//
// What interrupts training is not measured with a step's length: the start, checkpoints and
// evaluations, and the end of a rank that was asked to stop, have a limit of their own; while a
// rank of this node is in one of these, the others are likely to wait for it and have it too. So
// have, with one more limit, ranks that wait for peers on other nodes, of which we know nothing.
// A rank that interrupts training may tell of progress (HealthPage::Progress): its time, and that
// of the ranks that may wait for it, then counts from there.
//
// Times are those of MonotonicClock, as the stamps in the page are. A page is the worker's to
// write: stamps that cannot be true are replaced by what the caller knows. A caller who has not
// looked for a long time was stopped himself, likely with his workers: they get their time anew.
//
// Pure and thread-compatible.
class HangDetector {
 public:
  struct Options {
    absl::Duration floor = absl::Seconds(30);  // the least limit for a step; zero: no detection
    // The least limit for startup, checkpoint, evaluation and the end.
    absl::Duration slow_floor = absl::Minutes(10);
    // The least limit for a rank that waits for peers, of which some are on other nodes.
    absl::Duration waiting_floor = absl::Minutes(2);
    double factor = 5;       // times the longest step: the limit, where that is above the floor
    int64_t min_steps = 10;  // seen before anybody is called hung
  };

  // At a time at least one: the local rank that most likely holds up the others.
  struct Hang {
    int local_rank = 0;
    absl::Duration stalled_for;
    absl::Duration longest_step;  // of the job
    Phase phase = Phase::kOther;
    // All ranks of this node that are stalled wait for peers, this one too: the cause may well be
    // on another node.
    bool waits_for_peers = false;
    int64_t step = -1;  // its last; -1: none in this generation
  };

  explicit HangDetector(const Options& options);

  // A generation of the job starts, on so many nodes: forgets the ranks, keeps what was learned.
  void Begin(absl::Time now, int nodes);

  void Observe(int local_rank, const HealthPage::Snapshot& page, absl::Time now);

  // The process of `local_rank` has ended: it is not watched any more in this generation.
  void Forget(int local_rank);

  // Whom to call hung at `now`; nullopt: nobody. The same answer until the next Observe or Begin.
  std::optional<Hang> Check(absl::Time now) const;

 private:
  struct Rank {
    HealthPage::Snapshot page;
    absl::Time since;      // when it last got on
    bool is_slow = false;  // what it is doing has the slow limit
    absl::Time observed;
    absl::Time commit_after;  // its last commit was not before
  };

  bool IsOn() const;
  // Whether a rank of this node interrupts training, so that the others may be waiting for it.
  bool SomebodyIsSlow() const;
  absl::Duration Limit(const Rank& rank) const;
  absl::Time Stamp(int64_t monotonic_ns, absl::Time now) const;
  void Learn(Rank& rank, const HealthPage::Snapshot& page, absl::Time now);

  const Options options_;
  int nodes_ = 1;
  absl::Time begin_ = absl::InfinitePast();
  absl::Time looked_ = absl::InfinitePast();  // the last time we were told
  // What was before does not count as a stall: a gap in what we were told, a rank that interrupted
  // the training of all.
  absl::Time counted_since_ = absl::InfinitePast();
  std::map<int, Rank> ranks_;
  std::set<int> attached_;  // local ranks that have ever attached

  // Learned.
  int64_t earlier_steps_ = 0;     // in earlier generations
  int64_t generation_steps_ = 0;  // in this one, by the rank that made the most
  absl::Duration longest_step_ = absl::ZeroDuration();
};

// "made no step for 42s, in backward; the longest step took 1.2s": what follows a rank's name.
std::string DescribeHang(const HangDetector::Hang& hang);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_HEALTH_HANG_DETECTOR_H_
