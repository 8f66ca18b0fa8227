#ifndef DDP_ELASTIC_CHECKPOINT_FOLDER_RETENTION_SWEEP_H_
#define DDP_ELASTIC_CHECKPOINT_FOLDER_RETENTION_SWEEP_H_

#include <map>
#include <optional>
#include <set>
#include <string>

#include "elastic/checkpoint/folder/checkpoint_owner.h"
#include "elastic/checkpoint/folder/checkpoint_storage.h"
#include "elastic/checkpoint/format/checkpoint_id.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/retention/retention_policy.h"
#include "elastic/checkpoint/retention/select_expired.h"

namespace ddp::elastic {

// Removes the expired checkpoints of a run after each commit. Belongs to the rank that commits.
//
// A checkpoint is of this run when its manifest has the owner's run ID. A job without an ID of its
// own ("" or torchrun's "none") shares that ID with others, so only this owner's checkpoints count:
// those with its nonce. A checkpoint with a damaged or missing manifest is of no run and stays.
//
// A checkpoint that a process reads is known by the lock of CheckpointStorage::LockForReading(),
// which every restore holds, and which ends with its process. It stays until a later commit. On a
// file system without locks a reader may lose its checkpoint; a restore then lists the folder again
// and reads the newer one, whose commit came first.
//
// No failure is an error of the save: the log names it once, and the next commit tries again.
// Thread-compatible.
class RetentionSweep {
 public:
  // `storage` must outlive this.
  RetentionSweep(CheckpointStorage* storage, const RetentionPolicy& policy)
      : storage_(storage), policy_(policy) {}

  // Removes what SelectExpired() selects. `committed`: the checkpoint that `owner` has just
  // committed.
  void AfterCommit(const CheckpointOwner& owner, const CheckpointId& committed);

 private:
  std::optional<FinishedCheckpoint> Find(const CheckpointOwner& owner, const CheckpointId& id);
  void SayOnce(const std::string& line);

  CheckpointStorage* const storage_;
  const RetentionPolicy policy_;
  // By ID, what the manifest says; nullopt: of another run. A committed manifest never changes.
  std::map<CheckpointId, std::optional<FinishedCheckpoint>> known_;
  std::set<std::string> said_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FOLDER_RETENTION_SWEEP_H_
