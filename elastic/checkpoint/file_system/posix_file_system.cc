#include "elastic/checkpoint/file_system/posix_file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "elastic/checkpoint/file_system/whole_file.h"

namespace ddp::elastic {
namespace {

// Bounds one read or write, so that it stays interruptible. The kernel's own bound is 2 GiB.
constexpr size_t kTransferBytesMax = size_t{64} << 20;
// Bounds a file that Rename() copies: a claim's text.
constexpr uint64_t kCopiedBytesMax = 1 << 20;

absl::StatusCode CodeFor(int error) {
  switch (error) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
      return absl::StatusCode::kAlreadyExists;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case EFBIG:
      return absl::StatusCode::kResourceExhausted;
    case ENOTDIR:
    case ENOTEMPTY:
    case EISDIR:
    case ELOOP:
    case EXDEV:
    case ENAMETOOLONG:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

// Turns errno into a Status, for the whole file system. `call`: the system call, where an action
// has several.
absl::Status Error(const std::string& action, const std::string& path, int error,
                   const std::string& call = "") {
  return absl::Status(CodeFor(error), absl::StrCat("cannot ", action, " ", path, ": ", call,
                                                   call.empty() ? "" : ": ", std::strerror(error)));
}

// Returns true when a file system answers so to a call that it does not have: renameat2() with a
// flag, or link().
bool IsUnsupported(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == EPERM ||
         error == EMLINK;
}

class PosixWritableFile final : public WritableFile {
 public:
  PosixWritableFile(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  absl::Status Reserve(uint64_t bytes) override {
    if (bytes == 0) return absl::OkStatus();
    int result = 0;
    do {
      result = fallocate(fd_.get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes));
    } while (result != 0 && errno == EINTR);
    if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return absl::OkStatus();
    return Error("reserve space for", path_, errno);
  }

  absl::Status Append(const char* data, size_t bytes) override {
    while (bytes > 0) {
      const ssize_t result = write(fd_.get(), data, std::min(bytes, kTransferBytesMax));
      if (result < 0 && errno == EINTR) continue;
      if (result < 0) return Error("write", path_, errno);
      data += result;
      bytes -= static_cast<size_t>(result);
    }
    return absl::OkStatus();
  }

  absl::Status Sync() override {
    if (fsync(fd_.get()) == 0) return absl::OkStatus();
    return Error("sync", path_, errno);
  }

  absl::Status Close() override {
    // Linux frees the descriptor in every case, EINTR included.
    if (close(fd_.release()) == 0 || errno == EINTR) return absl::OkStatus();
    return Error("close", path_, errno);
  }

 private:
  UniqueFd fd_;
  const std::string path_;
};

class PosixReadableFile final : public ReadableFile {
 public:
  PosixReadableFile(UniqueFd fd, std::string path, uint64_t size)
      : fd_(std::move(fd)), path_(std::move(path)), size_(size) {}

  uint64_t size() const override { return size_; }

  absl::Status Read(uint64_t offset, char* buffer, size_t bytes) const override {
    while (bytes > 0) {
      const ssize_t result =
          pread(fd_.get(), buffer, std::min(bytes, kTransferBytesMax), static_cast<off_t>(offset));
      if (result < 0 && errno == EINTR) continue;
      if (result < 0) return Error("read", path_, errno);
      if (result == 0) {
        return absl::DataLossError(absl::StrCat(path_, " ends at byte ", offset));
      }
      buffer += result;
      offset += static_cast<uint64_t>(result);
      bytes -= static_cast<size_t>(result);
    }
    return absl::OkStatus();
  }

 private:
  const UniqueFd fd_;
  const std::string path_;
  const uint64_t size_;
};

// Holds the lock of an open file description, which ends with its last descriptor.
class PosixFileLock final : public FileLock {
 public:
  explicit PosixFileLock(UniqueFd fd) : fd_(std::move(fd)) {}

 private:
  const UniqueFd fd_;
};

struct CloseDirectory {
  void operator()(DIR* directory) const { closedir(directory); }
};

}  // namespace

// The last name of a path, and the open folder that contains it.
struct PosixFileSystem::Place {
  UniqueFd folder;  // invalid: `name` is the whole path
  std::string name;

