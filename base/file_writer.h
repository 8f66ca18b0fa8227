#ifndef DDP_BASE_FILE_WRITER_H_
#define DDP_BASE_FILE_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/task_thread.h"
#include "base/unique_fd.h"

namespace ddp {

// Appends to files on a named thread, so that a file on a mount that has stalled holds up that
// thread and not the event loop. The files of one writer wait for each other.
//
// The queue is bounded by its owners: whoever appends looks at pending(), and stops reading what it
// would append, or drops it and says so.
//
// Thread-compatible: everything here, the callbacks included, is on the thread of the event loop.
class FileWriter {
 public:
  using FileId = uint64_t;

  // From that much on owners should append no more.
  static constexpr size_t kFullBytes = 4 << 20;

  // `event_loop` is not owned and must outlive the writer; `name` is the thread's. Errors:
  // kInternal (eventfd, epoll).
  static absl::StatusOr<std::unique_ptr<FileWriter>> Create(EventLoop* event_loop,
                                                            std::string name);

  // Never waits: what has not been written is lost. See Flush() of the owners.
  ~FileWriter() = default;

  struct Callbacks {
    // The file cannot be written and is given up; what is appended from now on is dropped.
    std::function<void(const std::string& why)> on_error;
    // Some of what was appended is in the file, or was dropped: pending() is less.
    std::function<void()> on_written;
  };

  // Takes `fd`, which may be non-blocking.
  FileId Add(UniqueFd fd, Callbacks callbacks);

  // Never waits. Unknown ids are ignored, here and below.
  void Append(FileId id, std::string data);

  // Closes the file once everything appended to it is written. Until then its callbacks are called;
  // Remove(): no more.
  void Close(FileId id);
  void Remove(FileId id);

  // Called each time something was written or dropped, whichever file it was for.
  void OnProgress(std::function<void()> callback) { on_progress_ = std::move(callback); }

  // Bytes that are not in their files yet: of one file, of all.
  size_t pending(FileId id) const;
  size_t pending() const { return pending_; }

  // For a caller that waits without the event loop; see TaskThread.
  int fd() const { return thread_->fd(); }
  void Dispatch() { thread_->Dispatch(); }

 private:
  struct File {
    std::shared_ptr<UniqueFd> fd;  // the thread's, from the first Append() on
    Callbacks callbacks;
    size_t pending = 0;
    bool is_closing = false;
  };

  explicit FileWriter(std::unique_ptr<TaskThread> thread) : thread_(std::move(thread)) {}
  void OnWritten(FileId id, size_t size, const std::string& error);

  std::map<FileId, File> files_;
  FileId next_id_ = 1;
  size_t pending_ = 0;
  std::function<void()> on_progress_;
  const std::unique_ptr<TaskThread> thread_;  // ends first: its tasks call back
};

}  // namespace ddp

#endif  // DDP_BASE_FILE_WRITER_H_
