#include "launcher/console.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "launcher/say.h"

namespace ddp::launcher {

Console::Console(EventLoop* event_loop, int fd) : event_loop_(event_loop), fd_(fd), write_fd_(fd) {
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
}

Console::~Console() { Unwatch(); }

// O_NONBLOCK belongs to the open file, which we share with whoever started us: setting it there
// would change the shell's terminal. A second opening has flags of its own.
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
  queue_ += lines;
  if (!watched_ && !WritePending()) Watch();
}

// How much to hand to the next write().
size_t Console::NextChunk() const {
  const size_t size = pending();
  if (kind_ != Kind::kPipe && kind_ != Kind::kUnknown) return size;
  if (size <= PIPE_BUF) return size;
  const char* begin = queue_.data() + written_;
  const void* newline = ::memrchr(begin, '\n', PIPE_BUF);
  // A line that is longer than PIPE_BUF goes out in pieces.
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

// Returns true when nothing is left to write.
bool Console::WritePending() {
  while (pending() > 0) {
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
  if (pending() == 0 || written_ >= kFullBytes) {
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
  const MonotonicClock clock;
  absl::Time end = absl::InfiniteFuture();  // finite once somebody is in a hurry
  while (!WritePending()) {
    const absl::Time now = clock.Now();
    if (now >= end) {
      GiveUp();
      break;
    }
    const absl::Duration wait =
        absl::Ceil(std::min(patience.stall_timeout, end - now), absl::Milliseconds(1));
    const int hurry_fd = end == absl::InfiniteFuture() ? patience.hurry_fd : -1;
    std::array<pollfd, 2> polled = {pollfd{.fd = write_fd_, .events = POLLOUT, .revents = 0},
                                    pollfd{.fd = hurry_fd, .events = POLLIN, .revents = 0}};
    const int ready =
        ::poll(polled.data(), polled.size(), static_cast<int>(absl::ToInt64Milliseconds(wait)));
    if (polled[1].revents != 0) end = now + patience.hurried_timeout;
    if (ready == 0) GiveUp();
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
