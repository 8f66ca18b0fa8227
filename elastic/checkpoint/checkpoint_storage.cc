#include "elastic/checkpoint/checkpoint_storage.h"

#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "glog/logging.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {
namespace {

constexpr char kOwnerName[] = ".owner";
constexpr char kWritingPrefix[] = ".tmp-";
constexpr uint64_t kManifestBytesMax = uint64_t{256} << 20;
constexpr uint64_t kOwnerBytesMax = 64 << 10;

std::string OwnerText(const CheckpointOwner& owner) {
  const nlohmann::json json = {{"generation", owner.generation},
                               {"generation_nonce", owner.nonce},
                               {"run_id", owner.run_id}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// The parents of "/a/b/c" and itself: "/a", "/a/b", "/a/b/c".
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

// That the header says of its tensors what the manifest says.
absl::Status CompareTensors(const Manifest& manifest, const std::string& file,
                            const LoadedFile& loaded) {
  std::map<std::string, size_t> stored;
  for (size_t i = 0; i < loaded.stored.size(); ++i) stored[loaded.stored[i].name] = i;
  for (const TensorRecord& tensor : manifest.tensors) {
    if (tensor.file != file) continue;
    const auto found = stored.find(tensor.name);
    if (found == stored.end()) {
      return absl::DataLossError(absl::StrCat("tensor ", tensor.name, " is not in the file"));
    }
    const StoredTensor& other = loaded.stored[found->second];
    if (other.type != tensor.type || other.offset != tensor.offset) {
      return absl::DataLossError(
          absl::StrCat("tensor ", tensor.name, " is another one than the manifest says"));
    }
    const ContentHash& hash = loaded.hashes[found->second];
    if (hash != tensor.hash) {
      return absl::DataLossError(absl::StrCat("tensor ", tensor.name,
                                              " is damaged: its XXH3-128 is ", hash.Hex(),
                                              ", the manifest says ", tensor.hash.Hex()));
    }
    stored.erase(found);
  }
  if (stored.empty()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("tensor ", stored.begin()->first, " is not in the manifest"));
}

absl::Status CompareFile(const Manifest& manifest, const FileRecord& record,
                         const LoadedFile& loaded) {
  DDP_RETURN_IF_ERROR(CompareTensors(manifest, record.name, loaded));
  if (loaded.hash == record.hash) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the header is damaged: the file's XXH3-128 is ",
                                          loaded.hash.Hex(), ", the manifest says ",
                                          record.hash.Hex()));
}

}  // namespace

CheckpointStorage::CheckpointStorage(FileSystem* file_system, std::string root)
    : file_system_(file_system), root_(std::move(root)) {
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
  return NewestFirst(*names);
}

absl::StatusOr<std::string> CheckpointStorage::ReadText(const std::string& path,
                                                        uint64_t bytes_max) const {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<ReadableFile> file, file_system_->OpenFile(path));
  if (file->size() > bytes_max) {
    return absl::DataLossError(absl::StrCat(path, " has ", file->size(), " bytes"));
  }
  std::string text(file->size(), '\0');
  DDP_RETURN_IF_ERROR(file->Read(0, text.data(), text.size()));
  return text;
}

absl::StatusOr<CheckpointStorage::StoredManifest> CheckpointStorage::ReadManifest(
    const CheckpointId& id) const {
  const std::string path = absl::StrCat(Folder(id), "/", kManifestName);
  DDP_ASSIGN_OR_RETURN(const std::string text, ReadText(path, kManifestBytesMax));
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

absl::Status CheckpointStorage::CheckWhole(const Manifest& manifest) const {
  for (const FileRecord& file : manifest.files) {
    DDP_RETURN_IF_ERROR(LoadFile(manifest, file).status());
  }
  return absl::OkStatus();
}

// ---- Writing ----

absl::StatusOr<std::string> CheckpointStorage::Begin(const CheckpointOwner& owner,
                                                     const CheckpointId& id) {
  CHECK(!owner.nonce.empty()) << "an owner without a nonce cannot be told from another";
  const absl::Status owned =
      claimed_nonce_ == owner.nonce ? CheckOwner(owner) : absl::NotFoundError("not claimed yet");
  if (absl::IsNotFound(owned)) {  // or somebody has emptied the folder since
    DDP_RETURN_IF_ERROR(MakeRoot());
    DDP_RETURN_IF_ERROR(Claim(owner));
    DDP_RETURN_IF_ERROR(RemoveLeftovers());
    claimed_nonce_ = owner.nonce;
  } else {
    DDP_RETURN_IF_ERROR(owned);
  }
  const std::string folder = Path(absl::StrCat(kWritingPrefix, FolderName(id), ".", owner.nonce));
  absl::Status made = file_system_->MakeDirectory(folder);
  if (absl::IsAlreadyExists(made)) {
    // Ours, of a save that failed and could not be cleaned up.
    DDP_RETURN_IF_ERROR(RemoveFolder(folder));
    made = file_system_->MakeDirectory(folder);
  }
  DDP_RETURN_IF_ERROR(made);
  DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(root_));
  return folder;
}

