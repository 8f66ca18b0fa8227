#ifndef DDP_ELASTIC_CHECKPOINT_STORE_GROUP_H_
#define DDP_ELASTIC_CHECKPOINT_STORE_GROUP_H_

#include <cstdint>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/time/time.h"
#include "elastic/checkpoint/checkpoint_group.h"

namespace ddp::elastic {

// A CheckpointGroup over a c10d::Store. Keys are deleted as the rounds go by.
class StoreGroup final : public CheckpointGroup {
 public:
  struct Options {
    c10::intrusive_ptr<c10d::Store> store;
    int rank = 0;
    int world_size = 1;
    std::string prefix;      // of all keys; equal on all ranks, and no other group's
    absl::Duration timeout;  // of one wait for the others
  };

  explicit StoreGroup(Options options);

  int rank() const override { return options_.rank; }
  int world_size() const override { return options_.world_size; }

  // See CheckpointGroup. Of the store's exceptions nothing comes through: they are kUnavailable, or
  // kDeadlineExceeded when the time is up.
  absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) override;

 private:
  std::string ValueKey(int64_t round, int rank) const;
  std::string AnswerKey(int64_t round) const;
  void StartInstance();
  std::string Lead(const std::string& value, const Decision& decide);
  std::string Follow(const std::string& value);
  std::string WaitFor(const std::string& key, absl::Time deadline);
  void DeleteRound(int64_t round);
  std::string Missing();

  const Options options_;
  int64_t instance_ = 0;  // counts the groups of this prefix in one store; 0: not known yet
  int64_t round_ = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_STORE_GROUP_H_
