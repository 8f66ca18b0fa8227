#include "launcher/output/log_router.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

// Capacity of a pipe by default.
constexpr size_t kReadBytes = 64 << 10;

// A program that buffers its output writes blocks of this size or a multiple of it, which end in
// the middle of a line. That is no prompt.
constexpr ssize_t kStdioBlockBytes = 4096;

// Writes to a file, blocking. Closes the file at an error and returns its text; returns ""
// otherwise.
std::string WriteToFile(UniqueFd& file, const char* data, size_t size) {
  while (size > 0 && file.valid()) {
    const ssize_t count = ::write(file.get(), data, size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      const std::string why = std::strerror(errno);
      file.reset();
      return why;
    }
    data += count;
    size -= static_cast<size_t>(count);
  }
  return "";
}

bool ContainsOneOf(const std::string& line, const std::vector<std::string>& texts) {
  return std::any_of(texts.begin(), texts.end(),
                     [&](const std::string& text) { return line.find(text) != std::string::npos; });
}

}  // namespace

struct LogRouter::Open {
  Stream stream;
  FileWriter::FileId file = 0;  // id in the writer, which then owns the stream's descriptors
  FileWriter::FileId filtered_file = 0;
  StreamId id = 0;
  std::string line;  // the part of the last line that is not printed yet
  // The whole last line, for filters. Empty without filters.
  std::string whole;
  bool has_timer = false;   // that prints `line`
  bool is_busy = false;     // bytes came since the timer was set
  bool ends_block = false;  // the last bytes were whole blocks of a buffered writer
  bool watched = false;
};

LogRouter::LogRouter(EventLoop* event_loop, int stdout_fd, int stderr_fd, FileWriter* writer,
                     absl::Duration partial_line_delay)
    : event_loop_(event_loop),
      writer_(writer),
      partial_line_delay_(partial_line_delay),
      stdout_console_(event_loop, stdout_fd, writer),
      stderr_console_(event_loop, stderr_fd, writer),
      one_console_(stdout_console_.SameAs(stderr_fd)) {
  for (Console* console : {&stdout_console_, &stderr_console_}) {
    console->OnRoom([this] {
      SayDropped();
      PauseAndResume();
    });
  }
  if (writer_ != nullptr) writer_->OnProgress([this] { OnWritten(); });
}

LogRouter::~LogRouter() {
  for (const auto& [id, open] : streams_) {
    if (open->watched) event_loop_->Unwatch(open->stream.pipe.get());
  }
  if (writer_ == nullptr) return;
  writer_->OnProgress(nullptr);
  for (const auto& [id, open] : streams_) {
    writer_->Close(open->file);
    writer_->Close(open->filtered_file);
  }
}

void LogRouter::Say(const std::string& line) { SayAsItIs(absl::StrCat("ddprun: ", line)); }

void LogRouter::SayAsItIs(const std::string& text) {
  if (OwnConsole().pending() >= Console::kFullBytes + kOwnBytes) {
    ++dropped_;
    return;
  }
  SayDropped();
  WriteOwn(text + "\n");
}

void LogRouter::SayAtTheEnd(const std::string& text) {
  SayDropped();
  WriteOwn(text + "\n");
}

// Prints lines of ddprun's own, below a worker's incomplete line.
void LogRouter::WriteOwn(const std::string& lines) {
  Cursor& cursor = one_console_ ? stdout_cursor_ : stderr_cursor_;
  const bool is_open = std::exchange(cursor, {}).owner != 0;
  OwnConsole().Write(is_open ? absl::StrCat("\n", lines) : lines);
}

void LogRouter::SayDropped() {
  const size_t dropped = std::exchange(dropped_, 0);
  if (dropped == 0) return;
  WriteOwn(absl::StrCat("ddprun: ", dropped, dropped == 1 ? " line" : " lines",
                        " of ddprun's were dropped here: nobody read them in time\n"));
}

void LogRouter::SayLost(const std::string& path, const std::string& why) {
  if (why.empty()) return;
  Say(absl::StrCat(path, ": ", why, ": further output goes to the console only"));
}

const Console& LogRouter::ConsoleOf(const Open& open) const {
  return open.stream.to_stderr && !one_console_ ? stderr_console_ : stdout_console_;
}

Console& LogRouter::ConsoleOf(const Open& open) {
  return open.stream.to_stderr && !one_console_ ? stderr_console_ : stdout_console_;
}

// Returns true when the router may read this stream. While the files are full, only streams with a
// file wait.
bool LogRouter::MayRead(const Open& open) const {
  return !ConsoleOf(open).full() && (open.file == 0 || !files_were_full_);
}

