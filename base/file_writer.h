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

// Appends to files on a named thread. A file on a stalled mount then blocks that thread, not the
// event loop. The thread writes one file at a time, so the files of one writer delay each other.
//
// The queue has no bound of its own: the owner checks pending() before it appends. If too much is
// pending, the owner stops reading the data that it would append, or drops and reports the data.
//
// Thread-compatible: every call and every callback runs on the thread of the event loop.
class FileWriter {
 public:
  using FileId = uint64_t;

  // Number of pending bytes from which on an owner should not append.
  static constexpr size_t kFullBytes = 4 << 20;

  // `event_loop` is not owned and must outlive the writer; `name` is the thread's. Errors:
  // kInternal (eventfd, epoll).
  static absl::StatusOr<std::unique_ptr<FileWriter>> Create(EventLoop* event_loop,
                                                            std::string name);

  // Never blocks. Data not written yet is lost, so owners flush before (see their Flush()).
  ~FileWriter() = default;

  struct Callbacks {
    // Called once, when a write has failed and has ended the file. Data that is pending or appended
    // later is dropped.
    std::function<void(const std::string& why)> on_error;
    // Called after data was written or dropped: pending() has decreased.
    std::function<void()> on_written;
    // Makes a file of lines outlive a full disk (ENOSPC, EDQUOT). Data that does not fit is
    // dropped, and on_error is not called. Once there is room, the writer ends a torn line and
    // writes the line that this function returns for the number of dropped bytes, with its
    // newline. Null: a full disk ends the file. Thread: the writer's own.
    std::string (*gap_line)(size_t dropped_bytes) = nullptr;
  };

  // Takes ownership of `fd`, which may be non-blocking.
  FileId Add(UniqueFd fd, Callbacks callbacks);

  // Does not block, except where TaskThread::Run() does. An unknown id is ignored, here and below.
  void Append(FileId id, std::string data);

  // Close() closes the file after all appended data is written; callbacks are called until then.
  // Remove() does the same, and no callback of the file is called any more.
  void Close(FileId id);
  void Remove(FileId id);

  // Sets a callback for each time that data of any file was written or dropped.
  void OnProgress(std::function<void()> callback) { on_progress_ = std::move(callback); }

  // Return the number of bytes not yet written: of one file, or of all files.
  size_t pending(FileId id) const;
  size_t pending() const { return pending_; }

  // For a caller that waits without the event loop; see TaskThread.
  int fd() const { return thread_->fd(); }
  void Dispatch() { thread_->Dispatch(); }

 private:
  struct Output;
  struct File {
    std::shared_ptr<Output> output;  // used by the thread only, from the first Append() on
    Callbacks callbacks;
    size_t pending = 0;
    bool is_closing = false;
  };

  explicit FileWriter(std::unique_ptr<TaskThread> thread) : thread_(std::move(thread)) {}
  static std::string WriteAll(Output& output, const std::string& data);
  void OnWritten(FileId id, size_t size, const std::string& error);

  std::map<FileId, File> files_;
  FileId next_id_ = 1;
  size_t pending_ = 0;
  std::function<void()> on_progress_;
  const std::unique_ptr<TaskThread> thread_;  // destroyed first, because its tasks use the rest
};

}  // namespace ddp

#endif  // DDP_BASE_FILE_WRITER_H_
