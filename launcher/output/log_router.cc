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

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::launcher {
namespace {

// Capacity of a pipe by default.
constexpr size_t kReadBytes = 64 << 10;

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
  std::string line;  // incomplete line, without its newline
  bool watched = false;
};

LogRouter::LogRouter(EventLoop* event_loop, int stdout_fd, int stderr_fd, FileWriter* writer)
    : event_loop_(event_loop),
      writer_(writer),
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
  OwnConsole().Write(text + "\n");
}

void LogRouter::SayAtTheEnd(const std::string& text) {
  SayDropped();
  OwnConsole().Write(text + "\n");
}

void LogRouter::SayDropped() {
  const size_t dropped = std::exchange(dropped_, 0);
  if (dropped == 0) return;
  OwnConsole().Write(absl::StrCat("ddprun: ", dropped, dropped == 1 ? " line" : " lines",
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
  Take(open, buffer.data(), static_cast<size_t>(count));
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

// Writes the lines that `data` completes to the console, and keeps the rest.
void LogRouter::Take(Open& open, const char* data, size_t size) {
  std::string lines;
  std::string matching;
  while (size > 0) {
    const void* newline = std::memchr(data, '\n', size);
    size_t part =
        newline == nullptr ? size : static_cast<size_t>(static_cast<const char*>(newline) - data);
    const size_t room = kMaxLineBytes - open.line.size();
    const bool cut = part > room;
    if (cut) part = room;
    open.line.append(data, part);
    data += part;
    size -= part;
    if (newline == nullptr && !cut) break;
    if (!cut) ++data, --size;
    AppendLine(open, &lines, &matching);
  }
  AppendMatching(open, matching);
  if (!lines.empty()) ConsoleOf(open).Write(lines);
}

// Completes the line in `open` and appends it to `lines`, and to `matching` if a filter selects it.
void LogRouter::AppendLine(Open& open, std::string* lines, std::string* matching) {
  const Stream& stream = open.stream;
  absl::StrAppend(lines, stream.prefix, open.line, "\n");
  if (ContainsOneOf(open.line, stream.filters)) {
    absl::StrAppend(matching, stream.prefix, open.line, "\n");
  }
  open.line.clear();
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
  if (!open.line.empty()) Take(open, "\n", 1);
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
