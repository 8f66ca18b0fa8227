#include "base/event_loop.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/unique_fd.h"

namespace ddp {
namespace {

absl::Status ErrnoStatus(const char* what) {
  return absl::InternalError(absl::StrCat("event loop: ", what, ": ", strerror(errno)));
}

// Epoll carries this number, not the descriptor. An event may have been fetched before its
// descriptor was unwatched, closed and reused; such an event must not reach the new owner.
using RegistrationId = uint64_t;
constexpr RegistrationId kTimerRegistration = 0;

constexpr int64_t kNotArmed = std::numeric_limits<int64_t>::max();

}  // namespace

struct EventLoop::State {
  using FdCallback = std::function<void(uint32_t events)>;

  struct Registration {
    int fd = -1;
    // Shared with a running callback, which may unwatch itself.
    std::shared_ptr<FdCallback> callback;
  };

  UniqueFd epoll;
  UniqueFd timer;
  bool stopped = false;

  RegistrationId next_registration = kTimerRegistration + 1;
  std::unordered_map<RegistrationId, Registration> registrations;
  std::unordered_map<int, RegistrationId> registration_of_fd;

  // Sorted by due time on CLOCK_MONOTONIC, then by age: timers of one instant fire in order.
  std::map<std::pair<int64_t, TimerId>, std::function<void()>> timers;
  std::unordered_map<TimerId, int64_t> due_of_timer;
  TimerId next_timer = 1;
  // Time at which `timer` expires, or kNotArmed.
  int64_t armed_ns = kNotArmed;

  void ArmTimer();
  void FireTimers();
  void Dispatch(const epoll_event& event);
};

EventLoop::EventLoop(std::unique_ptr<State> state) : state_(std::move(state)) {}
EventLoop::~EventLoop() = default;

absl::StatusOr<std::unique_ptr<EventLoop>> EventLoop::Create() {
  auto state = std::make_unique<State>();
  state->epoll.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!state->epoll.valid()) return ErrnoStatus("epoll_create1");
  state->timer.reset(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!state->timer.valid()) return ErrnoStatus("timerfd_create");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kTimerRegistration;
  if (epoll_ctl(state->epoll.get(), EPOLL_CTL_ADD, state->timer.get(), &event) != 0) {
    return ErrnoStatus("epoll_ctl");
  }
  return std::unique_ptr<EventLoop>(new EventLoop(std::move(state)));
}

absl::Status EventLoop::Watch(int fd, uint32_t events, std::function<void(uint32_t)> callback) {
  if (state_->registration_of_fd.contains(fd)) {
    return absl::AlreadyExistsError(absl::StrCat("event loop: descriptor ", fd, " is watched"));
  }
  const RegistrationId id = state_->next_registration++;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (epoll_ctl(state_->epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoStatus("epoll_ctl");
  }
  state_->registrations[id] = {fd, std::make_shared<State::FdCallback>(std::move(callback))};
  state_->registration_of_fd[fd] = id;
  return absl::OkStatus();
}

void EventLoop::Unwatch(int fd) {
  const auto found = state_->registration_of_fd.find(fd);
  if (found == state_->registration_of_fd.end()) return;
  epoll_ctl(state_->epoll.get(), EPOLL_CTL_DEL, fd, nullptr);
  state_->registrations.erase(found->second);
  state_->registration_of_fd.erase(found);
}

EventLoop::TimerId EventLoop::AddTimer(absl::Duration delay, std::function<void()> callback) {
  const TimerId id = state_->next_timer++;
  // The limit is longer than any wait, and cannot overflow.
  const int64_t delay_ns = std::min(absl::ToInt64Nanoseconds(delay), INT64_MAX / 2);
  const int64_t due_ns = MonotonicNanoseconds() + std::max<int64_t>(delay_ns, 0);
  state_->timers[{due_ns, id}] = std::move(callback);
  state_->due_of_timer[id] = due_ns;
  state_->ArmTimer();
  return id;
}

void EventLoop::CancelTimer(TimerId id) {
  const auto found = state_->due_of_timer.find(id);
  if (found == state_->due_of_timer.end()) return;
  state_->timers.erase({found->second, id});
  state_->due_of_timer.erase(found);
  state_->ArmTimer();
}

void EventLoop::State::ArmTimer() {
  // CancelTimer() leaves the timerfd armed: a needless expiration is cheaper than a system call for
  // every cancelled timer.
  if (timers.empty() || timers.begin()->first.first >= armed_ns) return;
  armed_ns = timers.begin()->first.first;
  itimerspec spec{};
  spec.it_value.tv_sec = armed_ns / 1'000'000'000;
  spec.it_value.tv_nsec = armed_ns % 1'000'000'000;
  timerfd_settime(timer.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void EventLoop::State::FireTimers() {
  uint64_t expirations = 0;
  (void)!read(timer.get(), &expirations, sizeof(expirations));
  armed_ns = kNotArmed;
  // Timers that callbacks add fire in the next round at the earliest. So a timer that adds itself
  // again cannot starve the descriptors.
  const int64_t now_ns = MonotonicNanoseconds();
  const TimerId first_new = next_timer;
  while (!stopped && !timers.empty()) {
    const auto first = timers.begin();
    const auto [due_ns, id] = first->first;
    if (due_ns > now_ns || id >= first_new) break;
    const std::function<void()> callback = std::move(first->second);
    timers.erase(first);
    due_of_timer.erase(id);
    callback();
  }
  ArmTimer();
}

void EventLoop::State::Dispatch(const epoll_event& event) {
  if (event.data.u64 == kTimerRegistration) {
    FireTimers();
    return;
  }
  const auto found = registrations.find(event.data.u64);
  if (found == registrations.end()) return;  // unwatched by a callback of this round
  const std::shared_ptr<FdCallback> callback = found->second.callback;
  (*callback)(event.events);
}

absl::Status EventLoop::Run() {
  state_->stopped = false;
  std::array<epoll_event, 64> events{};
  while (!state_->stopped) {
    const int count = epoll_wait(state_->epoll.get(), events.data(), events.size(), -1);
    if (count < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus("epoll_wait");
    }
    for (int i = 0; i < count && !state_->stopped; ++i) state_->Dispatch(events[i]);
  }
  return absl::OkStatus();
}

void EventLoop::Stop() { state_->stopped = true; }

}  // namespace ddp
