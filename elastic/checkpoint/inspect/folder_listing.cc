#include "elastic/checkpoint/inspect/folder_listing.h"

#include <algorithm>
#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/folder/work_folder.h"
#include "elastic/checkpoint/inspect/stored_checkpoint.h"

namespace ddp::elastic {
namespace {

using State = ListedCheckpoint::State;

void Judge(State state, std::string reason, ListedCheckpoint& listed) {
  listed.state = state;
  listed.reason = std::move(reason);
}

// Sets the state of a checkpoint whose manifest is undamaged.
void JudgeFiles(FileSystem& file_system, const Manifest& manifest, ListedCheckpoint& listed) {
  for (const FileRecord& record : manifest.files) {
    const std::string path = absl::StrCat(listed.folder, "/", record.name);
    const absl::StatusOr<std::unique_ptr<ReadableFile>> file = file_system.OpenFile(path);
    if (absl::IsNotFound(file.status())) {
      return Judge(State::kIncomplete, absl::StrCat(path, " is missing"), listed);
    }
    if (!file.ok()) {
      return Judge(State::kUnreadable, std::string(file.status().message()), listed);
    }
    if ((*file)->size() != record.bytes) {
      return Judge(
          State::kIncomplete,
          absl::StrCat(path, " has ", (*file)->size(), " bytes, the manifest says ", record.bytes),
          listed);
    }
  }
  listed.state = State::kComplete;
}

}  // namespace

const char* StateName(State state) {
  switch (state) {
    case State::kComplete:
      return "complete";
    case State::kIncomplete:
      return "incomplete";
    case State::kDamaged:
      return "damaged";
    case State::kUnreadable:
      return "unreadable";
  }
  return "";
}

ListedCheckpoint LookAt(FileSystem& file_system, const std::string& folder,
                        const CheckpointId& id) {
  ListedCheckpoint listed;
  listed.id = id;
  listed.folder = folder;
  const absl::StatusOr<EntryKind> kind =
      file_system.KindOf(absl::StrCat(folder, "/", kManifestName));
  if (absl::IsNotFound(kind.status())) {
    Judge(State::kIncomplete, absl::StrCat(folder, "/", kManifestName, " is missing"), listed);
    return listed;
  }
  const absl::StatusOr<Manifest> manifest = ReadManifestOf(file_system, folder);
  if (!manifest.ok()) {
    Judge(absl::IsDataLoss(manifest.status()) ? State::kDamaged : State::kUnreadable,
          std::string(manifest.status().message()), listed);
    return listed;
  }
  listed.run_id = manifest->run_id;
  listed.world_size = manifest->world_size;
  listed.files = manifest->files.size();
  listed.tensors = manifest->tensors.size();
  listed.bytes = BytesOf(*manifest);
  listed.saved_unix_seconds = manifest->saved_unix_seconds;
  JudgeFiles(file_system, *manifest, listed);
  return listed;
}

absl::StatusOr<FolderListing> ListFolder(FileSystem& file_system, const std::string& root) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system.ListDirectory(root));
  FolderListing listing;
  for (const CheckpointId& id : NewestFirst(names)) {
    listing.checkpoints.push_back(LookAt(file_system, absl::StrCat(root, "/", FolderName(id)), id));
  }
  std::copy_if(names.begin(), names.end(), std::back_inserter(listing.work_folders),
               [](const std::string& name) { return ParseWorkFolderName(name).has_value(); });
  std::sort(listing.work_folders.begin(), listing.work_folders.end());
  return listing;
}

}  // namespace ddp::elastic
