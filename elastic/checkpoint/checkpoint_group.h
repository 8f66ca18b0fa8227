#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINT_GROUP_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINT_GROUP_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace ddp::elastic {

// The ranks that save and restore together, and the one thing they do together: all bring a text to
// rank 0, which answers all with one. That costs O(ranks) messages, and it is a barrier: nobody has
// the answer before everybody has brought his text.
//
// Thread-compatible. The ranks make the same saves and restores in the same order, and within each
// the same calls.
class CheckpointGroup {
 public:
  // Runs on rank 0 alone; values[r] is what rank r brought.
  using Decision = std::function<std::string(const std::vector<std::string>& values)>;

  virtual ~CheckpointGroup() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // A save or a restore begins. From now on nothing is read that a rank has brought or answered in
  // an earlier one, whether or not that one failed.
  virtual void StartAttempt() {}

  // This rank gets on with what the others may be waiting for: their waits go on. Cheap enough to
  // be called for every block that is written.
  virtual void Progress() {}

  // Errors: kDeadlineExceeded, which says who was missing and for how long; kUnavailable, the way
  // to the others is broken. After an error the ranks go on with StartAttempt().
  virtual absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) = 0;
};

// A world of one.
class SoloGroup final : public CheckpointGroup {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  absl::StatusOr<std::string> Decide(const std::string& value, const Decision& decide) override {
    return decide({value});
  }
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINT_GROUP_H_
