#include "elastic/checkpoint/folder/checkpoint_storage.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/file_system/whole_file.h"
#include "elastic/checkpoint/folder/manifest_check.h"
#include "elastic/checkpoint/folder/work_folder.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

constexpr uint64_t kManifestBytesMax = uint64_t{256} << 20;
// In place of the nonce of a WorkFolder.
constexpr char kNotWhole[] = "not-whole";
constexpr char kExpired[] = "expired";
// Bounds the removals that each save tries again. The next claim removes the others.
constexpr size_t kLeftoversMax = 100;

// Returns the parents of "/a/b/c" and the path itself: "/a", "/a/b", "/a/b/c".
std::vector<std::string> PathsDownTo(const std::string& path) {
  std::vector<std::string> paths;
  for (size_t end = path.find('/', 1); end != std::string::npos; end = path.find('/', end + 1)) {
    if (path[end - 1] != '/') paths.push_back(path.substr(0, end));
  }
  paths.push_back(path);
  return paths;
}

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status Prefixed(const std::string& prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(prefix, ": ", status.message()));
}

}  // namespace

CheckpointStorage::CheckpointStorage(FileSystem* file_system, std::string root, AskRendezvous ask)
    : file_system_(file_system),
      root_(std::move(root)),
      ask_(std::move(ask)),
      owner_file_(file_system, root_) {
  CHECK(!root_.empty()) << "checkpoints need a folder";
}

std::string CheckpointStorage::Path(const std::string& name) const {
  return absl::StrCat(root_, "/", name);
}

std::string CheckpointStorage::Folder(const CheckpointId& id) const { return Path(FolderName(id)); }

// ---- Reading ----

absl::StatusOr<std::vector<CheckpointId>> CheckpointStorage::List() const {
  const absl::StatusOr<std::vector<std::string>> names = file_system_->ListDirectory(root_);
  if (absl::IsNotFound(names.status())) return std::vector<CheckpointId>();
  if (!names.ok()) return names.status();
  for (const std::string& name : *names) {
    if (!absl::StartsWith(name, "step-") || ParseFolderName(name).has_value()) continue;
    NameOnce(Path(name), "its name is not that of a checkpoint");
  }
  return NewestFirst(*names);
}

absl::StatusOr<CheckpointStorage::StoredManifest> CheckpointStorage::ReadManifest(
    const CheckpointId& id) const {
  const std::string path = absl::StrCat(Folder(id), "/", kManifestName);
  const absl::StatusOr<std::string> read = ReadWholeFile(*file_system_, path, kManifestBytesMax);
  if (absl::IsFailedPrecondition(read.status())) {
    const absl::StatusOr<EntryKind> kind = file_system_->KindOf(Folder(id));
    if (kind.ok() && *kind == EntryKind::kFile) {
      return absl::DataLossError(absl::StrCat(Folder(id), " is a file, and a checkpoint a folder"));
    }
  }
  DDP_ASSIGN_OR_RETURN(const std::string text, read);
  absl::StatusOr<Manifest> manifest = ParseManifest(text);
  if (!manifest.ok()) return Prefixed(path, manifest.status());
  if (manifest->id != id) {
    return absl::DataLossError(
        absl::StrCat(path, " is the manifest of ", FolderName(manifest->id)));
  }
  return StoredManifest{*std::move(manifest), ContentHash::Of(text)};
}

absl::StatusOr<LoadedFile> CheckpointStorage::LoadFile(const Manifest& manifest,
                                                       const FileRecord& record) const {
  const std::string path = absl::StrCat(Folder(manifest.id), "/", record.name);
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<ReadableFile> file, file_system_->OpenFile(path));
  if (file->size() != record.bytes) {
    return absl::DataLossError(
        absl::StrCat(path, " has ", file->size(), " bytes, the manifest says ", record.bytes));
  }
  DDP_ASSIGN_OR_RETURN(LoadedFile loaded, LoadSafetensors(*file, path));
  const absl::Status status = CompareFile(manifest, record, loaded);
  if (!status.ok()) return Prefixed(path, status);
  return loaded;
}

