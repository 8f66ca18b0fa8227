#include "elastic/checkpoint/inspect/prune.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/folder/work_folder.h"
#include "elastic/checkpoint/format/manifest.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

using Fate = PruneDecision::Fate;
using State = ListedCheckpoint::State;

constexpr char kNonce[] = "pruned";  // of the folders that a prune removes

std::string HiddenName(const CheckpointId& id) {
  return WorkFolderName({.id = id, .nonce = kNonce, .retired = true});
}

// Finds the newest complete checkpoint that can be read, and marks the newer ones that cannot.
absl::Status VerifyNewest(FileSystem& file_system, const InspectProgress& progress,
                          std::vector<ListedCheckpoint>& newest_first) {
  for (ListedCheckpoint& checkpoint : newest_first) {
    if (checkpoint.state != State::kComplete) continue;
    DDP_ASSIGN_OR_RETURN(const Verification verification,
                         VerifyCheckpoint(file_system, checkpoint.folder, progress));
    if (verification.is_whole()) return absl::OkStatus();
    const Damage& damage = verification.damages[0];
    checkpoint.state = State::kDamaged;
    checkpoint.reason = absl::StrCat(checkpoint.folder, "/", damage.file, ": ", damage.place,
                                     damage.place.empty() ? "" : ": ", damage.message);
  }
  return absl::OkStatus();
}

// Returns the names in a checkpoint's folder, the manifest first. kFailedPrecondition when the
// folder is a link or has an entry that no save makes.
absl::StatusOr<std::vector<std::string>> FilesOf(FileSystem& file_system,
                                                 const std::string& folder) {
  DDP_ASSIGN_OR_RETURN(const EntryKind kind, file_system.KindOf(folder));
  if (kind != EntryKind::kDirectory) {
    return absl::FailedPreconditionError(absl::StrCat(folder, " is a link or no folder"));
  }
  DDP_ASSIGN_OR_RETURN(std::vector<std::string> names, file_system.ListDirectory(folder));
  for (const std::string& name : names) {
    const std::string path = absl::StrCat(folder, "/", name);
    DDP_ASSIGN_OR_RETURN(const EntryKind entry, file_system.KindOf(path));
    if (entry == EntryKind::kFile && IsCheckpointFile(name)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": no save makes such an entry, so the folder is not removed"));
  }
  std::stable_partition(names.begin(), names.end(),
                        [](const std::string& name) { return name == kManifestName; });
  return names;
}

absl::Status Tolerated(const absl::Status& status) {
  return absl::IsNotFound(status) ? absl::OkStatus() : status;
}

// Removes a folder with a hidden name. Another process may be at it too.
absl::Status RemoveHidden(FileSystem& file_system, const std::string& root,
                          const std::string& name) {
  const std::string folder = absl::StrCat(root, "/", name);
  const absl::StatusOr<std::vector<std::string>> files = FilesOf(file_system, folder);
  if (!files.ok()) return Tolerated(files.status());
  for (const std::string& file : *files) {
    DDP_RETURN_IF_ERROR(Tolerated(file_system.RemoveFile(absl::StrCat(folder, "/", file))));
    if (file == kManifestName) DDP_RETURN_IF_ERROR(Tolerated(file_system.SyncDirectory(folder)));
  }
  DDP_RETURN_IF_ERROR(Tolerated(file_system.RemoveDirectory(folder)));
  return file_system.SyncDirectory(root);
}

absl::Status Remove(FileSystem& file_system, const std::string& root,
                    const ListedCheckpoint& checkpoint) {
  DDP_RETURN_IF_ERROR(FilesOf(file_system, checkpoint.folder).status());
  // A restore holds a lock on the manifest of the checkpoint that it reads.
  const absl::StatusOr<std::unique_ptr<FileLock>> lock = file_system.LockFile(
      absl::StrCat(checkpoint.folder, "/", kManifestName), LockKind::kExclusive);
  if (absl::IsUnavailable(lock.status())) {
    return absl::UnavailableError(absl::StrCat(checkpoint.folder, " is being read"));
  }
  if (!absl::IsUnimplemented(lock.status())) DDP_RETURN_IF_ERROR(lock.status());
  const std::string hidden = HiddenName(checkpoint.id);
  DDP_RETURN_IF_ERROR(file_system.Rename(checkpoint.folder, absl::StrCat(root, "/", hidden)));
  DDP_RETURN_IF_ERROR(file_system.SyncDirectory(root));
  return RemoveHidden(file_system, root, hidden);
}

// Removes what an earlier prune has left.
void RemoveLeftovers(FileSystem& file_system, const std::string& root,
                     const std::vector<std::string>& work_folders) {
  for (const std::string& name : work_folders) {
    const std::optional<WorkFolder> folder = ParseWorkFolderName(name);
    if (!folder.has_value() || !folder->retired || folder->nonce != kNonce) continue;
    RemoveHidden(file_system, root, name).IgnoreError();  // hidden, and tried again next time
  }
}

}  // namespace

std::vector<PruneDecision> DecidePrune(const std::vector<ListedCheckpoint>& newest_first,
                                       int keep_last) {
  CHECK_GE(keep_last, 1);
  std::vector<PruneDecision> decisions;
  int kept = 0;
  for (const ListedCheckpoint& checkpoint : newest_first) {
    if (checkpoint.state != State::kComplete) {
      decisions.push_back({Fate::kLeave, checkpoint.reason});
    } else if (kept < keep_last) {
      ++kept;
      decisions.push_back({Fate::kKeep, absl::StrCat("number ", kept, " of the newest")});
    } else {
      decisions.push_back({Fate::kRemove, absl::StrCat(kept, " newer ones are kept")});
    }
  }
  return decisions;
}

bool PruneResult::all_removed() const {
  return std::all_of(entries.begin(), entries.end(),
                     [](const Entry& entry) { return entry.removed.ok(); });
}

absl::StatusOr<PruneResult> Prune(FileSystem& file_system, const std::string& root,
                                  const PruneOptions& options, const InspectProgress& progress) {
  DDP_ASSIGN_OR_RETURN(FolderListing listing, ListFolder(file_system, root));
  DDP_RETURN_IF_ERROR(VerifyNewest(file_system, progress, listing.checkpoints));
  const std::vector<PruneDecision> decisions = DecidePrune(listing.checkpoints, options.keep_last);
  if (!options.dry_run) RemoveLeftovers(file_system, root, listing.work_folders);
  PruneResult result{.dry_run = options.dry_run};
  for (size_t i = 0; i < decisions.size(); ++i) {
    absl::Status removed;
    if (decisions[i].fate == Fate::kRemove && !options.dry_run) {
      removed = Remove(file_system, root, listing.checkpoints[i]);
    }
    result.entries.push_back({std::move(listing.checkpoints[i]), decisions[i], removed});
  }
  return result;
}

}  // namespace ddp::elastic
