#ifndef DDP_ELASTIC_CHECKPOINT_INSPECT_PRUNE_H_
#define DDP_ELASTIC_CHECKPOINT_INSPECT_PRUNE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/inspect/folder_listing.h"
#include "elastic/checkpoint/inspect/verification.h"

namespace ddp::elastic {

// What a prune does with each checkpoint, in the order of the listing.
struct PruneDecision {
  enum class Fate {
    kKeep,    // one of the newest undamaged ones
    kLeave,   // not complete: a prune does not judge it
    kRemove,  // complete, and older than the kept ones
  };
  Fate fate = Fate::kLeave;
  std::string reason;
};

// Decides which checkpoints to remove: the complete ones behind the newest `keep_last` complete
// ones. Checkpoints that are not complete are neither counted nor removed. keep_last is at least 1,
// else a CHECK fails. Pure.
//
// The newest complete checkpoint must be known to be readable: the caller verifies it, and lists it
// as kDamaged when it is not.
std::vector<PruneDecision> DecidePrune(const std::vector<ListedCheckpoint>& newest_first,
                                       int keep_last);

struct PruneOptions {
  int keep_last = 1;
  bool dry_run = false;  // decides, and removes nothing
};

struct PruneResult {
  struct Entry {
    ListedCheckpoint checkpoint;
    PruneDecision decision;
    absl::Status removed;  // of kRemove: why it is still there, entirely or in part
  };
  std::vector<Entry> entries;  // newest first
  bool dry_run = false;

  bool all_removed() const;
};

// Removes older complete checkpoints from the folder `root`.
//
// First reads and verifies the newest complete checkpoint, and while that is damaged the next one,
// so that a checkpoint that can be restored always stays. `progress` is about that reading.
//
// A checkpoint is renamed to a hidden name, ".del-step-...", and the folder is synced: from then on
// it is gone as a whole, also after a power cut. Then its manifest is removed and synced, then its
// files. A prune that was stopped in between leaves a hidden folder, which the next prune or the
// next generation of the job removes. A checkpoint's folder with an entry that no save makes, such
// as a link or a user's file, is not touched.
//
// A checkpoint that a restore reads stays: the restore holds a lock on its manifest. So a prune may
// run beside a job that saves and restores. Errors: those of ListFolder(), and of reading while it
// is decided. An error of one removal is in its entry.
absl::StatusOr<PruneResult> Prune(FileSystem& file_system, const std::string& root,
                                  const PruneOptions& options,
                                  const InspectProgress& progress = nullptr);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_INSPECT_PRUNE_H_