absl::StatusOr<CheckpointOwner> CheckpointStorage::Owner() const {
  DDP_ASSIGN_OR_RETURN(OwnerFile::Claim claim, owner_file_.Current());
  return std::move(claim.owner);
}

bool CheckpointStorage::IsMissing(const std::string& path) const {
  return absl::StartsWith(path, absl::StrCat(root_, "/")) &&
         absl::IsNotFound(file_system_->OpenFile(path).status());
}

absl::Status CheckpointStorage::CheckWhole(const Manifest& manifest) const {
  for (const FileRecord& file : manifest.files) {
    DDP_RETURN_IF_ERROR(LoadFile(manifest, file).status());
  }
  return absl::OkStatus();
}

// ---- Writing ----

absl::Status CheckpointStorage::ClaimRoot(const CheckpointOwner& owner) {
  CHECK(IsPlainNonce(owner.nonce)) << "an owner without a nonce cannot be told from another";
  CheckpointOwner asked = owner;
  DDP_RETURN_IF_ERROR(CheckGeneration(asked));
  const absl::Status owned = CheckOwner(owner);
  if (absl::IsNotFound(owned)) {  // not claimed yet, or the root was emptied since
    DDP_ASSIGN_OR_RETURN(const bool is_new, MakeRoot());
    if (claim_.has_value() && claim_->owner.IsSame(owner)) {
      LOG(WARNING) << root_ << (is_new ? " was missing and is made anew" : " has lost its owner")
                   << ", although this process has claimed it: earlier checkpoints may be gone, "
                   << "or on a file system that is not mounted now";
    }
    DDP_RETURN_IF_ERROR(Claim(asked));
  } else {
    DDP_RETURN_IF_ERROR(owned);
    RemoveLeftovers({leftovers_.begin(), leftovers_.end()});
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> CheckpointStorage::Begin(const CheckpointOwner& owner,
                                                     const CheckpointId& id) {
  DDP_RETURN_IF_ERROR(ClaimRoot(owner));
  const std::string name = WorkFolderName({.id = id, .nonce = owner.nonce});
  DDP_RETURN_IF_ERROR(MakeWorkFolder(name));
  const absl::Status synced = file_system_->SyncDirectory(root_);
  if (!synced.ok()) {
    Abandon(Path(name));
    return synced;
  }
  return Path(name);
}

absl::Status CheckpointStorage::MakeWorkFolder(const std::string& name) {
  const absl::Status made = file_system_->MakeDirectory(Path(name));
  if (!absl::IsAlreadyExists(made)) return made;
  // A failed save of this owner left the folder. No other owner has the nonce.
  DDP_RETURN_IF_ERROR(Retire(name));
  return file_system_->MakeDirectory(Path(name));
}

// Asks the rendezvous whether the owner's generation may save, and sets `owner.job`.
absl::Status CheckpointStorage::CheckGeneration(CheckpointOwner& owner) {
  if (ask_ == nullptr) return absl::OkStatus();
  absl::StatusOr<std::string> job = ask_();
  if (job.ok()) {
    owner.job = *std::move(job);
    rendezvous_is_silent_ = false;
    return absl::OkStatus();
  }
  if (absl::IsFailedPrecondition(job.status())) {
    return Prefixed(absl::StrCat(root_, ": ", OwnerText(owner), " may not save"), job.status());
  }
  // Training continues while the store is unreachable. The claims in the folder decide alone.
  if (!rendezvous_is_silent_) {
    LOG(WARNING) << root_ << ": the rendezvous cannot say whether generation " << owner.generation
                 << " is the newest; the folder's owner decides: " << job.status().message();
  }
  rendezvous_is_silent_ = true;
  return absl::OkStatus();
}

// Creates the root and the folders above it, durably. Returns true when the root did not exist.
absl::StatusOr<bool> CheckpointStorage::MakeRoot() {
  bool is_new = false;
  for (const std::string& path : PathsDownTo(root_)) {
    const absl::Status made = file_system_->MakeDirectory(path);
    if (!made.ok() && !absl::IsAlreadyExists(made) && path == root_) return made;
    // Also synced when the folder exists: the process that made it may have died before the sync.
    const absl::Status synced = file_system_->SyncDirectory(ParentOf(path));
    if (made.ok()) DDP_RETURN_IF_ERROR(synced);
    // A parent that cannot be made, for instance on a read-only system, may exist already. If it
    // does not, making the root fails.
    is_new = made.ok();
  }
  return is_new;
}

absl::Status CheckpointStorage::Claim(CheckpointOwner owner) {
  // Listed before the claim: every folder of this list belongs to an earlier claim.
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_->ListDirectory(root_));
  DDP_ASSIGN_OR_RETURN(claim_, owner_file_.Take(owner));
  RemoveLeftovers(names);
  return absl::OkStatus();
}

absl::Status CheckpointStorage::CheckOwner(const CheckpointOwner& owner) const {
  if (!claim_.has_value() || !claim_->owner.IsSame(owner)) {
    return absl::NotFoundError("not claimed yet");
  }
  return owner_file_.Check(*claim_);
}

// Removes work folders and claim texts of earlier claims, and abandoned work folders of this one.
// No save writes into any of them.
void CheckpointStorage::RemoveLeftovers(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (IsClaimText(name)) {
      const absl::Status removed = owner_file_.Remove(name);
      if (removed.ok()) {
        leftovers_.erase(name);
      } else {
        Remember(name, removed);
      }
    } else if (ParseWorkFolderName(name).has_value()) {
      LOG_IF(INFO, !leftovers_.contains(name))
          << "removing what an interrupted save has left: " << Path(name);
      Retire(name).IgnoreError();  // remembers the name
    } else if (LooksLikeWorkFolder(name)) {
      NameOnce(Path(name), "its name is not that of a save");
    }
  }
}

