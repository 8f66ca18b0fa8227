#ifndef DDP_LAUNCHER_CONSOLE_H_
#define DDP_LAUNCHER_CONSOLE_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "base/event_loop.h"
#include "base/file_writer.h"
#include "base/unique_fd.h"
#include "launcher/patience.h"

namespace ddp::launcher {

// Writes whole lines to stdout or stderr of this process without ever making the event loop wait.
//
// What the terminal or pipe does not take at once is kept and written when it takes more. Above
// `kFullBytes` the console is full(): the owner stops giving it lines, and so the workers that
// write them come to wait, as they would if the console were theirs; no line is lost. A console
// that is closed for good (`ddprun ... | head`) swallows everything from then on.
//
// A regular file, which may be on a mount that has stalled, is written by a FileWriter where there
// is one, and so is what knows no write() without waiting.
//
// Into a pipe, lines are written by whole lines per write() as long as they fit PIPE_BUF, so that
// they do not mix with what others write there.
//
// Not thread-safe; on the thread of the event loop.
class Console {
 public:
  static constexpr size_t kFullBytes = 1 << 20;

  // Nothing is owned, all must outlive the console. `writer` null: a regular file is waited for.
  Console(EventLoop* event_loop, int fd, FileWriter* writer = nullptr);
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  ~Console();

  // Takes one or more lines, each with its newline. Never waits, never refuses.
  void Write(const std::string& lines);

  bool full() const { return pending() >= kFullBytes; }

  // Bytes that were not taken yet.
  size_t pending() const;

  // Called each time the console was full and is so no more.
  void OnRoom(std::function<void()> callback) { on_room_ = std::move(callback); }

  // Writes what is kept, waiting for the other side. Gives up when it loses patience, and says on
  // stderr how much is lost, unless that would make it wait again.
  void Flush(const Patience& patience);

  // Whether `fd` leads to the same file, pipe or terminal as this console.
  bool SameAs(int fd) const;

 private:
  enum class Kind {
    kFile,     // regular files, /dev/null: write() does not wait, it is said
    kWriter,   // regular files, and what would be kUnknown, where there is a FileWriter
    kPipe,     // opened a second time, so that O_NONBLOCK is ours alone
    kStream,   // a terminal, the same way
    kSocket,   // cannot be opened again, but each send() can say that it will not wait
    kUnknown,  // neither: one small write() at a time, after epoll said that there is room
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
  FileWriter::FileId file_ = 0;  // for kWriter
  bool was_full_ = false;        // the same
  const int fd_;
  Kind kind_ = Kind::kUnknown;
  UniqueFd own_fd_;  // for kPipe and kStream
  int write_fd_;
  bool closed_ = false;  // for good, by the other side
  bool watched_ = false;
  std::string queue_;  // lines; the first `written_` bytes are out
  size_t written_ = 0;
  std::function<void()> on_room_;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_CONSOLE_H_
