#include "ddp/reducer/iteration_timer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace ddp::internal {

absl::Status IterationTimer::SetSampleRate(int64_t rate) {
  if (rate < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("sample rate ", rate,
                     " must be at least 1: every how many iterations the step's times are taken"));
  }
  rate_ = rate;
  return absl::OkStatus();
}

bool IterationTimer::IsSampled(int64_t iteration) const {
  return iteration > 0 && (iteration <= kFirstIterations || iteration % rate_ == 0);
}

bool IterationTimer::StartIteration(int64_t iteration, int64_t now) {
  next_ = IsSampled(iteration) ? Event::kBackward : Event::kNone;
  stamps_.forward_compute_start = now;
  return active();
}

// An event out of order ends the sample, whose times would be meaningless.
void IterationTimer::Advance(Event event, Event next, int64_t now, int64_t* stamp) {
  if (!active()) return;
  next_ = next_ == event ? next : Event::kNone;
  *stamp = now;
}

void IterationTimer::StartBackward(int64_t now) {
  Advance(Event::kBackward, Event::kCommunication, now, &stamps_.backward_compute_start);
}

void IterationTimer::StartCommunication(int64_t now) {
  if (next_ == Event::kCompute) return;  // a further bucket
  Advance(Event::kCommunication, Event::kCompute, now, &stamps_.backward_comm_start);
}

void IterationTimer::EndCompute(int64_t now) {
  Advance(Event::kCompute, Event::kCommunicationEnd, now, &stamps_.backward_compute_end);
}

void IterationTimer::EndCommunication(int64_t now) {
  const bool complete = next_ == Event::kCommunicationEnd;
  Advance(Event::kCommunicationEnd, Event::kNone, now, &stamps_.backward_comm_end);
  if (!complete) return;
  last_stamps_ = stamps_;
  last_.forward_compute = stamps_.backward_compute_start - stamps_.forward_compute_start;
  last_.backward_compute = stamps_.backward_compute_end - stamps_.backward_compute_start;
  last_.backward_comm = stamps_.backward_comm_end - stamps_.backward_comm_start;
  last_.backward_compute_comm_overlap = stamps_.backward_compute_end - stamps_.backward_comm_start;
  sum_.forward_compute += last_.forward_compute;
  sum_.backward_compute += last_.backward_compute;
  sum_.backward_comm += last_.backward_comm;
  sum_.backward_compute_comm_overlap += last_.backward_compute_comm_overlap;
  ++samples_;
}

IterationTimer::Durations IterationTimer::average() const {
  const int64_t count = std::max<int64_t>(1, samples_);
  return {.forward_compute = sum_.forward_compute / count,
          .backward_compute = sum_.backward_compute / count,
          .backward_comm = sum_.backward_comm / count,
          .backward_compute_comm_overlap = sum_.backward_compute_comm_overlap / count};
}

double IterationTimer::overlap_ratio() const {
  if (sum_.backward_comm <= 0) return 0;
  return static_cast<double>(sum_.backward_compute_comm_overlap) /
         static_cast<double>(sum_.backward_comm);
}

}  // namespace ddp::internal
