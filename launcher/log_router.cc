#include "launcher/log_router.h"

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

// The capacity of a pipe, unless someone raised it.
constexpr size_t kReadBytes = 64 << 10;

// A file that cannot be written is given up. Returns why, or "".
std::string WriteToFile(UniqueFd& file, const char* data, size_t size) {
  while (size > 0 && file.valid()) {
    const ssize_t count = ::write(file.get(), data, size);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      file.reset();
      return std::strerror(errno);
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
  std::string line;  // begun, its newline not yet seen
  bool watched = false;
};

LogRouter::LogRouter(EventLoop* event_loop, int stdout_fd, int stderr_fd)
    : event_loop_(event_loop),
      stdout_console_(event_loop, stdout_fd),
      stderr_console_(event_loop, stderr_fd),
      one_console_(stdout_console_.SameAs(stderr_fd)) {
  stdout_console_.OnRoom([this] { Resume(stdout_console_); });
  stderr_console_.OnRoom([this] { Resume(stderr_console_); });
}

LogRouter::~LogRouter() {
  for (const auto& [id, open] : streams_) {
    if (open->watched) event_loop_->Unwatch(open->stream.pipe.get());
  }
}

void LogRouter::Say(const std::string& line) { SayAsItIs(absl::StrCat("ddprun: ", line)); }

void LogRouter::SayAsItIs(const std::string& text) {
  (one_console_ ? stdout_console_ : stderr_console_).Write(text + "\n");
}

void LogRouter::SayLost(const std::string& path, const std::string& why) {
  if (why.empty()) return;
  Say(absl::StrCat(path, ": ", why, ": further output goes to the console only"));
}

Console& LogRouter::ConsoleOf(const Open& open) {
  return open.stream.to_stderr && !one_console_ ? stderr_console_ : stdout_console_;
}

absl::StatusOr<LogRouter::StreamId> LogRouter::AddStream(Stream stream) {
  const int flags = ::fcntl(stream.pipe.get(), F_GETFL);
  if (flags < 0 || ::fcntl(stream.pipe.get(), F_SETFL, flags | O_NONBLOCK) != 0) {
    return absl::InternalError(absl::StrCat("fcntl: ", std::strerror(errno)));
  }
  const StreamId id = next_id_++;
  auto open = std::make_unique<Open>();
  open->stream = std::move(stream);
  // A stream that comes to a full console waits with the others.
  if (!ConsoleOf(*open).full()) DDP_RETURN_IF_ERROR(Watch(id, *open));
  streams_.emplace(id, std::move(open));
  return id;
}

absl::Status LogRouter::Watch(StreamId id, Open& open) {
  DDP_RETURN_IF_ERROR(
      event_loop_->Watch(open.stream.pipe.get(), EPOLLIN, [this, id](uint32_t) { Read(id); }));
  open.watched = true;
  return absl::OkStatus();
}

// One read per event, so that a busy worker does not keep the others waiting.
void LogRouter::Read(StreamId id) {
  Open& open = *streams_.at(id);
  if (!ReadSome(open, kReadBytes)) {
    End(id);
    return;
  }
  if (ConsoleOf(open).full()) Pause(ConsoleOf(open));
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
  SayLost(open.stream.file_path,
          WriteToFile(open.stream.file, buffer.data(), static_cast<size_t>(count)));
  Take(open, buffer.data(), static_cast<size_t>(count));
  return true;
}

// Hands the lines that `data` completes to the console and keeps the rest.
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
  SayLost(open.stream.filtered_path,
          WriteToFile(open.stream.filtered_file, matching.data(), matching.size()));
  if (!lines.empty()) ConsoleOf(open).Write(lines);
}

// Ends the line that was begun.
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
  // No more than what is there now: a child of the worker may write without end.
  size_t left = static_cast<size_t>(std::max(available, 0));
  while (left > 0) {
    const size_t part = std::min(left, kReadBytes);
    if (!ReadSome(open, part)) break;
    left -= part;
  }
  // Nobody holds the other end any more: this is the end of the stream.
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
  streams_.erase(found);
}

void LogRouter::Pause(const Console& console) {
  for (const auto& [id, open] : streams_) {
    if (&ConsoleOf(*open) != &console || !open->watched) continue;
    event_loop_->Unwatch(open->stream.pipe.get());
    open->watched = false;
  }
}

void LogRouter::Resume(const Console& console) {
  for (const auto& [id, open] : streams_) {
    if (&ConsoleOf(*open) != &console || open->watched) continue;
    if (const absl::Status status = Watch(id, *open); !status.ok()) {
      Say(std::string(status.message()));
    }
  }
}

void LogRouter::Flush(const Console::Patience& patience) {
  stdout_console_.Flush(patience);
  if (!one_console_) stderr_console_.Flush(patience);
}

}  // namespace ddp::launcher