  int at() const { return folder.valid() ? folder.get() : AT_FDCWD; }
};

PosixFileSystem::PosixFileSystem(std::string root) : root_(std::move(root)) {}

bool PosixFileSystem::IsBelowRoot(const std::string& path) const {
  return !root_.empty() && absl::StartsWith(path, absl::StrCat(root_, "/"));
}

absl::StatusOr<PosixFileSystem::Place> PosixFileSystem::Find(const std::string& action,
                                                             const std::string& path) const {
  if (!IsBelowRoot(path)) return Place{UniqueFd(), path};
  const std::vector<std::string> names =
      absl::StrSplit(path.substr(root_.size()), '/', absl::SkipEmpty());
  if (names.empty()) return Place{UniqueFd(), path};
  Place place{UniqueFd(open(root_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)), names.back()};
  if (!place.folder.valid()) return Error(action, path, errno);
  for (size_t i = 0; i + 1 < names.size(); ++i) {
    UniqueFd next(openat(place.folder.get(), names[i].c_str(),
                         O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!next.valid()) return Error(action, path, errno);
    place.folder = std::move(next);
  }
  return place;
}

absl::StatusOr<UniqueFd> PosixFileSystem::OpenDirectory(const std::string& action,
                                                        const std::string& path) const {
  DDP_ASSIGN_OR_RETURN(const Place place, Find(action, path));
  const int follow = place.folder.valid() ? O_NOFOLLOW : 0;
  UniqueFd fd(openat(place.at(), place.name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | follow));
  if (!fd.valid()) return Error(action, path, errno);
  return fd;
}

absl::StatusOr<std::unique_ptr<WritableFile>> PosixFileSystem::CreateFile(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const Place place, Find("create", path));
  UniqueFd fd(openat(place.at(), place.name.c_str(),
                     O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!fd.valid()) return Error("create", path, errno);
  return std::make_unique<PosixWritableFile>(std::move(fd), path);
}

absl::StatusOr<std::unique_ptr<ReadableFile>> PosixFileSystem::OpenFile(const std::string& path) {
  // O_NONBLOCK: opening a fifo would otherwise wait for its writer.
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (!fd.valid()) return Error("open", path, errno);
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return Error("stat", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a plain file"));
  }
  return std::make_unique<PosixReadableFile>(std::move(fd), path,
                                             static_cast<uint64_t>(info.st_size));
}

absl::Status PosixFileSystem::MakeDirectory(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const Place place, Find("make the folder", path));
  if (mkdirat(place.at(), place.name.c_str(), 0777) == 0) return absl::OkStatus();
  return Error("make the folder", path, errno);
}

absl::StatusOr<EntryKind> PosixFileSystem::KindOf(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const Place place, Find("look at", path));
  struct stat info {};
  if (fstatat(place.at(), place.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return Error("look at", path, errno);
  }
  if (S_ISREG(info.st_mode)) return EntryKind::kFile;
  return S_ISDIR(info.st_mode) ? EntryKind::kDirectory : EntryKind::kOther;
}

absl::StatusOr<std::vector<std::string>> PosixFileSystem::ListDirectory(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenDirectory("list the folder", path));
  const std::unique_ptr<DIR, CloseDirectory> directory(fdopendir(fd.get()));
  if (directory == nullptr) return Error("list the folder", path, errno);
  (void)fd.release();  // owned by `directory` now
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const struct dirent* entry = readdir(directory.get());
    if (entry == nullptr) break;
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  if (errno != 0) return Error("list the folder", path, errno);
  return names;
}

absl::Status PosixFileSystem::SyncDirectory(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const UniqueFd fd, OpenDirectory("open the folder", path));
  // EINVAL: the file system does not sync folders.
  if (fsync(fd.get()) == 0 || errno == EINVAL) return absl::OkStatus();
  return Error("sync the folder", path, errno);
}

