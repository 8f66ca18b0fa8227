#include "elastic/timers/timer_pipe.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_macros.h"

namespace ddp::elastic {
namespace {

constexpr size_t kReadBytes = size_t{64} << 10;
// A request waits for the report of its worker's start for up to a second.
constexpr absl::Duration kLookPause = absl::Milliseconds(20);
constexpr int kMaxLooks = 50;
constexpr size_t kMaxEarly = 1000;

constexpr int kMaxComplaints = 5;  // a worker must not fill the console

absl::Status Failed(const std::string& path, const char* what) {
  return absl::InternalError(
      absl::StrCat("the pipe for timers of workers, ", path, ": ", what, ": ", strerror(errno)));
}

// Removes a pipe that an earlier job left: it has no reader.
absl::Status MakeRoom(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return absl::OkStatus();
  if (!S_ISFIFO(info.st_mode) || info.st_uid != ::geteuid()) {
    return absl::AlreadyExistsError(absl::StrCat(
        "TORCHELASTIC_TIMER_FILE=", path, ": something else is there: name a path that is free"));
  }
  const UniqueFd writer(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW));
  if (writer.valid()) {
    return absl::AlreadyExistsError(
        absl::StrCat("TORCHELASTIC_TIMER_FILE=", path,
                     ": another ddprun serves it: unset it or name another path"));
  }
  if (errno == ENOENT) return absl::OkStatus();  // its owner has just ended
  if (errno != ENXIO) return Failed(path, "open");
  const bool is_gone = ::unlink(path.c_str()) == 0 || errno == ENOENT;
  return is_gone ? absl::OkStatus() : Failed(path, "unlink");
}

// Returns true when `path` still is the open pipe: another process may have replaced it.
bool IsAt(const std::string& path, int fd) {
  struct stat there {};
  struct stat ours {};
  return ::lstat(path.c_str(), &there) == 0 && ::fstat(fd, &ours) == 0 &&
         there.st_dev == ours.st_dev && there.st_ino == ours.st_ino;
}

absl::Duration Until(double unix_s) {
  constexpr double kLongestS = 1e9;
  const double now_s = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  return absl::Seconds(std::clamp(unix_s - now_s, 0.0, kLongestS));
}

}  // namespace

TimerPipe::TimerPipe(std::string path, UniqueFd fd, Dependencies dependencies)
    : path_(std::move(path)), fd_(std::move(fd)), dependencies_(std::move(dependencies)) {}

TimerPipe::~TimerPipe() {
  dependencies_.event_loop->CancelTimer(timer_);
  dependencies_.event_loop->CancelTimer(early_timer_);
  dependencies_.event_loop->Unwatch(fd_.get());
  if (IsAt(path_, fd_.get())) ::unlink(path_.c_str());
}

absl::StatusOr<std::unique_ptr<TimerPipe>> TimerPipe::Open(const std::string& path,
                                                           Dependencies dependencies) {
  DDP_RETURN_IF_ERROR(MakeRoom(path));
  if (::mkfifo(path.c_str(), 0600) != 0) return Failed(path, "mkfifo");
  // Opened for writing too, so that there is no end of file when no worker has the pipe open.
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW));
  if (!fd.valid()) return Failed(path, "open");
  std::unique_ptr<TimerPipe> pipe(new TimerPipe(path, std::move(fd), std::move(dependencies)));
  TimerPipe* const self = pipe.get();
  DDP_RETURN_IF_ERROR(self->dependencies_.event_loop->Watch(self->fd_.get(), EPOLLIN,
                                                            [self](uint32_t) { self->Read(); }));
  return pipe;
}

// Reads one piece per event, so that a busy writer does not block the loop.
void TimerPipe::Read() {
  std::array<char, kReadBytes> buffer;
  const ssize_t count = ::read(fd_.get(), buffer.data(), buffer.size());
  if (count <= 0) return;
  const char* data = buffer.data();
  const char* const end = data + count;
  while (data < end) {
    const char* const newline = std::find(data, end, '\n');
    if (!skips_line_) line_.append(data, newline);
    if (line_.size() > TimerRequest::kMaxBytes) {
      skips_line_ = true;
      line_.clear();
    }
    if (newline == end) break;
    data = newline + 1;
    if (skips_line_) {
      Complain("a line that is too long");
    } else {
      TakeLine(line_);
    }
    skips_line_ = false;
    line_.clear();
  }
  ArmTimer();
}

void TimerPipe::TakeLine(const std::string& line) {
  const absl::StatusOr<TimerRequest> request = ParseTimerRequest(line);
  if (!request.ok()) return Complain(std::string(request.status().message()));
  if (early_.size() >= kMaxEarly) early_.pop_front();
  early_.push_back({*request});
  TakeEarly();
}

// Applies the requests whose worker is known by now. The others wait for the next look: their
// process may have ended, may be nobody's, or its start may not have been reported yet.
void TimerPipe::TakeEarly() {
  std::deque<Early> later;
  std::set<int64_t> waiting;  // the requests of one process keep their order
  for (Early& early : std::exchange(early_, {})) {
    const TimerRequest& request = early.request;
    const std::optional<int> owner =
        waiting.contains(request.pid) ? std::nullopt : OwnerOf(static_cast<pid_t>(request.pid));
    if (!owner.has_value()) {
      if (++early.looks > kMaxLooks) continue;
      waiting.insert(request.pid);
      later.push_back(std::move(early));
      continue;
    }
    const absl::Status applied = timers_.Apply(
        *owner, request, dependencies_.clock->Now() + Until(request.expiration_unix_s));
    if (!applied.ok()) Complain(std::string(applied.message()));
  }
  early_ = std::move(later);
  if (early_.empty() || early_timer_ != 0) return;
  early_timer_ = dependencies_.event_loop->AddTimer(kLookPause, [this] {
    early_timer_ = 0;
    TakeEarly();
    ArmTimer();
  });
}

// Finds the worker by the process's session: each worker leads one.
std::optional<int> TimerPipe::OwnerOf(pid_t pid) const {
  const std::optional<int> worker = dependencies_.find_worker(pid);
  if (worker.has_value()) return worker;
  const pid_t session = ::getsid(pid);
  return session > 0 ? dependencies_.find_worker(session) : std::nullopt;
}

void TimerPipe::Complain(const std::string& what) {
  if (++complaints_ > kMaxComplaints) return;
  dependencies_.say(absl::StrCat(path_, ": ", what, ": ignored"));
}

void TimerPipe::Forget(int local_rank) {
  timers_.Forget(local_rank);
  ArmTimer();
}

void TimerPipe::ArmTimer() {
  dependencies_.event_loop->CancelTimer(std::exchange(timer_, 0));
  const absl::Time next = timers_.next_deadline();
  if (next == absl::InfiniteFuture()) return;
  const absl::Duration pause = std::max(absl::ZeroDuration(), next - dependencies_.clock->Now());
  timer_ = dependencies_.event_loop->AddTimer(pause, [this] {
    timer_ = 0;
    for (const WorkerTimers::Expired& expired : timers_.TakeExpired(dependencies_.clock->Now())) {
      dependencies_.on_expired(expired);
    }
    ArmTimer();
  });
}

}  // namespace ddp::elastic
