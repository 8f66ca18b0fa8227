#ifndef DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_PROGRESS_FILE_SYSTEM_H_
#define DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_PROGRESS_FILE_SYSTEM_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "elastic/checkpoint/file_system/file_system.h"
#include "elastic/checkpoint/file_system/stall_watch.h"

namespace ddp::elastic {

// Wraps a FileSystem and reports its progress. Calls `on_progress` on the calling thread after
// every successful Reserve(), Append(), Sync() or Read() of a file, also after this object is
// destroyed. Registers every call with `watch`, which logs a call that does not return. Threads: as
// `real`.
class ProgressFileSystem final : public FileSystem {
 public:
  // `real` must outlive this object. `watch` (may be null) must outlive this object and the files
  // that it opened. `on_progress`: not null; runs on every thread that uses a file.
  ProgressFileSystem(FileSystem* real, std::function<void()> on_progress,
                     StallWatch* watch = nullptr);

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
  FileSystem* const real_;
  const std::function<void()> on_progress_;
  StallWatch* const watch_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FILE_SYSTEM_PROGRESS_FILE_SYSTEM_H_
