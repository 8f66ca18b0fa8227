#ifndef DDP_ITERATION_TIMER_H_
#define DDP_ITERATION_TIMER_H_

#include <cstdint>

#include "absl/status/status.h"

namespace ddp::internal {

// Where the time of a training step goes, measured in a sample of the iterations: every one of the
// first 10, then each whose number is divisible by the sample rate.
//
// It is told the time, and what happened, in this order:
//
//   StartIteration      a synchronized forward begins
//   StartBackward       that forward has returned (its backward is to come)
//   StartCommunication  the first bucket is on its way; later calls change nothing
//   EndCompute          the backward has computed its last gradient
//   EndCommunication    every bucket has arrived: this makes the sample
//
// An iteration in which one is missing (a forward without backward, an exception) is no sample.
// Ask active() first, and read the clock only if it says so: what is not sampled costs one branch.
//
// Thread-compatible. Times are in nanoseconds of any clock that does not go back.
class IterationTimer {
 public:
  static constexpr int64_t kFirstIterations = 10;
  static constexpr int64_t kDefaultSampleRate = 100;

  struct Durations {
    int64_t forward_compute = 0;   // start of the forward to its end
    int64_t backward_compute = 0;  // end of the forward to the last gradient
    int64_t backward_comm = 0;     // first bucket sent to last bucket received
    // The part of backward_comm during which gradients were still being computed.
    int64_t backward_compute_comm_overlap = 0;
  };

  struct Stamps {
    int64_t forward_compute_start = 0;
    int64_t backward_compute_start = 0;
    int64_t backward_comm_start = 0;
    int64_t backward_compute_end = 0;
    int64_t backward_comm_end = 0;
  };

  // From the next iteration on. kInvalidArgument: below 1.
  absl::Status SetSampleRate(int64_t rate);

  // Begins an iteration; returns active(). `iteration` counts from 1. A number that is not sampled
  // needs no `now`, so IsSampled() may be asked before the clock is.
  bool StartIteration(int64_t iteration, int64_t now);
  bool IsSampled(int64_t iteration) const;

  // Whether the current iteration is sampled and still complete so far.
  bool active() const { return next_ != Event::kNone; }

  void StartBackward(int64_t now);
  void StartCommunication(int64_t now);
  void EndCompute(int64_t now);
  void EndCommunication(int64_t now);

  int64_t samples() const { return samples_; }

  // Of the newest sample; zeros when there is none.
  const Durations& last() const { return last_; }
  const Stamps& stamps() const { return last_stamps_; }

  // Means over all samples; zeros when there is none.
  Durations average() const;

  // Sum of overlap by sum of communication, over all samples: 1 when communication is hidden whole
  // behind the computation of gradients. 0 when there is no sample.
  double overlap_ratio() const;

 private:
  enum class Event { kNone, kBackward, kCommunication, kCompute, kCommunicationEnd };

  void Advance(Event event, Event next, int64_t now, int64_t* stamp);

  int64_t rate_ = kDefaultSampleRate;
  Event next_ = Event::kNone;  // what has to come
  Stamps stamps_;              // of the iteration that runs
  int64_t samples_ = 0;
  Stamps last_stamps_;
  Durations last_;
  Durations sum_;
};

}  // namespace ddp::internal

#endif  // DDP_ITERATION_TIMER_H_
