#ifndef DDP_LAUNCHER_LOG_ROUTER_H_
#define DDP_LAUNCHER_LOG_ROUTER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/file_writer.h"
#include "base/unique_fd.h"
#include "launcher/console.h"
#include "launcher/patience.h"

namespace ddp::launcher {

// Carries the output of teed workers from their pipes to their files, byte for byte and at once,
// and to the console, there by whole lines behind a prefix. Any number of busy workers: no line is
// lost, cut or run together with another. A worker that writes faster than the console reads comes
// to wait, and so does every other teed worker of that console; the event loop does not. The same
// holds for a file on a mount that has stalled, where there is a FileWriter: then every teed worker
// that has a file waits.
//
// Lines of ddprun's own cannot wait. Where kOwnBytes of them are kept beyond what makes workers
// wait, more are dropped, and counted on the console once it takes lines again.
//
// A last line without its newline gets one on the console when its pipe is closed. A "line" longer
// than kMaxLineBytes is cut on the console (not in the file), each piece with its prefix.
//
// Not thread-safe; on the thread of the event loop.
class LogRouter {
 public:
  using StreamId = uint64_t;
  static constexpr size_t kMaxLineBytes = 1 << 20;
  static constexpr size_t kOwnBytes = 1 << 20;

  // `stdout_fd` and `stderr_fd` are the consoles; when both lead to the same place they are written
  // as one. `writer`, whose progress nobody else listens to, writes the files; null: the router
  // does, waiting for them. Nothing is owned; all must outlive the router.
  LogRouter(EventLoop* event_loop, int stdout_fd, int stderr_fd, FileWriter* writer = nullptr);
  LogRouter(const LogRouter&) = delete;
  LogRouter& operator=(const LogRouter&) = delete;
  ~LogRouter();

  struct Stream {
    UniqueFd pipe;          // the reading end, made non-blocking here
    UniqueFd file;          // gets every byte; may be none
    std::string file_path;  // for messages
    std::string prefix;     // "[default0]:"
    bool to_stderr = false;

    // Lines that contain one of these texts go to this file too, behind the prefix. Many streams
    // may have one file: it is to be open for appending.
    std::vector<std::string> filters;
    UniqueFd filtered_file;
    std::string filtered_path;
  };

  // Carries `stream` until its pipe is closed or CloseStream(). Errors: kInternal (epoll).
  absl::StatusOr<StreamId> AddStream(Stream stream);

  // Takes all that is in the pipe at this moment: after a worker's end, its last words. Not the end
  // of the stream: a child of the worker may still write. Nothing when the stream has ended.
  void DrainStream(StreamId id);

  // Takes what is in the pipe and ends the stream. Nothing when the stream has ended.
  void CloseStream(StreamId id);

  // A line of ddprun's own for stderr, without "ddprun: " before it and its line end. Never waits.
  void Say(const std::string& line);

  // The same for a text that is to stand there as it is: the line of a restart, an event.
  void SayAsItIs(const std::string& text);

  // The same, and it is never dropped: for the failure report, before Flush().
  void SayAtTheEnd(const std::string& text);

  // Writes what consoles and files have not taken yet, waiting for them; see Console::Flush.
  void Flush(const Patience& patience);

 private:
  struct Open;

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
  void Take(Open& open, const char* data, size_t size);
  static void AppendLine(Open& open, std::string* lines, std::string* matching);
  void End(StreamId id);
  void PauseAndResume();
  absl::Status Watch(StreamId id, Open& open);

  EventLoop* const event_loop_;
  FileWriter* const writer_;
  bool files_were_full_ = false;
  size_t dropped_ = 0;  // lines of ddprun's own
  Console stdout_console_;
  Console stderr_console_;
  const bool one_console_;
  std::map<StreamId, std::unique_ptr<Open>> streams_;
  StreamId next_id_ = 1;
  // Expires with the router.
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_LOG_ROUTER_H_
