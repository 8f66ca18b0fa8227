// What a checkpoint must know of the last passes of a process on devices with streams, where an
// optimizer steps before the sums of its gradients are known to be complete. Free of LibTorch.
// Thread-safe.
#ifndef DDP_COMM_LAST_PASSES_H_
#define DDP_COMM_LAST_PASSES_H_

#include <memory>

#include "ddp/comm/device_proof.h"

namespace ddp::internal {

// Notes the proof of a group's last pass, in place of the one before. The note ends with `group`,
// an object that lives as long as the group.
void NoteLastPass(const std::shared_ptr<const void>& group, DeviceProof proof);

// Blocks until the last pass of every group is proven or lost, which takes no longer than the
// timeouts of the groups. Returns false when one was lost: what optimizers have made of its
// gradients must not be kept.
bool LastPassesAreProven();

// Forgets the notes: a checkpoint has replaced what optimizers have made.
void ForgetLastPasses();

}  // namespace ddp::internal

#endif  // DDP_COMM_LAST_PASSES_H_
