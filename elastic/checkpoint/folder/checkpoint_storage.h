#ifndef DDP_ELASTIC_CHECKPOINT_FOLDER_CHECKPOINT_STORAGE_H_
#define DDP_ELASTIC_CHECKPOINT_FOLDER_CHECKPOINT_STORAGE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/folder/checkpoint_owner.h"
#include "elastic/checkpoint/folder/owner_file.h"
#include "elastic/checkpoint/format/checkpoint_id.h"
#include "elastic/checkpoint/format/content_hash.h"
#include "elastic/checkpoint/format/manifest.h"
#include "elastic/checkpoint/format/safetensors_reader.h"

namespace ddp::elastic {

// Lists, reads, writes and removes the checkpoints in a job's folder, the root. At every moment
// each checkpoint in the root is complete, or detectably incomplete.
//
//   root/.owner                                    the owner: see OwnerFile
//   root/.tmp-step-000000001200.g0007.<nonce>/     being written, or left by an interrupted save
//   root/.del-step-000000001200.g0007.<nonce>/     being removed; also "expired", "not-whole"
//   root/step-000000001200.g0007/                  committed: appears by one rename
//
// Writing: every rank has a CheckpointStorage of the same root. Rank 0 alone calls Begin(),
// Commit() and Abandon(). Every rank writes its own files into the folder that Begin() returned,
// syncs each file, and then the folder. Commit() writes the manifest and renames the folder, which
// creates the checkpoint. No rank writes into a committed folder.
//
// Fencing: the first Begin() of an owner lists the work folders, claims the root (OwnerFile), and
// removes the listed folders. These belong to earlier claims, so a claimant that was suspended
// never removes the folder of a later claim. Every later Begin() and Commit() of an earlier claim
// fails: OwnerFile names another claim, or the work folder was renamed. An older generation of the
// same job cannot claim. Before they claim or rename anything, Begin() and Commit() ask the
// rendezvous, if there is one. They fail when it answers that the generation is over. When it does
// not answer, only the claim in the root decides.
//
// Removing: work folders (exact name of a WorkFolder), unused texts of claims, a damaged checkpoint
// that Commit() replaces, and a checkpoint that the caller passes to Remove(). In a folder, only
// plain files with the names of a save are removed (IsCheckpointFile), and the folder once it is
// empty. Links, foreign files and folders, and every other entry stay. The log names each of them
// once. An entry that cannot be removed does no harm, because it is no checkpoint. The next Begin()
// tries again.
//
// Durability of the root: each claim also syncs the folders above the root. An earlier process may
// have created one of them and died before the sync. Where a folder existed before and cannot be
// synced (no permission, a foreign file system), the claim goes on.
//
// Errors are those of FileSystem and OwnerFile. Also kFailedPrecondition when the generation is
// over, kDataLoss for damaged files, kInvalidArgument for a manifest that cannot be written, and
// kUnavailable when a file is not as it was written. Thread-compatible.
class CheckpointStorage {
 public:
  // `file_system` must outlive this. `ask`: may be null.
  CheckpointStorage(FileSystem* file_system, std::string root, AskRendezvous ask = nullptr);

  const std::string& root() const { return root_; }
  std::string Folder(const CheckpointId& id) const;

  // Returns the committed checkpoints, complete or not, newest first. Empty when there is no root.
  // Logs each other entry "step-..." once.
  absl::StatusOr<std::vector<CheckpointId>> List() const;

  struct StoredManifest {
    Manifest manifest;
    ContentHash hash;  // of its text
  };
  absl::StatusOr<StoredManifest> ReadManifest(const CheckpointId& id) const;

  // Reads one of the manifest's files and compares every byte with the manifest. kDataLoss names
  // the file and, where possible, the tensor.
  absl::StatusOr<LoadedFile> LoadFile(const Manifest& manifest, const FileRecord& file) const;

  // Returns the writer that claimed the root last. kNotFound when there is no claim or no root.
  absl::StatusOr<CheckpointOwner> Owner() const;

