#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_CHECKPOINT_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/tensor_view.h"
#include "elastic/checkpoint/group/checkpoint_group.h"
#include "elastic/checkpoint/save_load/load_checkpoint.h"

namespace ddp::elastic {

// The state that one rank passes to SaveCheckpoint(). The caller owns the memory of the views. A
// view needs no memory when another rank writes the tensor: see WrittenTensors().
struct CheckpointContents {
  // The manifest without world_size, files, tensors and state_hash, which SaveCheckpoint() fills
  // in. Rank 0's description is saved.
  Manifest description;

  std::vector<TensorView> buffers;     // of the model; rank 0's are saved
  std::vector<TensorView> parameters;  // of the model; equal on all ranks
  std::vector<TensorView> optimizer;   // equal on all ranks
  std::vector<TensorView> extra;       // this rank's own
};

struct SaveOptions {
  CheckpointOwner owner;
  uint64_t file_bytes_max = uint64_t{1} << 30;
  // Called on rank 0 after the ranks agree on the state. An error ends the save on every rank, with
  // nothing written. Null: no call.
  std::function<absl::Status()> hold_back = nullptr;
  // True: earlier saves or loads have shown that all ranks have the same folder. False: ranks that
  // do not see rank 0's folder are kFailedPrecondition, because a retry cannot help.
  bool folder_is_shared = false;
  LoadOptions wait_for_folder = {};  // until rank 0's new folder appears to this rank
  // Called on rank 0 once the checkpoint is committed and every rank can learn of it. For
  // retention. Null: no call.
  std::function<void(const CheckpointId&)> after_commit = nullptr;
};

// Which tensors of the lists in CheckpointContents one rank writes, in their order.
struct WrittenShare {
  std::vector<bool> parameters;
  std::vector<bool> buffers;
  std::vector<bool> optimizer;
};

// Returns what the rank `rank` of `world_size` writes. Depends on names, types and sizes only, so
// the views need no values.
WrittenShare WrittenTensors(const CheckpointContents& contents, int rank, int world_size,
                            uint64_t file_bytes_max = SaveOptions().file_bytes_max);

// Saves one checkpoint and returns its folder. Collective over `group`: all ranks get the same
// folder or the same error. A rank that cannot save passes an error as `contents`, so that all
// ranks return it; with kAborted it returns at once, for the others may never come. Only rank 0
// uses `storage`.
//
// Errors: those of the storage, the file system, the group and `hold_back`; kInvalidArgument when
// the ranks have different states; kFailedPrecondition or kUnavailable when ranks do not see rank
// 0's folder, with the ranks and absolute paths; the error in any rank's `contents`.
// After an error there is no new checkpoint, or a complete one: when only rank 0's answer was lost,
// or when the sync after the checkpoint's renaming failed.
absl::StatusOr<std::string> SaveCheckpoint(FileSystem& file_system, CheckpointStorage& storage,
                                           CheckpointGroup& group, const SaveOptions& options,
                                           const absl::StatusOr<CheckpointContents>& contents);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_SAVE_CHECKPOINT_H_
