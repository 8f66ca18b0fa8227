#include "launcher/process/private_folder.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace ddp::launcher {
namespace {

// Limit of the folder's path. A unix socket's path has at most 107 bytes; this leaves room for a
// folder and a socket's name.
constexpr size_t kMaxFolderPath = 80;

}  // namespace

absl::StatusOr<std::string> MakePrivateFolder(const std::string& prefix) {
  const char* tmpdir = std::getenv("TMPDIR");
  std::string parent = tmpdir == nullptr || *tmpdir != '/' ? "/tmp" : tmpdir;
  if (parent.size() + 1 + prefix.size() + 6 > kMaxFolderPath) parent = "/tmp";
  std::string path = absl::StrCat(parent, "/", prefix, "XXXXXX");
  if (::mkdtemp(path.data()) == nullptr) {
    return absl::InternalError(absl::StrCat("cannot make a folder in ", parent, ": ",
                                            std::strerror(errno), " (set TMPDIR to another)"));
  }
  return path;
}

bool HoldsData(const std::string& folder) {
  std::error_code error;
  std::filesystem::recursive_directory_iterator entry(folder, error);
  for (const std::filesystem::recursive_directory_iterator end; !error && entry != end;
       entry.increment(error)) {
    std::error_code unknown;
    if (entry->symlink_status(unknown).type() != std::filesystem::file_type::regular) continue;
    if (const auto size = entry->file_size(unknown); !unknown && size > 0) return true;
  }
  return false;
}

absl::Status RemoveFolder(const std::string& folder) {
  if (folder.empty()) return absl::OkStatus();
  std::error_code error;
  // A second process that removes the folder makes entries vanish during the walk: try again.
  for (int attempt = 0; attempt < 3; ++attempt) {
    error.clear();
    std::filesystem::remove_all(folder, error);
    if (!error) return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("cannot remove ", folder, ": ", error.message()));
}

}  // namespace ddp::launcher
