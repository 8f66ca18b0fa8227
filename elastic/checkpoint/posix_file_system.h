#ifndef DDP_ELASTIC_CHECKPOINT_POSIX_FILE_SYSTEM_H_
#define DDP_ELASTIC_CHECKPOINT_POSIX_FILE_SYSTEM_H_

#include <memory>
#include <string>
#include <vector>

#include "elastic/checkpoint/file_system.h"

namespace ddp::elastic {

// The operating system's files. New files get mode 0666 and new directories 0777, less the umask.
//
// On a file system without an exclusive rename (some network file systems), Rename() looks first
// and then renames: two renamers at the same moment are not kept apart there.
class PosixFileSystem final : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> CreateFile(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<ReadableFile>> OpenFile(const std::string& path) override;
  absl::Status MakeDirectory(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status ReplaceFile(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_POSIX_FILE_SYSTEM_H_
