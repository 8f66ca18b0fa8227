#ifndef DDP_ELASTIC_CHECKPOINT_GROUP_CHECKPOINT_GROUP_H_
#define DDP_ELASTIC_CHECKPOINT_GROUP_CHECKPOINT_GROUP_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::elastic {

// Connects the ranks that save and restore together. Its one collective is Decide(): every rank
// sends a text to rank 0, and rank 0 sends one answer to all. Decide() costs O(ranks) messages and
// is a barrier: no rank has the answer before every rank has sent its text.
//
// Thread-compatible. All ranks make the same saves and restores in the same order, and the same
// calls within each.
class CheckpointGroup {
 public:
  // Runs on rank 0 alone; values[r] is the text of rank r.
  using Decision = std::function<std::string(const std::vector<std::string>& values)>;

  virtual ~CheckpointGroup() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // kShort: a save, which is skipped when the ranks cannot be reached for a few seconds, because
  // training waits for it. kLong: a restore, without which there is no training.
  enum class Patience { kShort, kLong };

  // Begins a save or a restore. Decide() then ignores the texts and answers of earlier saves and
  // restores, failed or not.
  virtual void StartAttempt(Patience /*patience*/) {}

  // Restarts the timeout of the ranks that wait for this rank. Cheap enough to be called for every
  // block that is written.
  virtual void Progress() {}

  // Ends the attempt for this rank, which has an error and does not wait for the others. They get
  // the error from their Decide() where the group can tell them.
  virtual void Leave(const absl::Status& /*error*/) {}

  // Sends `value` to rank 0. Blocks until every rank has called it, and returns rank 0's answer,
  // the result of its `decide`.
  // Errors: kDeadlineExceeded, naming the missing ranks and the time; kUnavailable when the other
  // ranks cannot be reached. An error of one rank ends this Decide() or the next one of the attempt
  // on every rank. When there is no next one, the other ranks may have the answer.
  // After an error, call StartAttempt() before the next Decide().
  virtual absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) = 0;
};

// The group of a world of one rank.
class SoloGroup final : public CheckpointGroup {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) override {
    return decide({value});
  }
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_GROUP_CHECKPOINT_GROUP_H_