// Remembers an entry of the root that could not be removed, so that the next Begin() tries again.
void CheckpointStorage::Remember(const std::string& name, const absl::Status& error) {
  if (leftovers_.size() >= kLeftoversMax || !leftovers_.insert(name).second) return;
  LOG(WARNING) << "the next save will try again: " << error.message();
}

void CheckpointStorage::NameOnce(const std::string& path, const std::string& reason) const {
  if (!named_.insert(path).second) return;
  LOG(WARNING) << path << " stays where it is: " << reason;
}

absl::StatusOr<CheckpointStorage::Contents> CheckpointStorage::LookInto(
    const std::string& path) const {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_->ListDirectory(path));
  Contents contents;
  for (const std::string& name : names) {
    const absl::StatusOr<EntryKind> kind = file_system_->KindOf(absl::StrCat(path, "/", name));
    if (absl::IsNotFound(kind.status())) continue;
    DDP_RETURN_IF_ERROR(kind.status());
    const bool ours = *kind == EntryKind::kFile && IsCheckpointFile(name);
    (ours ? contents.files : contents.foreign).push_back(name);
  }
  // The manifest is removed first: without it the folder is no checkpoint.
  std::stable_partition(contents.files.begin(), contents.files.end(),
                        [](const std::string& name) { return name == kManifestName; });
  return contents;
}

// Removes the work folder `name` of the root. Remembers the folder when that fails. kNotFound: it
// is gone already.
absl::Status CheckpointStorage::Retire(const std::string& name) {
  std::string present = name;
  const absl::Status removed = RenameAndRemove(present);
  const bool gone = removed.ok() || absl::IsNotFound(removed);
  if (gone || present != name) leftovers_.erase(name);
  if (!gone) Remember(present, removed);
  return removed;
}

// Removes the work folder `name` of the root. Renames it first, unless it holds foreign entries:
// the folder's writer, which may not have noticed the later claim, can then no longer commit it.
// After an error `name` is the folder's present name.
absl::Status CheckpointStorage::RenameAndRemove(std::string& name) {
  std::optional<WorkFolder> folder = ParseWorkFolderName(name);
  CHECK(folder.has_value()) << name << " is no work folder";
  DDP_ASSIGN_OR_RETURN(const EntryKind kind, file_system_->KindOf(Path(name)));
  if (kind != EntryKind::kDirectory) {
    NameOnce(Path(name), "it is a link or no folder, which no save makes");
    return absl::OkStatus();
  }
  DDP_ASSIGN_OR_RETURN(const Contents contents, LookInto(Path(name)));
  if (!folder->retired && contents.foreign.empty()) {
    folder->retired = true;
    const std::string aside = WorkFolderName(*folder);
    const absl::Status renamed = file_system_->Rename(Path(name), Path(aside));
    if (renamed.ok()) {
      name = aside;
      return RemoveFolder(Path(name));
    }
    // An earlier folder has that name, because it could not be removed.
    if (!absl::IsAlreadyExists(renamed)) return renamed;
  }
  return RemoveFolder(Path(name));
}

