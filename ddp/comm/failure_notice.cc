#include "ddp/comm/failure_notice.h"

#include <pthread.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "ddp/logging.h"

namespace ddp {
namespace {

// How long one wait in the store lasts before it is asked again. It bounds the destructor when the
// store is gone, and is no polling interval: news and the end wake the wait at once.
constexpr std::chrono::milliseconds kWatchSlice{5000};

std::string KeyOf(int rank) { return absl::StrCat("failure/", rank); }

// "<rank> <reason>"; an empty value means: this process ends in peace.
std::string Encode(const FailureNotice::Failure& failure) {
  return absl::StrCat(failure.rank, " ", failure.reason);
}

FailureNotice::Failure Decode(const std::string& text) {
  FailureNotice::Failure failure;
  const size_t space = text.find(' ');
  if (space == std::string::npos || !absl::SimpleAtoi(text.substr(0, space), &failure.rank)) {
    return {.rank = -1, .reason = text};
  }
  failure.reason = text.substr(space + 1);
  return failure;
}

}  // namespace

struct FailureNotice::State {
  mutable Mutex mutex;
  mutable CondVar changed;
  std::optional<Failure> failure ABSL_GUARDED_BY(mutex);
  bool stopping ABSL_GUARDED_BY(mutex) = false;
};

struct FailureNotice::Thread {
  std::thread thread;
};

FailureNotice::FailureNotice(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)
    : rank_(rank),
      size_(size),
      store_(store),
      state_(std::make_shared<State>()),
      thread_(std::make_unique<Thread>()) {
  thread_->thread = std::thread([this, watched = store->clone()] { WatchStore(watched); });
  pthread_setname_np(thread_->thread.native_handle(), "ddp-failure");
}

FailureNotice::~FailureNotice() {
  {
    MutexLock lock(state_->mutex);
    state_->stopping = true;
  }
  try {
    store_->set(KeyOf(rank_), std::string());
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << rank_
                 << ": the store is gone at the end of the process group: " << error.what();
  }
  thread_->thread.join();
}

void FailureNotice::Report(const std::string& reason) {
  const Failure failure{.rank = rank_, .reason = reason};
  {
    MutexLock lock(state_->mutex);
    if (state_->failure.has_value() || state_->stopping) return;
    state_->failure = failure;
    state_->changed.NotifyAll();
  }
  const std::string text = Encode(failure);
  const std::vector<uint8_t> value(text.begin(), text.end());
  try {
    if (store_->hasExtendedApi()) {
      std::vector<std::string> keys;
      for (int rank = 0; rank < size_; ++rank) keys.push_back(KeyOf(rank));
      store_->multiSet(keys, std::vector<std::vector<uint8_t>>(keys.size(), value));
    } else {
      for (int rank = 0; rank < size_; ++rank) store_->set(KeyOf(rank), value);
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << rank_ << ": could not tell the other ranks that this one failed ("
                 << reason << "): " << error.what();
  }
}

std::optional<FailureNotice::Failure> FailureNotice::failure() const {
  MutexLock lock(state_->mutex);
  return state_->failure;
}

std::optional<FailureNotice::Failure> FailureNotice::AwaitFailure(absl::Duration timeout) const {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(state_->mutex);
  while (!state_->failure.has_value()) {
    const absl::Duration left = deadline - clock.Now();
    if (left <= absl::ZeroDuration()) break;
    state_->changed.WaitFor(state_->mutex, left);
  }
  return state_->failure;
}

void FailureNotice::YieldToCause(absl::Duration head_start) const {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + head_start;
  MutexLock lock(state_->mutex);
  for (absl::Duration left = head_start; left > absl::ZeroDuration();
       left = deadline - clock.Now()) {
    state_->changed.WaitFor(state_->mutex, left);
  }
}

FailureNotice::WaitResult FailureNotice::Wait(c10::ivalue::Future& future,
                                              absl::Duration timeout) const {
  if (future.completed()) return WaitResult::kCompleted;
  // A callback of a complete future runs at once, so no completion is missed.
  future.addCallback([state = state_](c10::ivalue::Future&) {
    MutexLock lock(state->mutex);
    state->changed.NotifyAll();
  });
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + timeout;
  MutexLock lock(state_->mutex);
  while (true) {
    if (future.completed()) return WaitResult::kCompleted;
    if (state_->failure.has_value()) return WaitResult::kPeerFailed;
    const absl::Duration left = deadline - clock.Now();
    if (left <= absl::ZeroDuration()) return WaitResult::kTimedOut;
    state_->changed.WaitFor(state_->mutex, left);
  }
}

void FailureNotice::WatchStore(const c10::intrusive_ptr<c10d::Store>& store) {
  const std::string key = KeyOf(rank_);
  while (true) {
    const int64_t start_ns = MonotonicNanoseconds();
    try {
      store->wait({key}, kWatchSlice);
      const std::string text = store->get_to_str(key);
      MutexLock lock(state_->mutex);
      if (!text.empty() && !state_->failure.has_value()) {
        state_->failure = Decode(text);
        state_->changed.NotifyAll();
      }
      return;
    } catch (const std::exception& error) {
      const absl::Duration waited = absl::Nanoseconds(MonotonicNanoseconds() - start_ns);
      MutexLock lock(state_->mutex);
      if (state_->stopping) return;
      if (waited >= absl::FromChrono(kWatchSlice)) continue;  // the slice is over
      // Losing the store does not stop training: collectives still have their timeouts.
      LOG(WARNING) << "rank " << rank_
                   << ": no news of failing peers from now on: " << error.what();
      return;
    }
  }
}

}  // namespace ddp
