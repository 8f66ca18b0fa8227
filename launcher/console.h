#ifndef DDP_LAUNCHER_CONSOLE_H_
#define DDP_LAUNCHER_CONSOLE_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"

namespace ddp::launcher {

// Writes whole lines to stdout or stderr of this process without ever making the event loop wait.
//
// What the terminal or pipe does not take at once is kept and written when it takes more. Above
// `kFullBytes` the console is full(): the owner stops giving it lines, and so the workers that
// write them come to wait, as they would if the console were theirs; no line is lost. A console
// that is closed for good (`ddprun ... | head`) swallows everything from then on.
//
// Into a pipe, lines are written by whole lines per write() as long as they fit PIPE_BUF, so that
// they do not mix with what others write there.
//
// Not thread-safe; on the thread of the event loop.
class Console {
 public:
  static constexpr size_t kFullBytes = 1 << 20;

  // `event_loop` and the descriptor `fd` are not owned and must outlive the console.
  Console(EventLoop* event_loop, int fd);
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;
  ~Console();

  // Takes one or more lines, each with its newline. Never waits, never refuses.
  void Write(const std::string& lines);

  bool full() const { return pending() >= kFullBytes; }

  // Called each time the console was full and is so no more.
  void OnRoom(std::function<void()> callback) { on_room_ = std::move(callback); }

  struct Patience {
    absl::Duration stall_timeout;  // how long nothing may be taken
    // Readable when somebody wants the end now: from then on all has this much time. -1: nobody.
    int hurry_fd = -1;
    absl::Duration hurried_timeout;
  };

  // Writes what is kept, waiting for the other side. Gives up when it loses patience, and says on
  // stderr how much is lost, unless that would make it wait again.
  void Flush(const Patience& patience);

  // Whether `fd` leads to the same file, pipe or terminal as this console.
  bool SameAs(int fd) const;

 private:
  enum class Kind {
    kFile,     // regular files, /dev/null: write() does not wait
    kPipe,     // opened a second time, so that O_NONBLOCK is ours alone
    kStream,   // a terminal, the same way
    kSocket,   // cannot be opened again, but each send() can say that it will not wait
    kUnknown,  // neither: one small write() at a time, after epoll said that there is room
  };

  size_t pending() const { return queue_.size() - written_; }
  void OpenAgain();
  size_t NextChunk() const;
  ssize_t WriteSome(const char* data, size_t size) const;
  bool WritePending();
  void Watch();
  void Unwatch();
  void OnWritable();
  void GiveUp();

  EventLoop* const event_loop_;
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
