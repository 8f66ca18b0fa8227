#ifndef DDP_ELASTIC_CHECKPOINT_STORE_GROUP_H_
#define DDP_ELASTIC_CHECKPOINT_STORE_GROUP_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"
#include "base/clock.h"
#include "elastic/checkpoint/checkpoint_group.h"

namespace ddp::elastic {

// A CheckpointGroup over a c10d::Store. Every key has the number of the attempt, which each rank
// counts for itself: the ranks make the same attempts. A rank that was late for one meets nobody's
// keys of the next. Rank 0 waits for the keys of all ranks in one wait and reads them by one
// multiGet(). Every rank deletes its own keys as the rounds go by.
class StoreGroup final : public CheckpointGroup {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int world_size = 1;
    std::string prefix;      // of all keys; equal on all ranks, and no other group's
    absl::Duration timeout;  // of one wait for others of whom none makes progress
    std::function<void()> on_progress = nullptr;  // called while this rank waits for others that do
  };

  explicit StoreGroup(Options options);

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }

  void StartAttempt() override;
  void Progress() override;

  // See CheckpointGroup. Of the store's exceptions nothing comes through: they are kUnavailable, or
  // kDeadlineExceeded when the time is up. When rank 0 gives up, the late ranks are told.
  absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) override;

 private:
  std::string AttemptKey(const std::string& name) const;
  std::string RoundKey(const std::string& name) const;
  std::string ValueKey(int rank) const;
  void StartInstance();
  std::string Lead(const std::string& value, const Decision& decide);
  absl::StatusOr<std::string> Follow(const std::string& value);
  void Await(const std::vector<std::string>& keys);
  std::vector<std::string> Read(const std::vector<std::string>& keys);
  void GiveUp(const absl::Status& status);
  void DeleteStaleKeys();
  std::string Missing();

  const Options options_;
  const MonotonicClock clock_;
  int64_t instance_ = 0;  // counts the groups of this prefix in one store; 0: not known yet
  int64_t attempt_ = 0;   // of this group; 0: none has begun
  int64_t round_ = 0;     // of the attempt
  bool failed_ = false;   // the attempt
  absl::Time told_ = absl::InfinitePast();  // the last progress
  std::vector<std::string> stale_keys_;     // our own, which nobody reads in a later round
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_STORE_GROUP_H_
