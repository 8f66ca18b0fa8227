#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_CHECKPOINT_LOOKUP_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_CHECKPOINT_LOOKUP_H_

#include <string>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/folder/checkpoint_owner.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"

namespace ddp::elastic {

// One rank looks at the folder of checkpoints by itself, without the other ranks. Each function
// tries again, as `options` states, after an obstacle that may pass, such as a lack of descriptors
// or a file server that restarts. Errors: those of CheckpointStorage, when the obstacle stays.

// Returns true when the folder holds a checkpoint, complete or not.
absl::StatusOr<bool> HasCheckpoint(const CheckpointStorage& storage,
                                   const LoadOptions& options = {});

// Returns the run ID in the newest manifest that is neither damaged nor missing. Empty when there
// is none.
absl::StatusOr<std::string> NewestRunId(const CheckpointStorage& storage,
                                        const LoadOptions& options = {});

// Returns true when the newest checkpoint is of the job of `mine`: the run IDs are equal, and
// MayBeOfOneJob() accepts the folder's owner. `ask` gives the token of this job; null: the job has
// no rendezvous. `ask` is called only when the owner has a token, and again while there is no
// answer.
//
// Errors: also kUnavailable when the owner has a token and `ask` gives no answer: the instances
// alone do not show whether the jobs are the same. kFailedPrecondition when `ask` answers that the
// generation is over.
absl::StatusOr<bool> HoldsOwnCheckpoints(const CheckpointStorage& storage, CheckpointOwner mine,
                                         const AskRendezvous& ask, const LoadOptions& options = {});

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_CHECKPOINT_LOOKUP_H_
