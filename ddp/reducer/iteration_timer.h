#ifndef DDP_REDUCER_ITERATION_TIMER_H_
#define DDP_REDUCER_ITERATION_TIMER_H_

#include <cstdint>

#include "absl/status/status.h"

namespace ddp::internal {

// Measures the phases of a training step in a sample of the iterations: in each of the first 10,
// then in each whose number is divisible by the sample rate.
//
// The caller reports these events with their times, in this order:
//
//   StartIteration      a synchronized forward begins
//   StartBackward       that forward has returned; its backward follows
//   StartCommunication  the first bucket has started; later calls change nothing
//   EndCompute          the backward has computed its last gradient
//   EndCommunication    every bucket has arrived: the sample is complete
//
// An iteration without one of them (a forward without backward, an exception) is not a sample. Ask
// active() first, and read the clock only when it is true: an unsampled iteration then costs one
// branch.
//
// Owned by a ModelSynchronizer. Thread-compatible. Times are nanoseconds of any clock that never
// goes back.
class IterationTimer {
 public:
  static constexpr int64_t kFirstIterations = 10;
  static constexpr int64_t kDefaultSampleRate = 100;

  struct Durations {
    int64_t forward_compute = 0;   // start of the forward to its end
    int64_t backward_compute = 0;  // end of the forward to the last gradient
    int64_t backward_comm = 0;     // first bucket sent to last bucket received
    // The part of backward_comm in which gradients were still being computed.
    int64_t backward_compute_comm_overlap = 0;
  };

  struct Stamps {
    int64_t forward_compute_start = 0;
    int64_t backward_compute_start = 0;
    int64_t backward_comm_start = 0;
    int64_t backward_compute_end = 0;
    int64_t backward_comm_end = 0;
  };

  // Sets the rate from the next iteration on. kInvalidArgument: below 1.
  absl::Status SetSampleRate(int64_t rate);

  // Begins an iteration and returns active(). `iteration` counts from 1. For an iteration that is
  // not sampled, `now` is not needed: ask IsSampled() before reading the clock.
  bool StartIteration(int64_t iteration, int64_t now);
  bool IsSampled(int64_t iteration) const;

  // Returns true when the current iteration is sampled and no event is missing so far.
  bool active() const { return next_ != Event::kNone; }

  void StartBackward(int64_t now);
  void StartCommunication(int64_t now);
  void EndCompute(int64_t now);
  void EndCommunication(int64_t now);

  int64_t samples() const { return samples_; }

  // Times of the newest sample; zeros when there is none.
  const Durations& last() const { return last_; }
  const Stamps& stamps() const { return last_stamps_; }

  // Returns the means over all samples; zeros when there is none.
  Durations average() const;

  // Returns the sum of overlap divided by the sum of communication, over all samples. 1: all
  // communication overlaps the computation of gradients. 0 when there is no sample.
  double overlap_ratio() const;

 private:
  enum class Event { kNone, kBackward, kCommunication, kCompute, kCommunicationEnd };

  void Advance(Event event, Event next, int64_t now, int64_t* stamp);

  int64_t rate_ = kDefaultSampleRate;
  Event next_ = Event::kNone;  // the next expected event
  Stamps stamps_;              // of the current iteration
  int64_t samples_ = 0;
  Stamps last_stamps_;
  Durations last_;
  Durations sum_;
};

}  // namespace ddp::internal

#endif  // DDP_REDUCER_ITERATION_TIMER_H_
