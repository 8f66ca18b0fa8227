#ifndef DDP_ELASTIC_CHECKPOINT_PROGRESS_FILE_SYSTEM_H_
#define DDP_ELASTIC_CHECKPOINT_PROGRESS_FILE_SYSTEM_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "elastic/checkpoint/file_system.h"
#include "elastic/checkpoint/stall_watch.h"

namespace ddp::elastic {

// Another file system that calls `on_progress` after every call that has moved bytes of a file: on
// the calling thread, also of files that are open when this object is gone. A call that does not
// return is named by `watch`.
class ProgressFileSystem final : public FileSystem {
 public:
  // `real` must outlive this, `watch` (may be null) its files too. `on_progress`: not null.
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

 private:
  FileSystem* const real_;
  const std::function<void()> on_progress_;
  StallWatch* const watch_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_PROGRESS_FILE_SYSTEM_H_
