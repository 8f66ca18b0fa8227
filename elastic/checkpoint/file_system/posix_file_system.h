#ifndef DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_POSIX_FILE_SYSTEM_H_
#define DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_POSIX_FILE_SYSTEM_H_

#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "elastic/checkpoint/file_system/file_system.h"

namespace ddp::elastic {

// The FileSystem of the operating system. New files get mode 0666 and new directories 0777, less
// the umask. Threads: any.
//
// Every call but OpenFile() opens the folders between the root and the last name one by one,
// relative to each other (openat, O_NOFOLLOW). A link below the root therefore never redirects such
// a call.
//
// Some network file systems have no exclusive rename. There, Rename() of a file is a hard link and
// an unlink, which is exclusive too. Without hard links Rename() of a file, of 1 MiB at most,
// creates a copy (O_EXCL), reads it back, and unlinks the file. Rename() of a folder checks the
// target first and then renames: it does not exclude a concurrent rename to the same name.
class PosixFileSystem final : public FileSystem {
 public:
  // `root`: the folder of the checkpoints. Empty: there is no root. Every call then follows links
  // among the folders of a path. ListDirectory() and SyncDirectory() also follow a link at the end
  // of a path.
  explicit PosixFileSystem(std::string root = "");

  absl::StatusOr<std::unique_ptr<WritableFile>> CreateFile(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<ReadableFile>> OpenFile(const std::string& path) override;
  absl::Status MakeDirectory(const std::string& path) override;
  absl::StatusOr<EntryKind> KindOf(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status ReplaceFile(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<FileLock>> LockFile(const std::string& path,
                                                     LockKind kind) override;

 private:
  absl::Status CopyExclusively(const std::string& from, const std::string& to);
  struct Place;
  bool IsBelowRoot(const std::string& path) const;
  absl::StatusOr<Place> Find(const std::string& action, const std::string& path) const;
  absl::StatusOr<UniqueFd> OpenDirectory(const std::string& action, const std::string& path) const;

  const std::string root_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_POSIX_FILE_SYSTEM_H_
