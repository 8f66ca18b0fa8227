#ifndef DDP_ELASTIC_CHECKPOINT_GROUP_IN_PROCESS_GROUP_H_
#define DDP_ELASTIC_CHECKPOINT_GROUP_IN_PROCESS_GROUP_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "elastic/checkpoint/group/checkpoint_group.h"

namespace ddp::elastic {

// Carries out Decide() between the threads of a test, where each thread plays one rank of a group:
// collects the ranks' values, and gives all ranks the answer of rank 0. Each rank has an
// InProcessGroup, which calls this object. A rank that gets no notification for kTimeout returns
// kDeadlineExceeded. Thread-safe.
class InProcessMeeting {
 public:
  explicit InProcessMeeting(int world_size) : values_(static_cast<size_t>(world_size)) {}

  int world_size() const { return static_cast<int>(values_.size()); }

  absl::StatusOr<std::string> Decide(int rank, const std::string& value,
                                     const CheckpointGroup::Decision& decide) {
    MutexLock lock(mutex_);
    const int64_t round = round_;
    values_[static_cast<size_t>(rank)] = value;
    ++arrived_;
    condition_.NotifyAll();
    if (rank == 0) {
      while (arrived_ < world_size()) {
        if (!condition_.WaitFor(mutex_, kTimeout)) return TimedOut();
      }
      answer_ = decide(values_);
      arrived_ = 0;
      ++round_;
      condition_.NotifyAll();
      return answer_;
    }
    while (round_ == round) {
      if (!condition_.WaitFor(mutex_, kTimeout)) return TimedOut();
    }
    return answer_;
  }

 private:
  static constexpr absl::Duration kTimeout = absl::Seconds(60);

  static absl::Status TimedOut() { return absl::DeadlineExceededError("a rank did not come"); }

  Mutex mutex_;
  CondVar condition_;
  std::vector<std::string> values_;
  int arrived_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string answer_ ABSL_GUARDED_BY(mutex_);
};

// The CheckpointGroup of one such rank. The caller owns `meeting`, which must outlive this.
class InProcessGroup final : public CheckpointGroup {
 public:
  InProcessGroup(InProcessMeeting* meeting, int rank) : meeting_(meeting), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return meeting_->world_size(); }
  absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) override {
    return meeting_->Decide(rank_, value, decide);
  }

 private:
  InProcessMeeting* const meeting_;
  const int rank_;
};

// Runs `body` on one thread per rank, concurrently. Blocks until all threads have ended.
inline void RunRanks(int world_size, const std::function<void(CheckpointGroup&)>& body) {
  InProcessMeeting meeting(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([&meeting, &body, rank] {
      InProcessGroup group(&meeting, rank);
      body(group);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_GROUP_IN_PROCESS_GROUP_H_