absl::Status PosixFileSystem::Rename(const std::string& from, const std::string& to) {
  const std::string action = absl::StrCat("rename ", from, " to");
  DDP_ASSIGN_OR_RETURN(const Place source, Find(action, from));
  DDP_ASSIGN_OR_RETURN(const Place target, Find(action, to));
  const char* source_name = source.name.c_str();
  const char* target_name = target.name.c_str();
  if (renameat2(source.at(), source_name, target.at(), target_name, RENAME_NOREPLACE) == 0) {
    return absl::OkStatus();
  }
  if (!IsUnsupported(errno)) return Error(action, to, errno, "renameat2");
  struct stat info {};
  if (fstatat(source.at(), source_name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
    return Error(action, to, errno, "stat");
  }
  if (!S_ISREG(info.st_mode)) {
    if (fstatat(target.at(), target_name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
      return Error(action, to, EEXIST, "stat");
    }
    if (renameat(source.at(), source_name, target.at(), target_name) == 0) return absl::OkStatus();
    return Error(action, to, errno, "rename");
  }
  if (linkat(source.at(), source_name, target.at(), target_name, 0) != 0) {
    if (!IsUnsupported(errno)) return Error(action, to, errno, "link");
    DDP_RETURN_IF_ERROR(CopyExclusively(from, to));
  }
  if (unlinkat(source.at(), source_name, 0) == 0) return absl::OkStatus();
  return Error(action, to, errno, "unlink");
}

// Creates the file `to` with the content of the small file `from`, on a file system without hard
// links. An object store may let two writers create one name: the writer whose content is there
// afterwards has it.
absl::Status PosixFileSystem::CopyExclusively(const std::string& from, const std::string& to) {
  DDP_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(*this, from, kCopiedBytesMax));
  DDP_RETURN_IF_ERROR(WriteWholeFile(*this, to, text));
  DDP_ASSIGN_OR_RETURN(const std::string stored, ReadWholeFile(*this, to, kCopiedBytesMax));
  if (stored == text) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(to, " was created by another writer too"));
}

absl::Status PosixFileSystem::ReplaceFile(const std::string& from, const std::string& to) {
  const std::string action = absl::StrCat("rename ", from, " to");
  DDP_ASSIGN_OR_RETURN(const Place source, Find(action, from));
  DDP_ASSIGN_OR_RETURN(const Place target, Find(action, to));
  if (renameat(source.at(), source.name.c_str(), target.at(), target.name.c_str()) == 0) {
    return absl::OkStatus();
  }
  return Error(action, to, errno, "rename");
}

absl::Status PosixFileSystem::RemoveFile(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const Place place, Find("remove", path));
  if (unlinkat(place.at(), place.name.c_str(), 0) == 0) return absl::OkStatus();
  return Error("remove", path, errno);
}

absl::Status PosixFileSystem::RemoveDirectory(const std::string& path) {
  DDP_ASSIGN_OR_RETURN(const Place place, Find("remove the folder", path));
  if (unlinkat(place.at(), place.name.c_str(), AT_REMOVEDIR) == 0) return absl::OkStatus();
  return Error("remove the folder", path, errno);
}

absl::StatusOr<std::unique_ptr<FileLock>> PosixFileSystem::LockFile(const std::string& path,
                                                                    LockKind kind) {
  DDP_ASSIGN_OR_RETURN(const Place place, Find("lock", path));
  // Over NFS an exclusive lock needs a descriptor that may write.
  const int access = kind == LockKind::kShared ? O_RDONLY : O_RDWR;
  UniqueFd fd(openat(place.at(), place.name.c_str(),
                     access | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (!fd.valid()) return Error("open", path, errno);
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) return Error("stat", path, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, " is not a plain file"));
  }
  // flock() and not fcntl(): a lock of fcntl() ends when the process closes any descriptor of the
  // file.
  if (flock(fd.get(), (kind == LockKind::kShared ? LOCK_SH : LOCK_EX) | LOCK_NB) == 0) {
    return std::make_unique<PosixFileLock>(std::move(fd));
  }
  if (errno == EWOULDBLOCK) return absl::UnavailableError(absl::StrCat(path, " is locked"));
  if (IsUnsupported(errno) || errno == ENOLCK) {
    return absl::UnimplementedError(absl::StrCat(path, ": the file system has no locks"));
  }
  return Error("lock", path, errno);
}

}  // namespace ddp::elastic
