// Free of LibTorch.
#ifndef DDP_COMM_MEETING_ATTEMPT_NAME_H_
#define DDP_COMM_MEETING_ATTEMPT_NAME_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/comm/meeting/group_store.h"

namespace ddp::internal {

// Names one attempt of a job whose store outlives the attempt, as torchrun's does: keys of an
// earlier attempt must not be taken for keys of this one. No variable of torchrun is equal on all
// ranks and new in each attempt, so rank 0 makes the name up.
//
// Returns the same name on all ranks, and another one in each attempt. Blocks until all ranks have
// called it. All processes of an earlier attempt must have ended, at any point of this function.
//
// Method. Each other rank leaves a random number under its rank, and waits for an answer to that
// number. Rank 0 answers what it finds under each rank, until the rank has confirmed: what an
// earlier attempt has left is answered too, and nobody confirms it. Rank 0 removes the keys.
//
// kDeadlineExceeded, which names a rank that did not come, after `timeout`. Throws what the store
// throws.
absl::StatusOr<std::string> AgreeOnAttempt(GroupStore& store, int rank, int size,
                                           absl::Duration timeout);

}  // namespace ddp::internal

#endif  // DDP_COMM_MEETING_ATTEMPT_NAME_H_
