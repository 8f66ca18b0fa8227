#ifndef DDP_ELASTIC_CHECKPOINT_RETENTION_SELECT_EXPIRED_H_
#define DDP_ELASTIC_CHECKPOINT_RETENTION_SELECT_EXPIRED_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "elastic/checkpoint/format/checkpoint_id.h"
#include "elastic/checkpoint/retention/retention_policy.h"

namespace ddp::elastic {

// A complete checkpoint of this run.
struct FinishedCheckpoint {
  CheckpointId id;
  uint64_t bytes = 0;
  std::optional<double> metric;
};

// A checkpoint that goes.
struct ExpiredCheckpoint {
  CheckpointId id;
  std::string reason;  // the options that decide: "keep_last is 3"

  friend bool operator==(const ExpiredCheckpoint&, const ExpiredCheckpoint&) = default;
};

// Decides which checkpoints `policy` removes after `newest` was committed. Returns them oldest
// first. Pure.
//
// `finished`: the run's checkpoints, in any order, each once. Without `newest` among them none
// goes. A checkpoint with a greater ID than `newest` never goes and never counts: the run has
// continued from an older checkpoint, and must not take the greater one for its own progress.
std::vector<ExpiredCheckpoint> SelectExpired(const RetentionPolicy& policy,
                                             const std::vector<FinishedCheckpoint>& finished,
                                             const CheckpointId& newest);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_RETENTION_SELECT_EXPIRED_H_