absl::Status CheckpointStorage::MakeRoot() {
  for (const std::string& path : PathsDownTo(root_)) {
    const absl::Status made = file_system_->MakeDirectory(path);
    if (made.ok()) {
      DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(ParentOf(path)));
    } else if (!absl::IsAlreadyExists(made) && path == root_) {
      return made;
    }
    // A parent that cannot be made, on a read-only system for instance, may be there already; if
    // it is not, making the last one says so.
  }
  return absl::OkStatus();
}

absl::Status CheckpointStorage::WriteText(const std::string& path, const std::string& text) {
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<WritableFile> file, file_system_->CreateFile(path));
  DDP_RETURN_IF_ERROR(file->Append(text.data(), text.size()));
  DDP_RETURN_IF_ERROR(file->Sync());
  return file->Close();
}

absl::Status CheckpointStorage::Claim(const CheckpointOwner& owner) {
  const std::string beside = Path(absl::StrCat(kOwnerName, "-", owner.nonce));
  const absl::Status removed = file_system_->RemoveFile(beside);
  if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
  DDP_RETURN_IF_ERROR(WriteText(beside, OwnerText(owner)));
  DDP_RETURN_IF_ERROR(file_system_->ReplaceFile(beside, Path(kOwnerName)));
  return file_system_->SyncDirectory(root_);
}

absl::Status CheckpointStorage::CheckOwner(const CheckpointOwner& owner) const {
  DDP_ASSIGN_OR_RETURN(std::string text, ReadText(Path(kOwnerName), kOwnerBytesMax));
  if (text == OwnerText(owner)) return absl::OkStatus();
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return absl::FailedPreconditionError(
      absl::StrCat(root_, " now belongs to another generation, which saves in its place: ", text));
}

absl::Status CheckpointStorage::RemoveLeftovers() {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_->ListDirectory(root_));
  for (const std::string& name : names) {
    const bool is_claim = absl::StartsWith(name, absl::StrCat(kOwnerName, "-"));
    if (is_claim) DDP_RETURN_IF_ERROR(file_system_->RemoveFile(Path(name)));
    if (!absl::StartsWith(name, kWritingPrefix)) continue;
    LOG(INFO) << "removing what an interrupted save has left: " << Path(name);
    // A writer that does not know yet that its time is over may still add files: what we cannot
    // remove now is no checkpoint anyway.
    Abandon(Path(name));
  }
  return absl::OkStatus();
}

absl::Status CheckpointStorage::RemoveFolder(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system_->ListDirectory(path));
  for (const std::string& name : names) {
    DDP_RETURN_IF_ERROR(file_system_->RemoveFile(absl::StrCat(path, "/", name)));
  }
  return file_system_->RemoveDirectory(path);
}

absl::StatusOr<std::string> CheckpointStorage::Commit(const CheckpointOwner& owner,
                                                      const std::string& writing_folder,
                                                      const Manifest& manifest) {
  DDP_RETURN_IF_ERROR(
      WriteText(absl::StrCat(writing_folder, "/", kManifestName), EncodeManifest(manifest)));
  DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(writing_folder));
  DDP_RETURN_IF_ERROR(CheckOwner(owner));
  const std::string folder = Folder(manifest.id);
  absl::Status renamed = file_system_->Rename(writing_folder, folder);
  if (absl::IsAlreadyExists(renamed)) {
    DDP_ASSIGN_OR_RETURN(const bool free, YieldToExisting(manifest));
    if (!free) {
      Abandon(writing_folder);
      // It may be the work of a commit that failed in its very last sync.
      DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(root_));
      return folder;
    }
    renamed = file_system_->Rename(writing_folder, folder);
  }
  DDP_RETURN_IF_ERROR(renamed);
  DDP_RETURN_IF_ERROR(file_system_->SyncDirectory(root_));
  return folder;
}

// A folder stands where `manifest` is to go. True: it was not whole, and has made way. False: it
// holds the same state.
absl::StatusOr<bool> CheckpointStorage::YieldToExisting(const Manifest& manifest) {
  const std::string folder = Folder(manifest.id);
  const absl::StatusOr<StoredManifest> existing = ReadManifest(manifest.id);
  const absl::Status whole = existing.ok() ? CheckWhole(existing->manifest) : existing.status();
  if (whole.ok()) {
    if (existing->manifest.state_hash == manifest.state_hash &&
        existing->manifest.sampler == manifest.sampler &&
        existing->manifest.epoch == manifest.epoch) {
      return false;
    }
    return absl::AlreadyExistsError(
        absl::StrCat(folder, " exists and holds another state, saved by run \"",
                     existing->manifest.run_id, "\": save into another folder, or remove it"));
  }
  if (!absl::IsDataLoss(whole) && !absl::IsNotFound(whole)) return whole;
  LOG(WARNING) << "replacing a checkpoint that is not whole: " << whole.message();
  const std::string aside =
      Path(absl::StrCat(kWritingPrefix, FolderName(manifest.id), ".not-whole"));
  DDP_RETURN_IF_ERROR(file_system_->Rename(folder, aside));
  DDP_RETURN_IF_ERROR(RemoveFolder(aside));
  return true;
}

void CheckpointStorage::Abandon(const std::string& writing_folder) {
  const absl::Status removed = RemoveFolder(writing_folder);
  if (removed.ok() || absl::IsNotFound(removed)) return;
  LOG(WARNING) << "the next save will try again: " << removed.message();
}

}  // namespace ddp::elastic
