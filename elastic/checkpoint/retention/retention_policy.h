#ifndef DDP_ELASTIC_CHECKPOINT_RETENTION_RETENTION_POLICY_H_
#define DDP_ELASTIC_CHECKPOINT_RETENTION_RETENTION_POLICY_H_

#include <cstdint>

namespace ddp::elastic {

// The checkpoints of a run that stay on disk. A checkpoint stays when one of keep_last, keep_every
// and keep_best names it. max_bytes then bounds the sum of those that stay. The newest checkpoint
// always stays.
struct RetentionPolicy {
  static constexpr int64_t kAll = INT64_MAX;

  // The newest N, >= 1. kAll: every checkpoint stays, unless max_bytes removes it.
  int64_t keep_last = 3;

  // Also each checkpoint whose step is a multiple of this number of steps; of several generations
  // the latest. 0: none.
  int64_t keep_every = 0;

  // Also the K checkpoints with the best TrainingState::metric; of equal ones the newer. A
  // checkpoint without a metric, or with NaN, is not among them. 0: none.
  int64_t keep_best = 0;
  enum class Best { kLowest, kHighest };
  Best best_is = Best::kLowest;

  // The most bytes of all checkpoints together. Above it the oldest checkpoint goes first. The best
  // K go only when no other one is left. 0: no bound. While a save is written, its bytes come on
  // top: a checkpoint is removed only after the next one is complete.
  uint64_t max_bytes = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_RETENTION_RETENTION_POLICY_H_