// Removes the files of a save from `path`, and `path` itself when it is then empty.
absl::Status CheckpointStorage::RemoveFolder(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const Contents contents, LookInto(path));
  for (const std::string& name : contents.files) {
    const absl::Status removed = file_system_->RemoveFile(absl::StrCat(path, "/", name));
    if (!absl::IsNotFound(removed)) DDP_RETURN_IF_ERROR(removed);
  }
  for (const std::string& name : contents.foreign) {
    NameOnce(absl::StrCat(path, "/", name), "no save makes such an entry");
  }
  return contents.foreign.empty() ? file_system_->RemoveDirectory(path) : absl::OkStatus();
}

absl::StatusOr<std::string> CheckpointStorage::Commit(const CheckpointOwner& owner,
                                                      const std::string& writing_folder,
                                                      const Manifest& manifest) {
  DDP_RETURN_IF_ERROR(CheckManifest(manifest));
  DDP_RETURN_IF_ERROR(WriteWholeFile(
      *file_system_, absl::StrCat(writing_folder, "/", kManifestName), EncodeManifest(manifest)));
  DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(writing_folder));
  DDP_RETURN_IF_ERROR(CheckWritten(writing_folder, manifest));
  CheckpointOwner asked = owner;
  DDP_RETURN_IF_ERROR(CheckGeneration(asked));
  DDP_RETURN_IF_ERROR(CheckOwner(owner));
  const std::string folder = Folder(manifest.id);
  absl::Status renamed = file_system_->Rename(writing_folder, folder);
  if (absl::IsAlreadyExists(renamed)) {
    DDP_ASSIGN_OR_RETURN(const bool free, YieldToExisting(manifest));
    if (!free) {
      Abandon(writing_folder);
      // The existing checkpoint may be from a commit whose last sync failed.
      DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(root_));
      return folder;
    }
    renamed = file_system_->Rename(writing_folder, folder);
  }
  DDP_RETURN_IF_ERROR(renamed);
  DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(root_));
  return folder;
}

// Checks that `folder` holds the manifest, and each file with its size. Does not read the files'
// bytes again.
absl::Status CheckpointStorage::CheckWritten(const std::string& folder,
                                             const Manifest& manifest) const {
  const std::string path = absl::StrCat(folder, "/", kManifestName);
  DDP_ASSIGN_OR_RETURN(const std::string text,
                       ReadWholeFile(*file_system_, path, kManifestBytesMax));
  const absl::StatusOr<Manifest> written = ParseManifest(text);
  if (!written.ok() || *written != manifest) {
    return absl::UnavailableError(
        absl::StrCat(path, " is not as it was written: ",
                     written.ok() ? "it holds something else" : written.status().message()));
  }
  for (const FileRecord& record : manifest.files) {
    const std::string file_path = absl::StrCat(folder, "/", record.name);
    DDP_ASSIGN_OR_RETURN(const std::unique_ptr<ReadableFile> file,
                         file_system_->OpenFile(file_path));
    if (file->size() == record.bytes) continue;
    return absl::UnavailableError(absl::StrCat(file_path, " has ", file->size(), " bytes, and ",
                                               record.bytes, " were written"));
  }
  return absl::OkStatus();
}