  // Returns true when `path` is a path in the root and no such file exists.
  bool IsMissing(const std::string& path) const;

  // Claims the root, and creates it where needed, unless `owner` has claimed it already. Logs a
  // warning when this object has claimed the root and the root, or its claim, is gone.
  absl::Status ClaimRoot(const CheckpointOwner& owner);

  // Claims the root, as ClaimRoot() does. Creates the
  // work folder for checkpoint `id` and returns the work folder's path. After an error there is no
  // work folder, or a later Begin() removes it.
  absl::StatusOr<std::string> Begin(const CheckpointOwner& owner, const CheckpointId& id);

  // Turns `writing_folder`, from Begin(), into the checkpoint `manifest.id`, and returns its path.
  // After OK the checkpoint survives a power cut. After an error the folder may still exist:
  // Abandon() it.
  // When a checkpoint of that ID exists:
  // - Complete, with the same state: stays, and its path is returned.
  // - Complete, with another state: stays, and the error is kAlreadyExists.
  // - Incomplete or damaged: is renamed and removed, and the new checkpoint takes its name.
  absl::StatusOr<std::string> Commit(const CheckpointOwner& owner,
                                     const std::string& writing_folder, const Manifest& manifest);

  // Locks checkpoint `id` against Remove() by any process, until the end of the lock or of the
  // process. For a reader: the checkpoint may be gone before the lock and must be read after it.
  // Returns null where the file system has no locks. kUnavailable: the checkpoint is being removed.
  absl::StatusOr<std::unique_ptr<FileLock>> LockForReading(const CheckpointId& id) const;

  // Returns true when the root has no entry with the name of checkpoint `id`.
  bool IsGone(const CheckpointId& id) const;

  // Removes the committed checkpoint `id`: renames its folder durably, so that no restore takes it,
  // and then removes the files. When the process dies in between, or the removal fails, a later
  // Begin() removes the rest. Errors: kFailedPrecondition when another claim is in force, or the
  // folder is a link or holds an entry that no save makes; kUnavailable when a process reads the
  // checkpoint. After an error of these kinds the checkpoint is unchanged. kNotFound: it is gone.
  absl::Status Remove(const CheckpointOwner& owner, const CheckpointId& id);

  // Removes `writing_folder`. When that fails, logs the failure, and the next Begin() tries again.
  void Abandon(const std::string& writing_folder);

 private:
  std::string Path(const std::string& name) const;
  absl::StatusOr<bool> MakeRoot();
  absl::Status Claim(CheckpointOwner owner);
  absl::Status CheckGeneration(CheckpointOwner& owner);
  absl::Status CheckOwner(const CheckpointOwner& owner) const;
  absl::Status MakeWorkFolder(const std::string& name);
  void RemoveLeftovers(const std::vector<std::string>& names);
  void Remember(const std::string& name, const absl::Status& error);
  absl::Status Retire(const std::string& name);
  absl::Status RenameAside(const CheckpointId& id, const std::string& aside);
  absl::Status RenameAndRemove(std::string& name);
  absl::Status RemoveFolder(const std::string& path);
  struct Contents {
    std::vector<std::string> files;    // of a save, the manifest first
    std::vector<std::string> foreign;  // everything else
  };
  absl::StatusOr<Contents> LookInto(const std::string& path) const;
  void NameOnce(const std::string& path, const std::string& reason) const;
  absl::Status CheckWhole(const Manifest& manifest) const;
  absl::Status CheckWritten(const std::string& folder, const Manifest& manifest) const;
  absl::StatusOr<bool> YieldToExisting(const Manifest& manifest);

  FileSystem* const file_system_;
  const std::string root_;
  const AskRendezvous ask_;
  OwnerFile owner_file_;
  std::optional<OwnerFile::Claim> claim_;  // the last claim of Begin()
  mutable std::set<std::string> named_;    // paths that the log has named
  std::set<std::string> leftovers_;        // names in the root that could not be removed
  bool rendezvous_is_silent_ = false;      // and the log has said so
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FOLDER_CHECKPOINT_STORAGE_H_
