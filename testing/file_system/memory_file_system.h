#ifndef DDP_TESTING_FILE_SYSTEM_MEMORY_FILE_SYSTEM_H_
#define DDP_TESTING_FILE_SYSTEM_MEMORY_FILE_SYSTEM_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/mutex.h"
#include "elastic/checkpoint/file_system/file_system.h"

namespace ddp::testing {

// A FileSystem in memory that loses data as a disk does. PowerCut() loses unsynced content, and
// names in unsynced folders. Calls are numbered from 1; a test can make any call fail or wait.
//
// OpenFile() follows links. Every other call refuses a path with a link before its last name, and
// treats a link at its last name as an entry of its own.
//
// Thread-safe. An open file must not be used after a power cut or after this object's end.
class MemoryFileSystem final : public elastic::FileSystem {
 public:
  // Losses of an interrupted write-back; a disk may show any mixture of these.
  enum class Loss {
    kEverythingUnsynced,
    kUnsyncedContent,  // names are kept; unsynced content is zeros, as by delayed allocation
    kUnsyncedNames,    // content is kept; folders are as last synced
    kNothing,          // a crash of the process alone
  };

  MemoryFileSystem();
  ~MemoryFileSystem() override;

  // Returns the number of calls so far, reading ones included.
  int64_t calls() const;

  // Makes call number `call` fail with `error`. A failing Append still writes half of its data.
  void FailCall(int64_t call, absl::Status error);
  // Makes call number `call` and all later ones fail, as if the process had ended.
  void FailFromCall(int64_t call, absl::Status error);

  // Runs `action` on the caller's thread just before call number `call`. `action` simulates other
  // processes while the caller is stopped, and may use this file system.
  void RunBeforeCall(int64_t call, std::function<void()> action);

  // Makes a link at `path` that points to the path `target`; as if synced.
  void MakeLink(const std::string& path, const std::string& target);

  // Applies `loss`, and ends all failures set before.
  void PowerCut(Loss loss);

  // Changes the content of an existing file, outside the interface; as if synced.
  void Corrupt(const std::string& path, const std::function<void(std::string&)>& change);

  // Returns the content of a file, or nullopt when there is no such file.
  std::optional<std::string> Content(const std::string& path) const;

  absl::StatusOr<std::unique_ptr<elastic::WritableFile>> CreateFile(
      const std::string& path) override;
  absl::StatusOr<std::unique_ptr<elastic::ReadableFile>> OpenFile(const std::string& path) override;
  absl::Status MakeDirectory(const std::string& path) override;
  absl::StatusOr<elastic::EntryKind> KindOf(const std::string& path) override;
  absl::StatusOr<std::vector<std::string>> ListDirectory(const std::string& path) override;
  absl::Status SyncDirectory(const std::string& path) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status ReplaceFile(const std::string& from, const std::string& to) override;
  absl::Status RemoveFile(const std::string& path) override;
  absl::Status RemoveDirectory(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<elastic::FileLock>> LockFile(const std::string& path,
                                                              elastic::LockKind kind) override;

 private:
  struct Node;
  class Writer;
  class Reader;
  class Lock;
  struct Place {
    std::shared_ptr<Node> folder;
    std::string name;
    std::shared_ptr<Node> node;  // null: no such name
  };

  void StandStill() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Count() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Place> Find(const std::string& path) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Resolve(std::string path) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Move(const std::string& from, const std::string& to, bool replace)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  std::shared_ptr<Node> root_ ABSL_GUARDED_BY(mutex_);
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::function<void()>> before_calls_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, absl::Status> failing_calls_ ABSL_GUARDED_BY(mutex_);
  int64_t fail_from_ ABSL_GUARDED_BY(mutex_) = INT64_MAX;
  absl::Status fail_from_error_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_FILE_SYSTEM_MEMORY_FILE_SYSTEM_H_
