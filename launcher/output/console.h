#ifndef DDP_LAUNCHER_OUTPUT_CONSOLE_H_
#define DDP_LAUNCHER_OUTPUT_CONSOLE_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "base/file_writer.h"
#include "base/unique_fd.h"
#include "launcher/output/patience.h"

namespace ddp::launcher {

// Writes whole lines to stdout or stderr of this process without blocking the event loop. The
// LogRouter owns one per stream. Thread: that of the event loop.
//
// The console queues bytes that the terminal or pipe does not take at once, and writes them later.
// From `kFullBytes` of them on it is full(): the owner stops reading the workers' pipes, so workers
// that write block, and no line is lost. After a permanent write error (`ddprun ... | head`) the
// console discards everything.
//
// The FileWriter, if there is one, writes to a regular file, since its mount may stall. It also
// writes to a descriptor for which no non-blocking write exists. Lines that a full disk does not
// take are lost. Once there is room, a line in their place says how many bytes are missing.
//
// Each write() to a pipe holds whole lines if they fit into PIPE_BUF, so they do not mix with the
// lines of other writers. A longer line is written in pieces.
class Console {
 public:
  static constexpr size_t kFullBytes = 1 << 20;

  // Owns none of its arguments; all must outlive the console. Without `writer`, writing to a
  // regular file blocks.
  Console(EventLoop* event_loop, int fd, FileWriter* writer = nullptr);
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  ~Console();

  // Writes or queues one or more lines, each with its newline. Never blocks, except on a regular
  // file without a FileWriter. Never refuses.
  void Write(const std::string& lines);

  bool full() const { return pending() >= kFullBytes; }

  // Returns the number of bytes that are queued and not yet written.
  size_t pending() const;

  // Sets the function to call each time the console stops being full.
  void OnRoom(std::function<void()> callback) { on_room_ = std::move(callback); }

  // Writes the queued bytes. Blocks until all are written or `patience` runs out; the console then
  // discards the rest. It reports on stderr how much is lost, unless stderr is this console or
  // would block.
  void Flush(const Patience& patience);

  // Returns true when `fd` refers to the same file, pipe or terminal as this console.
  bool SameAs(int fd) const;

 private:
  enum class Kind {
    kFile,     // regular file or /dev/null: write() is assumed not to block
    kWriter,   // regular file, or kUnknown descriptor, that the FileWriter writes
    kPipe,     // pipe, opened a second time so that O_NONBLOCK is ours alone
    kStream,   // terminal, opened a second time for the same reason
    kSocket,   // socket: cannot be reopened, but send() has MSG_DONTWAIT
    kUnknown,  // any other: poll() before each write() of at most PIPE_BUF bytes
  };

  void OpenAgain();
  void UseWriter();
  void WriteByWriter(const std::string& lines);
  size_t NextChunk() const;
  ssize_t WriteSome(const char* data, size_t size) const;
  bool WritePending();
  void Watch();
  void Unwatch();
  void OnWritable();
  void GiveUp();

  EventLoop* const event_loop_;
  FileWriter* const writer_;
  FileWriter::FileId file_ = 0;  // id in `writer_`; kWriter only
  bool was_full_ = false;        // kWriter only
  const int fd_;
  Kind kind_ = Kind::kUnknown;
  UniqueFd own_fd_;  // second opening; kPipe and kStream only
  int write_fd_;
  bool closed_ = false;  // true after a write error
  bool watched_ = false;
  std::string queue_;  // lines; the first `written_` bytes are written
  size_t written_ = 0;
  std::function<void()> on_room_;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_CONSOLE_H_