// Adds a file to the writer. Ids in `Open` stay 0 where there is no file or no writer.
FileWriter::FileId LogRouter::AddFile(UniqueFd file, const std::string& path) {
  return writer_->Add(
      std::move(file),
      {.on_error =
           [this, path, alive = std::weak_ptr<const bool>(alive_)](const std::string& why) {
             if (!alive.expired()) SayLost(path, why);
           },
       .on_written = nullptr});
}

void LogRouter::OnWritten() {
  if (!files_were_full_ || writer_->pending() >= FileWriter::kFullBytes / 2) return;
  files_were_full_ = false;
  PauseAndResume();
}

absl::StatusOr<LogRouter::StreamId> LogRouter::AddStream(Stream stream) {
  const int flags = ::fcntl(stream.pipe.get(), F_GETFL);
  if (flags < 0 || ::fcntl(stream.pipe.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    return absl::InternalError(absl::StrCat("fcntl: ", std::strerror(errno)));
  }
  const StreamId id = next_id_++;
  auto open = std::make_unique<Open>();
  open->id = id;
  open->stream = std::move(stream);
  Stream& taken = open->stream;
  if (writer_ != nullptr && taken.file.valid()) {
    open->file = AddFile(std::move(taken.file), taken.file_path);
  }
  if (writer_ != nullptr && taken.filtered_file.valid()) {
    open->filtered_file = AddFile(std::move(taken.filtered_file), taken.filtered_path);
  }
  // A new stream on a full console or file waits with the others.
  if (MayRead(*open)) DDP_RETURN_IF_ERROR(Watch(id, *open));
  streams_.emplace(id, std::move(open));
  return id;
}

absl::Status LogRouter::Watch(StreamId id, Open& open) {
  DDP_RETURN_IF_ERROR(
      event_loop_->Watch(open.stream.pipe.get(), EPOLLIN, [this, id](uint32_t) { Read(id); }));
  open.watched = true;
  return absl::OkStatus();
}

// Reads once per event, so that a busy worker does not keep the others waiting.
void LogRouter::Read(StreamId id) {
  Open& open = *streams_.at(id);
  if (!ReadSome(open, kReadBytes)) {
    End(id);
    return;
  }
  if (!MayRead(open)) PauseAndResume();
}

// Returns false at the end of the stream.
bool LogRouter::ReadSome(Open& open, size_t max_bytes) {
  std::array<char, kReadBytes> buffer;
  ssize_t count = 0;
  do {
    count = ::read(open.stream.pipe.get(), buffer.data(), std::min(max_bytes, buffer.size()));
  } while (count < 0 && errno == EINTR);
  if (count < 0) return errno == EAGAIN;
  if (count == 0) return false;
  AppendToFiles(open, buffer.data(), static_cast<size_t>(count));
  open.ends_block = count % kStdioBlockBytes == 0;
  Take(open, absl::string_view(buffer.data(), static_cast<size_t>(count)));
  return true;
}

void LogRouter::AppendToFiles(Open& open, const char* data, size_t size) {
  if (writer_ == nullptr) {
    return SayLost(open.stream.file_path, WriteToFile(open.stream.file, data, size));
  }
  writer_->Append(open.file, std::string(data, size));
  files_were_full_ = files_were_full_ || writer_->pending() >= FileWriter::kFullBytes;
}

void LogRouter::AppendMatching(Open& open, const std::string& lines) {
  if (writer_ != nullptr) return writer_->Append(open.filtered_file, lines);
  SayLost(open.stream.filtered_path,
          WriteToFile(open.stream.filtered_file, lines.data(), lines.size()));
}

LogRouter::Cursor& LogRouter::CursorOf(const Open& open) {
  return open.stream.to_stderr && !one_console_ ? stderr_cursor_ : stdout_cursor_;
}

// Prints the lines that `data` completes, and keeps the rest. A carriage return waits for the next
// byte, which may be a newline.
void LogRouter::Take(Open& open, absl::string_view data) {
  std::string lines;
  std::string matching;
  while (!data.empty()) {
    if (data.front() == '\n') {
      AppendLine(open, '\n', &lines, &matching);
      data.remove_prefix(1);
      continue;
    }
    if (absl::EndsWith(open.line, "\r")) {
      open.line.pop_back();
      AppendLine(open, '\r', &lines, &matching);
    }
    if (open.line.size() == kMaxLineBytes) AppendLine(open, '\n', &lines, &matching);
    const absl::string_view room = data.substr(0, kMaxLineBytes - open.line.size());
    const size_t end = room.find_first_of("\r\n");
    const bool is_return = end != absl::string_view::npos && room[end] == '\r';
    const size_t part = end == absl::string_view::npos ? room.size() : end + (is_return ? 1 : 0);
    absl::StrAppend(&open.line, data.substr(0, part));
    data.remove_prefix(part);
  }
  AppendMatching(open, matching);
  if (!lines.empty()) ConsoleOf(open).Write(lines);
  open.is_busy = open.has_timer;
  if (!open.line.empty() && !open.has_timer) AwaitRestOfLine(open);
}

void LogRouter::AwaitRestOfLine(Open& open) {
  if (partial_line_delay_ == absl::InfiniteDuration()) return;
  open.has_timer = true;
  event_loop_->AddTimer(partial_line_delay_,
                        [this, id = open.id, alive = std::weak_ptr<const bool>(alive_)] {
                          if (!alive.expired()) ShowPartialLine(id);
                        });
}

// Appends the line in `open` to `lines`, and to `matching` if a filter selects it. `end`: '\n' or
// '\r'; 0: more of the line will come.
void LogRouter::AppendLine(Open& open, char end, std::string* lines, std::string* matching) {
  const Stream& stream = open.stream;
  Cursor& cursor = CursorOf(open);
  if (cursor.owner != 0 && cursor.owner != open.id) *lines += '\n';
  // The newline after a carriage return that is printed ends the same line.
  const bool ends_shown = cursor.owner == open.id && open.line.empty() && end == '\n';
  if ((cursor.owner != open.id || cursor.at_start) && !ends_shown) *lines += stream.prefix;
  *lines += open.line;
  if (end != 0) *lines += end;
  cursor = {.owner = end == '\n' ? 0 : open.id, .at_start = end == '\r'};
  if (!stream.filters.empty()) {
    open.whole += open.line;
    if (end != 0 && ContainsOneOf(open.whole, stream.filters)) {
      absl::StrAppend(matching, stream.prefix, open.whole, "\n");
    }
    if (end != 0) open.whole.clear();
  }
  open.line.clear();
}

void LogRouter::ShowPartialLine(StreamId id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Open& open = *found->second;
  open.has_timer = false;
  if (open.line.empty() || open.ends_block) return;
  // The rest is on its way, or waits until the console has room.
  if (std::exchange(open.is_busy, false) || !open.watched) return AwaitRestOfLine(open);
  const bool is_return = open.line.back() == '\r';
  if (is_return) open.line.pop_back();
  std::string text;
  std::string matching;
  AppendLine(open, is_return ? '\r' : '\0', &text, &matching);
  AppendMatching(open, matching);
  ConsoleOf(open).Write(text);
}

void LogRouter::DrainStream(StreamId id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Open& open = *found->second;
  int available = 0;
  if (::ioctl(open.stream.pipe.get(), FIONREAD, &available) != 0) available = 0;
  // Reads no more than the present bytes: a child of the worker may write without end.
  size_t left = static_cast<size_t>(std::max(available, 0));
  while (left > 0) {
    const size_t part = std::min(left, kReadBytes);
    if (!ReadSome(open, part)) break;
    left -= part;
  }
  // No process holds the other end any more: this is the end of the stream.
  pollfd polled{.fd = open.stream.pipe.get(), .events = POLLIN, .revents = 0};
  if (::poll(&polled, 1, 0) == 1 && polled.revents == POLLHUP) End(id);
}

void LogRouter::CloseStream(StreamId id) {
  if (streams_.count(id) == 0) return;
  DrainStream(id);
  End(id);
}

void LogRouter::End(StreamId id) {
  const auto found = streams_.find(id);
  if (found == streams_.end()) return;
  Open& open = *found->second;
  if (!open.line.empty() || CursorOf(open).owner == id) Take(open, "\n");
  if (open.watched) event_loop_->Unwatch(open.stream.pipe.get());
  if (writer_ != nullptr) {
    writer_->Close(open.file);
    writer_->Close(open.filtered_file);
  }
  streams_.erase(found);
}

void LogRouter::PauseAndResume() {
  for (const auto& [id, open] : streams_) {
    const bool may_read = MayRead(*open);
    if (may_read == open->watched) continue;
    if (!may_read) {
      event_loop_->Unwatch(open->stream.pipe.get());
      open->watched = false;
    } else if (const absl::Status status = Watch(id, *open); !status.ok()) {
      Say(std::string(status.message()));
    }
  }
}

void LogRouter::Flush(const Patience& patience) {
  SayDropped();
  stdout_console_.Flush(patience);
  if (!one_console_) stderr_console_.Flush(patience);
  if (writer_ == nullptr) return;
  PatientPoll poll(patience);
  while (writer_->pending() > 0 && poll.Wait(writer_->fd(), POLLIN)) writer_->Dispatch();
  if (writer_->pending() == 0) return;
  SayAtTheEnd(absl::StrCat("ddprun: the log files take nothing: ", writer_->pending(),
                           " bytes of the workers' output are lost"));
  OwnConsole().Flush({.stall_timeout = absl::ZeroDuration()});
}

}  // namespace ddp::launcher
