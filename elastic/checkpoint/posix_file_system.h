#ifndef DDP_ELASTIC_CHECKPOINT_POSIX_FILE_SYSTEM_H_
#define DDP_ELASTIC_CHECKPOINT_POSIX_FILE_SYSTEM_H_

#include <memory>
#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "elastic/checkpoint/file_system.h"

namespace ddp::elastic {

// The operating system's files. New files get mode 0666 and new directories 0777, less the umask.
//
// Every call but OpenFile() opens the folders between the root and the last name one by one,
// relative to each other (openat, O_NOFOLLOW). So nobody can lead a call elsewhere by a link, at no
// moment.
//
// On a file system without an exclusive rename (some network file systems), Rename() of a file is
// a hard link and an unlink, which is exclusive too. Rename() of a folder looks first and then
// renames there: two renamers at the same moment are not kept apart.
class PosixFileSystem final : public FileSystem {
 public:
  // `root`: the folder of the checkpoints. Empty: none; then links are followed in every folder of
  // a path, and only its last name is not resolved.
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

 private:
  struct Place;
  bool IsBelowRoot(const std::string& path) const;
  absl::StatusOr<Place> Find(const std::string& action, const std::string& path) const;
  absl::StatusOr<UniqueFd> OpenDirectory(const std::string& action, const std::string& path) const;

  const std::string root_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_POSIX_FILE_SYSTEM_H_
