#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_CHECKPOINT_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/checkpoint_group.h"
#include "elastic/checkpoint/checkpoint_storage.h"
#include "elastic/checkpoint/manifest.h"
#include "elastic/checkpoint/tensor_view.h"

namespace ddp::elastic {

// What one rank brings to a save.
struct CheckpointContents {
  // All but world_size, files, tensors and state_hash, which the save fills in. Rank 0's counts.
  Manifest description;

  std::vector<TensorView> buffers;     // the model's; rank 0's count
  std::vector<TensorView> parameters;  // the model's; equal on all ranks
  std::vector<TensorView> optimizer;   // equal on all ranks
  std::vector<TensorView> extra;       // this rank's own
};

struct SaveOptions {
  CheckpointOwner owner;
  uint64_t file_bytes_max = uint64_t{1} << 30;
  // Asked on rank 0 once the ranks agree. An error ends the save on every rank, with nothing
  // written. Null: never.
  std::function<absl::Status()> hold_back = nullptr;
};

// Saves one checkpoint and returns its folder. Every rank of `group` calls it; all get the same
// folder or the same error. `contents` may be an error: a rank that cannot save takes part, so that
// the others learn why. `storage` is used for committing on rank 0 only. Errors: those of the
// storage and the group, kInvalidArgument (ranks that do not bring the same state), and that of
// `contents`. After an error there is no checkpoint, or (when only the answer was lost) a whole
// one.
absl::StatusOr<std::string> SaveCheckpoint(FileSystem& file_system, CheckpointStorage& storage,
                                           CheckpointGroup& group, const SaveOptions& options,
                                           const absl::StatusOr<CheckpointContents>& contents);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_CHECKPOINT_H_
