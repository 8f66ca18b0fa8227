#include "elastic/checkpoint/inspect/stored_checkpoint.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/file_system/whole_file.h"

namespace ddp::elastic {
namespace {

// The bound of CheckpointStorage.
constexpr uint64_t kManifestBytesMax = uint64_t{256} << 20;

std::string WithoutSlashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

absl::StatusOr<bool> IsCheckpoint(FileSystem& file_system, const std::string& path) {
  if (ParseFolderName(BaseName(path)).has_value()) return true;
  const absl::StatusOr<EntryKind> kind = file_system.KindOf(absl::StrCat(path, "/", kManifestName));
  if (kind.ok()) return *kind == EntryKind::kFile;
  return absl::IsNotFound(kind.status()) ? absl::StatusOr<bool>(false) : kind.status();
}

}  // namespace

std::string BaseName(const std::string& path) { return path.substr(path.rfind('/') + 1); }

absl::StatusOr<std::string> ReadManifestText(FileSystem& file_system, const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kManifestName);
  absl::StatusOr<std::string> text = ReadWholeFile(file_system, path, kManifestBytesMax);
  if (!absl::IsNotFound(text.status())) return text;
  DDP_RETURN_IF_ERROR(file_system.ListDirectory(folder).status());
  return absl::DataLossError(absl::StrCat(path, " is missing"));
}

absl::StatusOr<Manifest> ReadManifestOf(FileSystem& file_system, const std::string& folder) {
  DDP_ASSIGN_OR_RETURN(const std::string text, ReadManifestText(file_system, folder));
  absl::StatusOr<Manifest> manifest = ParseManifest(text);
  const std::string path = absl::StrCat(folder, "/", kManifestName);
  if (!manifest.ok()) {
    return absl::Status(manifest.status().code(),
                        absl::StrCat(path, ": ", manifest.status().message()));
  }
  const std::optional<CheckpointId> id = ParseFolderName(BaseName(folder));
  if (id.has_value() && *id != manifest->id) {
    return absl::DataLossError(
        absl::StrCat(path, " is the manifest of ", FolderName(manifest->id)));
  }
  return manifest;
}

uint64_t BytesOf(const Manifest& manifest) {
  uint64_t bytes = 0;
  for (const FileRecord& file : manifest.files) bytes += file.bytes;
  return bytes;
}

std::string PartOf(const std::string& file) { return file.substr(0, file.find('-')); }

absl::StatusOr<std::string> FindCheckpoint(FileSystem& file_system, std::string path) {
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                       FindCheckpoints(file_system, std::move(path)));
  return paths[0];
}

absl::StatusOr<std::vector<std::string>> FindCheckpoints(FileSystem& file_system,
                                                         std::string path) {
  path = WithoutSlashes(std::move(path));
  DDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, file_system.ListDirectory(path));
  DDP_ASSIGN_OR_RETURN(const bool is_one, IsCheckpoint(file_system, path));
  if (is_one) return std::vector<std::string>{path};
  std::vector<std::string> paths;
  for (const CheckpointId& id : NewestFirst(names)) {
    paths.push_back(absl::StrCat(path, "/", FolderName(id)));
  }
  if (paths.empty()) return absl::NotFoundError(absl::StrCat(path, " holds no checkpoint"));
  return paths;
}

}  // namespace ddp::elastic
