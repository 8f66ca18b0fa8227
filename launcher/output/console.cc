#include "launcher/output/console.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "launcher/output/say.h"

namespace ddp::launcher {
namespace {

std::string GapLine(size_t dropped_bytes) {
  return absl::StrCat("ddprun: the disk was full: ", dropped_bytes,
                      " bytes of output are missing here\n");
}

}  // namespace

Console::Console(EventLoop* event_loop, int fd, FileWriter* writer)
    : event_loop_(event_loop), writer_(writer), fd_(fd), write_fd_(fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    closed_ = true;
  } else if (S_ISREG(info.st_mode)) {
    kind_ = Kind::kFile;
  } else if (S_ISSOCK(info.st_mode)) {
    kind_ = Kind::kSocket;
  } else if (S_ISFIFO(info.st_mode)) {
    kind_ = Kind::kPipe;
    OpenAgain();
  } else if (S_ISCHR(info.st_mode)) {
    kind_ = ::isatty(fd) != 0 ? Kind::kStream : Kind::kFile;
    if (kind_ == Kind::kStream) OpenAgain();
  }
  const bool may_wait = S_ISREG(info.st_mode) || kind_ == Kind::kUnknown;
  if (may_wait && !closed_ && writer_ != nullptr) UseWriter();
}

Console::~Console() {
  Unwatch();
  if (kind_ == Kind::kWriter) writer_->Remove(file_);
}

void Console::UseWriter() {
  UniqueFd copy(::fcntl(fd_, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  if (!copy.valid()) return;
  file_ = writer_->Add(std::move(copy), {.on_error = [this](const std::string&) { closed_ = true; },
                                         .on_written =
                                             [this] {
                                               if (!was_full_ || full()) return;
                                               was_full_ = false;
                                               if (on_room_) on_room_();
                                             },
                                         .gap_line = GapLine});
  kind_ = Kind::kWriter;
}

// Hands the lines over in pieces of whole lines, since the writer may not know the kind of its
// file.
void Console::WriteByWriter(const std::string& lines) {
  queue_ = lines;
  for (written_ = 0; written_ < queue_.size();) {
    const size_t size = NextChunk();
    writer_->Append(file_, queue_.substr(written_, size));
    written_ += size;
  }
  queue_.clear();
  written_ = 0;
  was_full_ = was_full_ || full();
}

size_t Console::pending() const {
  return kind_ == Kind::kWriter ? writer_->pending(file_) : queue_.size() - written_;
}

// O_NONBLOCK belongs to the open file, which we share with the process that started us: setting it
// there would change the shell's terminal. A second opening has flags of its own.
void Console::OpenAgain() {
  const std::string path = absl::StrCat("/proc/self/fd/", fd_);
  own_fd_.reset(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
  if (own_fd_.valid()) {
    write_fd_ = own_fd_.get();
  } else {
    kind_ = Kind::kUnknown;
  }
}

bool Console::SameAs(int fd) const {
  struct stat a {};
  struct stat b {};
  return ::fstat(fd_, &a) == 0 && ::fstat(fd, &b) == 0 && a.st_dev == b.st_dev &&
         a.st_ino == b.st_ino && a.st_rdev == b.st_rdev;
}

void Console::Write(const std::string& lines) {
  if (closed_) return;
  if (kind_ == Kind::kWriter) return WriteByWriter(lines);
  queue_ += lines;
  if (!watched_ && !WritePending()) Watch();
}

// Returns the number of bytes for the next write().
size_t Console::NextChunk() const {
  const size_t size = queue_.size() - written_;
  if (kind_ != Kind::kPipe && kind_ != Kind::kUnknown && kind_ != Kind::kWriter) return size;
  if (size <= PIPE_BUF) return size;
  const char* begin = queue_.data() + written_;
  const void* newline = ::memrchr(begin, '\n', PIPE_BUF);
  // A line longer than PIPE_BUF is written in pieces.
  if (newline == nullptr) return PIPE_BUF;
  return static_cast<size_t>(static_cast<const char*>(newline) - begin) + 1;
}

ssize_t Console::WriteSome(const char* data, size_t size) const {
  if (kind_ == Kind::kSocket) return ::send(write_fd_, data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (kind_ == Kind::kUnknown) {
    pollfd polled{.fd = write_fd_, .events = POLLOUT, .revents = 0};
    if (::poll(&polled, 1, 0) != 1) {
      errno = EAGAIN;
      return -1;
    }
  }
  return ::write(write_fd_, data, size);
}

// Returns true when no byte is left to write.
bool Console::WritePending() {
  while (written_ < queue_.size()) {
    const ssize_t count = WriteSome(queue_.data() + written_, NextChunk());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count < 0) {
      closed_ = true;
      written_ = queue_.size();
      break;
    }
    written_ += static_cast<size_t>(count);
  }
  // Moving the rest to the front each time would be quadratic in a long queue.
  if (written_ == queue_.size() || written_ >= kFullBytes) {
    queue_.erase(0, written_);
    written_ = 0;
  }
  return queue_.empty();
}

void Console::Watch() {
  watched_ = event_loop_->Watch(write_fd_, EPOLLOUT, [this](uint32_t) { OnWritable(); }).ok();
}

void Console::Unwatch() {
  if (!watched_) return;
  event_loop_->Unwatch(write_fd_);
  watched_ = false;
}

void Console::OnWritable() {
  const bool was_full = full();
  if (WritePending()) Unwatch();
  if (was_full && !full() && on_room_) on_room_();
}

void Console::Flush(const Patience& patience) {
  PatientPoll poll(patience);
  if (kind_ == Kind::kWriter) {
    while (pending() > 0) {
      if (!poll.Wait(writer_->fd(), POLLIN)) return GiveUp();
      writer_->Dispatch();
    }
    return;
  }
  while (!WritePending()) {
    if (poll.Wait(write_fd_, POLLOUT)) continue;
    GiveUp();
    break;
  }
  Unwatch();
}

void Console::GiveUp() {
  pollfd polled{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
  if (!SameAs(STDERR_FILENO) && ::poll(&polled, 1, 0) == 1) {
    Say(absl::StrCat("nobody reads the output: ", pending(), " bytes of it are lost"));
  }
  closed_ = true;
  written_ = queue_.size();
}

}  // namespace ddp::launcher