// Handles a folder that already has the name of checkpoint `manifest`. Returns true when the folder
// was incomplete or damaged, and is removed. Returns false when it holds the same state.
absl::StatusOr<bool> CheckpointStorage::YieldToExisting(const Manifest& manifest) {
  const std::string folder = Folder(manifest.id);
  const absl::StatusOr<StoredManifest> existing = ReadManifest(manifest.id);
  const absl::Status whole = existing.ok() ? CheckWhole(existing->manifest) : existing.status();
  if (whole.ok()) {
    if (HoldsTheSame(existing->manifest, manifest)) return false;
    return absl::AlreadyExistsError(
        absl::StrCat(folder, " exists and holds another state, saved by run \"",
                     existing->manifest.run_id, "\": save into another folder, or remove it"));
  }
  if (!absl::IsDataLoss(whole) && !absl::IsNotFound(whole)) return whole;
  DDP_ASSIGN_OR_RETURN(const EntryKind kind, file_system_->KindOf(folder));
  if (kind != EntryKind::kDirectory) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder, " is a link or no folder, and holds no whole checkpoint: remove it"));
  }
  LOG(WARNING) << "replacing a checkpoint that is not whole: " << whole.message();
  const std::string aside =
      WorkFolderName({.id = manifest.id, .nonce = kNotWhole, .retired = true});
  DDP_RETURN_IF_ERROR(RenameAside(manifest.id, aside));
  DDP_RETURN_IF_ERROR(Retire(aside));
  return true;
}

// Renames the folder of checkpoint `id` to the work folder `aside`, and removes an earlier folder
// of that name first.
absl::Status CheckpointStorage::RenameAside(const CheckpointId& id, const std::string& aside) {
  const absl::Status renamed = file_system_->Rename(Folder(id), Path(aside));
  if (!absl::IsAlreadyExists(renamed)) return renamed;
  DDP_RETURN_IF_ERROR(Retire(aside));
  return file_system_->Rename(Folder(id), Path(aside));
}

absl::StatusOr<std::unique_ptr<FileLock>> CheckpointStorage::LockForReading(
    const CheckpointId& id) const {
  absl::StatusOr<std::unique_ptr<FileLock>> lock =
      file_system_->LockFile(absl::StrCat(Folder(id), "/", kManifestName), LockKind::kShared);
  if (absl::IsUnavailable(lock.status())) {
    return absl::UnavailableError(absl::StrCat(Folder(id), " is being removed"));
  }
  // Every other obstacle also meets the reader, who reports it.
  return lock.ok() ? *std::move(lock) : nullptr;
}

bool CheckpointStorage::IsGone(const CheckpointId& id) const {
  return absl::IsNotFound(file_system_->KindOf(Folder(id)).status());
}

absl::Status CheckpointStorage::Remove(const CheckpointOwner& owner, const CheckpointId& id) {
  const std::string folder = Folder(id);
  DDP_ASSIGN_OR_RETURN(const EntryKind kind, file_system_->KindOf(folder));
  if (kind != EntryKind::kDirectory) {
    return absl::FailedPreconditionError(absl::StrCat(folder, " is a link or no folder"));
  }
  DDP_ASSIGN_OR_RETURN(const Contents contents, LookInto(folder));
  if (!contents.foreign.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder, "/", contents.foreign.front(), ": no save makes such an entry"));
  }
  const absl::StatusOr<std::unique_ptr<FileLock>> lock =
      file_system_->LockFile(absl::StrCat(folder, "/", kManifestName), LockKind::kExclusive);
  if (absl::IsUnavailable(lock.status())) {
    return absl::UnavailableError(absl::StrCat(folder, " is being read"));
  }
  if (!absl::IsUnimplemented(lock.status())) DDP_RETURN_IF_ERROR(lock.status());
  // The last look before the renaming: a later claim ends this owner's rights.
  DDP_RETURN_IF_ERROR(CheckOwner(owner));
  const std::string aside = WorkFolderName({.id = id, .nonce = kExpired, .retired = true});
  DDP_RETURN_IF_ERROR(RenameAside(id, aside));
  // Before a file is removed: else a power cut could leave the old name with some of the files.
  const absl::Status synced = file_system_->SyncDirectory(root_);
  if (!synced.ok()) {
    Remember(aside, synced);
    return synced;
  }
  return Retire(aside);
}

void CheckpointStorage::Abandon(const std::string& writing_folder) {
  Retire(writing_folder.substr(root_.size() + 1)).IgnoreError();  // remembers the folder
}

}  // namespace ddp::elastic
