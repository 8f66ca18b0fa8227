#ifndef DDP_LAUNCHER_OUTPUT_LOG_ROUTER_H_
#define DDP_LAUNCHER_OUTPUT_LOG_ROUTER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/file_writer.h"
#include "base/unique_fd.h"
#include "launcher/output/console.h"
#include "launcher/output/patience.h"

namespace ddp::launcher {

// Copies the output of teed workers from their pipes to their files and to the console. Owned by
// the agent's process, one per job. Thread: that of the event loop.
//
// Files get every byte as it is read. The console gets whole lines behind a prefix. For any number
// of busy workers, no line is lost or mixed with another as long as the console can be written.
//
// Back pressure: when a console is full, the router stops reading all pipes whose lines go to this
// console, so that workers that write block. The event loop does not block. When files do not take
// output (a stalled mount) and there is a FileWriter, the router stops reading every pipe that has
// a file.
//
// Lines of ddprun's own never block. When kOwnBytes are queued beyond the limit for workers,
// further lines are dropped. The console prints how many as soon as it takes lines again.
//
// A carriage return ends a line too, as progress bars write it, and is printed. An incomplete line
// (a prompt) is printed kPartialLineDelay after its last byte came, at most twice that, and goes on
// without a second prefix; the end of a block of a buffered writer is no prompt. When another line
// comes first, the incomplete one gets a newline, and its rest a prefix. It also gets a newline
// when its pipe is closed. A line longer than kMaxLineBytes is cut on the console (not in the
// file); each piece has its prefix.
class LogRouter {
 public:
  using StreamId = uint64_t;
  static constexpr size_t kMaxLineBytes = 1 << 20;
  static constexpr size_t kOwnBytes = 1 << 20;
  static constexpr absl::Duration kPartialLineDelay = absl::Milliseconds(100);

  // Writes the consoles to `stdout_fd` and `stderr_fd`; if both refer to the same place they are
  // one console. `writer` writes the files, and only the router may call its OnProgress(). Without
  // `writer` the router writes the files itself and blocks. Nothing is owned; all must outlive the
  // router.
  // `partial_line_delay`: see above; infinite: incomplete lines are never printed.
  LogRouter(EventLoop* event_loop, int stdout_fd, int stderr_fd, FileWriter* writer = nullptr,
            absl::Duration partial_line_delay = kPartialLineDelay);
  LogRouter(const LogRouter&) = delete;
  LogRouter& operator=(const LogRouter&) = delete;
  ~LogRouter();

  struct Stream {
    UniqueFd pipe;          // reading end; the router makes it non-blocking
    UniqueFd file;          // file for every byte; may be invalid
    std::string file_path;  // path of `file` in messages
    std::string prefix;     // "[default0]:"
    bool to_stderr = false;

    // Texts that select lines: a line that contains one goes to `filtered_file` too, behind the
    // prefix. Many streams may share one such file, which must be open for appending.
    std::vector<std::string> filters;
    UniqueFd filtered_file;
    std::string filtered_path;
  };

  // Copies `stream` until its pipe is closed or CloseStream() is called. Errors: kInternal (fcntl,
  // epoll).
  absl::StatusOr<StreamId> AddStream(Stream stream);

  // Reads everything that is in the pipe now: the last output of a worker that has ended. The
  // stream stays open, since a child of the worker may still write. Does nothing when the stream
  // has ended.
  void DrainStream(StreamId id);

  // Reads what is in the pipe and ends the stream. Does nothing when the stream has ended.
  void CloseStream(StreamId id);

  // Prints a line of ddprun's own on stderr, with "ddprun: " before it and a newline. Never blocks.
  void Say(const std::string& line);

  // Prints `text` and a newline on stderr without the prefix, for the line of a restart or an
  // event. Never blocks.
  void SayAsItIs(const std::string& text);

  // Prints `text` as SayAsItIs() does, but never drops it: for the failure report, before Flush().
  void SayAtTheEnd(const std::string& text);

  // Writes what consoles and files have not taken yet, one after the other. Blocks for each as
  // Console::Flush() does.
  void Flush(const Patience& patience);

 private:
  struct Open;

  // The end of a console's text. `owner`: the stream whose line has no newline yet; 0: none.
  // `at_start`: a carriage return was its last character.
  struct Cursor {
    StreamId owner = 0;
    bool at_start = false;
  };

  Console& OwnConsole() { return one_console_ ? stdout_console_ : stderr_console_; }
  FileWriter::FileId AddFile(UniqueFd file, const std::string& path);
  void OnWritten();
  void AppendToFiles(Open& open, const char* data, size_t size);
  void AppendMatching(Open& open, const std::string& lines);
  bool MayRead(const Open& open) const;
  void SayDropped();
  void SayLost(const std::string& path, const std::string& why);
  const Console& ConsoleOf(const Open& open) const;
  Console& ConsoleOf(const Open& open);
  void Read(StreamId id);
  bool ReadSome(Open& open, size_t max_bytes);
  void Take(Open& open, absl::string_view data);
  void AwaitRestOfLine(Open& open);
  Cursor& CursorOf(const Open& open);
  void WriteOwn(const std::string& lines);
  void AppendLine(Open& open, char end, std::string* lines, std::string* matching);
  void ShowPartialLine(StreamId id);
  void End(StreamId id);
  void PauseAndResume();
  absl::Status Watch(StreamId id, Open& open);

  EventLoop* const event_loop_;
  FileWriter* const writer_;
  const absl::Duration partial_line_delay_;
  bool files_were_full_ = false;
  size_t dropped_ = 0;  // dropped lines of ddprun's own
  Console stdout_console_;
  Console stderr_console_;
  const bool one_console_;
  Cursor stdout_cursor_;
  Cursor stderr_cursor_;
  std::map<StreamId, std::unique_ptr<Open>> streams_;
  StreamId next_id_ = 1;
  // Token that expires with the router.
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_OUTPUT_LOG_ROUTER_H_
