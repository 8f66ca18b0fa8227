#include "launcher/output/log_files.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

constexpr mode_t kFolderMode = 0755;
constexpr mode_t kFileMode = 0644;
constexpr mode_t kReadableByOthers = 0055;
constexpr mode_t kWritableByOthers = 0022;
constexpr int kNameAttempts = 100;
constexpr int kOpenFolder = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr int kAppend = O_WRONLY | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;

absl::Status ErrnoAt(const std::string& what, const std::string& path) {
  const int error = errno;
  const std::string text = absl::StrCat(what, " ", path, ": ", std::strerror(error));
  if (error == EMFILE || error == ENFILE || error == ENOMEM) {
    return absl::ResourceExhaustedError(text);
  }
  if (error == ELOOP || error == ENOTDIR || error == EISDIR || error == ENXIO) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, " ", path, ": a link or another file is in its place; remove it, or ",
                     "choose another --log-dir"));
  }
  return absl::InternalError(text);
}

absl::Status Refused(const char* what, const std::string& path, const std::string& why) {
  return absl::FailedPreconditionError(absl::StrCat("will not use the ", what, " ", path, ": ", why,
                                                    "; remove it, or choose another --log-dir"));
}

absl::Status CheckOwnership(const char* what, const std::string& path, const struct stat& info,
                            uid_t owner) {
  if (info.st_uid != owner) {
    return Refused(what, path, absl::StrCat("it belongs to another user, uid ", info.st_uid));
  }
  if ((info.st_mode & kWritableByOthers) != 0) {
    return Refused(what, path, "other users can write it");
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> CheckedFolder(UniqueFd fd, const std::string& path, uid_t owner) {
  if (!fd.valid()) return ErrnoAt("cannot open the log folder", path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return ErrnoAt("cannot look at the log folder", path);
  DDP_RETURN_IF_ERROR(CheckOwnership("log folder", path, info, owner));
  return fd;
}

std::vector<std::string> Split(const std::string& relative) {
  return absl::StrSplit(relative, '/', absl::SkipEmpty());
}

absl::Status InvalidArgument() { return absl::InvalidArgumentError(std::strerror(errno)); }

// Makes `path` and the missing folders above it with `mode`, less the umask.
absl::Status MakeFoldersWith(mode_t mode, const std::string& path) {
  std::string made = absl::StartsWith(path, "/") ? "/" : "";
  for (const std::string& name : Split(path)) {
    absl::StrAppend(&made, name, "/");
    if (::mkdir(made.c_str(), mode) != 0 && errno != EEXIST) {
      // The parent may refuse new folders and yet contain this one.
      const int error = errno;
      if (::access(made.c_str(), F_OK) != 0) {
        errno = error;
        return InvalidArgument();
      }
    }
  }
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return InvalidArgument();
  if (!S_ISDIR(info.st_mode)) return absl::InvalidArgumentError(std::strerror(ENOTDIR));
  return absl::OkStatus();
}

// Makes a root that something has removed. The folders above it get its mode: a temporary folder
// was private.
absl::Status MakeAgain(const LogRoot& root) {
  const std::string parent = root.path.substr(0, root.path.rfind('/') + 1);
  if (const absl::Status made = MakeFoldersWith(root.mode, parent); !made.ok()) {
    return absl::InternalError(absl::StrCat("cannot make the log folder ", parent,
                                            " again: ", std::string(made.message())));
  }
  struct stat info {};
  if (::stat(parent.c_str(), &info) != 0) return ErrnoAt("cannot look at the log folder", parent);
  if (info.st_uid != root.owner_of_parent && info.st_uid != root.owner) {
    return Refused("log folder", parent,
                   absl::StrCat("it belongs to another user, uid ", info.st_uid));
  }
  if (::mkdir(root.path.c_str(), root.mode) != 0 && errno != EEXIST) {
    return ErrnoAt("cannot make the log folder", root.path);
  }
  return absl::OkStatus();
}

// Opens the folder `names` below `root`; makes missing folders if `make` is set.
absl::StatusOr<UniqueFd> OpenFolders(const LogRoot& root, const std::vector<std::string>& names,
                                     bool make) {
  std::string path = root.path;
  UniqueFd opened(::open(path.c_str(), kOpenFolder));
  if (make && !opened.valid() && errno == ENOENT) {
    DDP_RETURN_IF_ERROR(MakeAgain(root));
    opened.reset(::open(path.c_str(), kOpenFolder));
  }
  DDP_ASSIGN_OR_RETURN(UniqueFd fd, CheckedFolder(std::move(opened), path, root.owner));
  for (const std::string& name : names) {
    absl::StrAppend(&path, "/", name);
    if (make && ::mkdirat(fd.get(), name.c_str(), kFolderMode) != 0 && errno != EEXIST) {
      return ErrnoAt("cannot make the log folder", path);
    }
    UniqueFd next(::openat(fd.get(), name.c_str(), kOpenFolder));
    DDP_ASSIGN_OR_RETURN(fd, CheckedFolder(std::move(next), path, root.owner));
  }
  return fd;
}

// Returns six letters and digits, like the suffix of mkdtemp().
absl::StatusOr<std::string> RandomSuffix() {
  constexpr absl::string_view kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
  std::array<uint8_t, 6> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    return absl::InvalidArgumentError(absl::StrCat("getrandom: ", std::strerror(errno)));
  }
  std::string suffix;
  for (const uint8_t byte : bytes) suffix.push_back(kLetters[byte % kLetters.size()]);
  return suffix;
}

}  // namespace

absl::Status MakeFolders(const std::string& path) { return MakeFoldersWith(kFolderMode, path); }

absl::StatusOr<LogRoot> MakeLogRoot(const std::string& parent, const std::string& name) {
  struct stat above {};
  if (::stat(parent.c_str(), &above) != 0) return InvalidArgument();
  LogRoot root;
  root.mode = 0700 | (above.st_mode & kReadableByOthers);
  root.owner_of_parent = above.st_uid;
  for (int attempt = 0;; ++attempt) {
    DDP_ASSIGN_OR_RETURN(const std::string suffix, RandomSuffix());
    root.path = absl::StrCat(parent, absl::EndsWith(parent, "/") ? "" : "/", name, "_", suffix);
    if (::mkdir(root.path.c_str(), root.mode) == 0) break;
    if (errno != EEXIST || attempt + 1 == kNameAttempts) return InvalidArgument();
  }
  // A file system may have users and modes of its own.
  struct stat info {};
  if (::lstat(root.path.c_str(), &info) != 0) return InvalidArgument();
  root.owner = info.st_uid;
  if (!S_ISDIR(info.st_mode) || (info.st_mode & kWritableByOthers) != 0) {
    (void)::rmdir(root.path.c_str());
    return absl::InvalidArgumentError("its file system lets other users write every folder");
  }
  return root;
}

absl::Status MakeLogFolder(const LogRoot& root, const std::string& relative) {
  return OpenFolders(root, Split(relative), /*make=*/true).status();
}

absl::StatusOr<UniqueFd> OpenLogFile(const LogRoot& root, const std::string& path) {
  if (!absl::StartsWith(path, absl::StrCat(root.path, "/"))) {
    return absl::InternalError(absl::StrCat(path, " is not below ", root.path));
  }
  std::vector<std::string> names = Split(path.substr(root.path.size()));
  const std::string name = names.back();
  names.pop_back();
  DDP_ASSIGN_OR_RETURN(const UniqueFd folder, OpenFolders(root, names, /*make=*/false));
  UniqueFd file(::openat(folder.get(), name.c_str(), kAppend | O_CREAT | O_EXCL, kFileMode));
  if (file.valid() || errno != EEXIST) {
    if (!file.valid()) return ErrnoAt("cannot open", path);
    return file;
  }
  // Several workers share the file of filtered lines.
  file.reset(::openat(folder.get(), name.c_str(), kAppend));
  if (!file.valid()) return ErrnoAt("cannot open", path);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) return ErrnoAt("cannot look at", path);
  if (!S_ISREG(info.st_mode)) return Refused("log file", path, "it is no regular file");
  if (info.st_nlink != 1) return Refused("log file", path, "it has another name elsewhere");
  DDP_RETURN_IF_ERROR(CheckOwnership("log file", path, info, root.owner));
  return file;
}

}  // namespace ddp::launcher
