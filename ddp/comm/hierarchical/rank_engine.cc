#include "ddp/comm/hierarchical/rank_engine.h"

#include <pthread.h>

#include <exception>
#include <utility>

#include <glog/logging.h>

#include "absl/strings/str_cat.h"
#include "base/blocked_signals.h"
#include "base/clock.h"

namespace ddp::internal {
namespace {

// How long an abort waits for the thread to give the memory up.
constexpr absl::Duration kAbortPatience = absl::Seconds(1);

}  // namespace

RankEngine::RankEngine(const HostLayout& layout, std::shared_ptr<HostGroup> group,
                       std::unique_ptr<HostLink> link, const HierarchicalEngine::Options& options)
    : first_rank_(layout.local().begin),
      group_(std::move(group)),
      local_(group_.get()),
      link_(std::move(link)),
      hosts_(link_ == nullptr
                 ? nullptr
                 : std::make_unique<HierarchicalEngine>(layout, &local_, link_.get(), options)) {
  if (has_one_host()) return;
  thread_ = std::thread([this] { RunThread(); });
  // The ranks of other hosts notice the death of a peer on this host by their connections.
  group_->SetOnEnd([this] { link_->End(); });
}

RankEngine::~RankEngine() { CHECK(!thread_.joinable()) << "Leave() has not been called"; }

bool RankEngine::MustNotLeave() const {
  return group_->OnThread() || std::this_thread::get_id() == thread_.get_id();
}

void RankEngine::Leave() {
  (void)Abort();
  if (thread_.joinable()) {
    group_->SetOnEnd(nullptr);
    {
      MutexLock lock(mutex_);
      stopped_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }
  group_->Leave();
}

int RankEngine::dead_rank() const {
  const HostGroup::End end = group_->end();
  return end.kind == GroupEnd::kDied ? first_rank_ + end.member : -1;
}

void RankEngine::Start(CollectiveRequest request, absl::Duration timeout, Done done) {
  if (has_one_host()) return local_.Start(std::move(request), timeout, std::move(done));
  MutexLock lock(mutex_);
  waiting_.push_back({.request = std::move(request),
                      .deadline = MonotonicClock().Now() + timeout,
                      .done = std::move(done)});
  changed_.NotifyAll();
}

bool RankEngine::Drive(const std::function<bool()>& stop, absl::Time deadline) {
  if (has_one_host()) return local_.Drive(stop, deadline);
  const MonotonicClock clock;
  uint64_t seen = 0;
  const auto look = [&] {
    MutexLock lock(mutex_);
    seen = wakes_;
  };
  // `stop` may take a lock of someone who is about to wake this thread.
  for (look(); !stop(); look()) {
    MutexLock lock(mutex_);
    while (wakes_ == seen) {
      const absl::Duration left = deadline - clock.Now();
      if (left <= absl::ZeroDuration()) return false;
      (void)changed_.WaitFor(mutex_, left);
    }
  }
  return true;
}

void RankEngine::Poll() {
  if (has_one_host()) local_.Poll();
}

void RankEngine::Wake() {
  if (has_one_host()) return local_.Wake();
  MutexLock lock(mutex_);
  ++wakes_;
  changed_.NotifyAll();
}

void RankEngine::RunThread() {
  ::pthread_setname_np(::pthread_self(), "ddp-hosts");
  const BlockedSignals blocked;
  while (true) {
    Collective collective;
    {
      MutexLock lock(mutex_);
      while (waiting_.empty() && !stopped_) {
        (void)changed_.WaitFor(mutex_, absl::InfiniteDuration());
      }
      if (waiting_.empty()) return;
      collective = std::move(waiting_.front());
      waiting_.pop_front();
      running_ = true;
    }
    Run(collective);
    collective = {};
    MutexLock lock(mutex_);
    running_ = false;
    ++wakes_;
    changed_.NotifyAll();
  }
}

void RankEngine::Run(Collective& collective) {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    status = broken_;
  }
  if (status.ok()) {
    try {
      status = hosts_->Run(collective.request, collective.deadline);
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    // A rank that gives up is seldom the cause: the reader of the status looks for another one.
    if (absl::IsAborted(status)) status = absl::UnavailableError(status.message());
    {
      MutexLock lock(mutex_);
      broken_.Update(status);
    }
    if (!status.ok() && !absl::IsInvalidArgument(status)) {
      group_->Abort();
      link_->End();
    }
  }
  collective.request = {};  // frees its captures before the end is reported
  try {
    collective.done(status);
  } catch (const std::exception& error) {
    LOG(ERROR) << "the end of a collective between hosts: " << error.what();
  }
}

bool RankEngine::Abort() {
  if (has_one_host()) return local_.Abort();
  bool idle = false;
  {
    MutexLock lock(mutex_);
    idle = waiting_.empty() && !running_;
    broken_.Update(absl::CancelledError("the backend was destroyed or aborted"));
  }
  if (!idle) group_->Abort();
  link_->End();
  if (idle) return true;
  const bool quiet = local_.Abort();
  if (std::this_thread::get_id() == thread_.get_id()) return false;
  const MonotonicClock clock;
  const absl::Time end = clock.Now() + kAbortPatience;
  MutexLock lock(mutex_);
  while ((running_ || !waiting_.empty()) && clock.Now() < end) {
    (void)changed_.WaitFor(mutex_, end - clock.Now());
  }
  return quiet && !running_ && waiting_.empty();
}

}  // namespace ddp::internal
