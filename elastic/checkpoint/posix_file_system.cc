#include "elastic/checkpoint/posix_file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"

namespace ddp::elastic {
namespace {

// One call transfers less than 2 GiB anyway; a smaller bound keeps a call interruptible.
constexpr size_t kTransferBytesMax = size_t{64} << 20;

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

// The one place that turns errno into a Status.
absl::Status Error(const std::string& action, const std::string& path, int error) {
  return absl::Status(CodeFor(error),
                      absl::StrCat("cannot ", action, " ", path, ": ", std::strerror(error)));
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

struct CloseDirectory {
  void operator()(DIR* directory) const { closedir(directory); }
};

}  // namespace

absl::StatusOr<std::unique_ptr<WritableFile>> PosixFileSystem::CreateFile(const std::string& path) {
  UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
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
  if (mkdir(path.c_str(), 0777) == 0) return absl::OkStatus();
  return Error("make the folder", path, errno);
}

absl::StatusOr<std::vector<std::string>> PosixFileSystem::ListDirectory(const std::string& path) {
  const std::unique_ptr<DIR, CloseDirectory> directory(opendir(path.c_str()));
  if (directory == nullptr) return Error("list the folder", path, errno);
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
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return Error("open the folder", path, errno);
  // EINVAL: a file system that has nothing to sync for a folder.
  if (fsync(fd.get()) == 0 || errno == EINVAL) return absl::OkStatus();
  return Error("sync the folder", path, errno);
}

absl::Status PosixFileSystem::Rename(const std::string& from, const std::string& to) {
  const std::string action = absl::StrCat("rename ", from, " to");
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) {
    return absl::OkStatus();
  }
  if (errno != EINVAL && errno != ENOSYS) return Error(action, to, errno);
  struct stat info {};
  if (lstat(to.c_str(), &info) == 0) return Error(action, to, EEXIST);
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return Error(action, to, errno);
}

absl::Status PosixFileSystem::ReplaceFile(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return Error(absl::StrCat("rename ", from, " to"), to, errno);
}

absl::Status PosixFileSystem::RemoveFile(const std::string& path) {
  if (unlink(path.c_str()) == 0) return absl::OkStatus();
  return Error("remove", path, errno);
}

absl::Status PosixFileSystem::RemoveDirectory(const std::string& path) {
  if (rmdir(path.c_str()) == 0) return absl::OkStatus();
  return Error("remove the folder", path, errno);
}

}  // namespace ddp::elastic
