#ifndef DDP_ELASTIC_CHECKPOINT_GROUP_STORE_GROUP_H_
#define DDP_ELASTIC_CHECKPOINT_GROUP_STORE_GROUP_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"
#include "base/clock.h"
#include "elastic/checkpoint/group/checkpoint_group.h"

namespace ddp::elastic {

// A CheckpointGroup over a c10d::Store. An attempt is one save or restore. It has one or more
// rounds; each round is one call of Decide(). All ranks make the same attempts, so each rank counts
// them by itself. The keys of an attempt contain the group's number and the attempt's: a rank that
// is late for an attempt never reads or writes keys of the next one.
//
// Rank 0 waits for the keys of all ranks together, and reads them with one multiGet() where the
// store has it. A rank deletes a key once it knows that no rank reads it any more. The last
// answer and the counters stay in the store. Thread-compatible.
class StoreGroup final : public CheckpointGroup {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int world_size = 1;
    std::string prefix;  // of all keys; equal on all ranks. Two groups at the same time need two.
    absl::Duration timeout;                       // of one wait without progress of any rank
    std::function<void()> on_progress = nullptr;  // called in a wait while other ranks progress
  };

  explicit StoreGroup(Options options);

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }

  void StartAttempt() override;
  void Progress() override;

  // See CheckpointGroup. Exceptions of the store become kUnavailable, or kDeadlineExceeded after
  // `timeout`. When rank 0 fails, it answers late ranks with its error.
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
  int64_t instance_ = 0;  // the number of this group among those of its prefix; 0: not known yet
  int64_t attempt_ = 0;   // of this group; 0: none has begun
  int64_t round_ = 0;     // of the attempt
  bool failed_ = false;   // true: the attempt has failed
  absl::Time told_ = absl::InfinitePast();  // the last progress that this rank reported
  std::vector<std::string> stale_keys_;     // this rank's keys that no rank reads in a later round
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_GROUP_STORE_GROUP_H_
