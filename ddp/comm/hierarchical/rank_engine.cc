#include "ddp/comm/hierarchical/collective_queue.h"

#include <pthread.h>
#include <signal.h>

#include <exception>
#include <utility>

#include <glog/logging.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"

namespace ddp::internal {
namespace {

// How long an abort waits for the thread to give the memory up.
constexpr absl::Duration kAbortPatience = absl::Seconds(1);

}  // namespace

CollectiveQueue::CollectiveQueue(Parts parts) : parts_(std::move(parts)) {
  // The ranks of other hosts notice the death of a peer on this host by their connections.
  parts_.group->SetOnEnd(parts_.close_connections);
  thread_ = std::thread([this] { RunThread(); });
}

CollectiveQueue::~CollectiveQueue() {
  if (parts_.group->in_forked_child()) {
    thread_.detach();  // the thread is the parent's
    return;
  }
  (void)Abort();
  parts_.group->SetOnEnd(nullptr);
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
}

void CollectiveQueue::Push(Collective collective) {
  MutexLock lock(mutex_);
  waiting_.push_back(std::move(collective));
  changed_.NotifyAll();
}

void CollectiveQueue::RunThread() {
  ::pthread_setname_np(::pthread_self(), "ddp-hosts");
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
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
    changed_.NotifyAll();
  }
}

void CollectiveQueue::Run(Collective& collective) {
  absl::Status status;
  {
    MutexLock lock(mutex_);
    status = broken_;
  }
  if (status.ok()) {
    try {
      status = parts_.engine->Agree(collective.header, collective.deadline);
      if (status.ok()) status = collective.run(collective.deadline);
    } catch (const std::exception& error) {
      status = absl::InternalError(error.what());
    }
    // A rank that gives up is seldom the cause: the reader of the text looks for another one.
    if (absl::EndsWith(status.message(), " has aborted the group")) {
      status = absl::UnavailableError(absl::StrCat("Connection closed: ", status.message()));
    }
    {
      MutexLock lock(mutex_);
      broken_.Update(status);
    }
    if (!status.ok() && !absl::IsInvalidArgument(status)) {
      parts_.group->Abort();
      parts_.close_connections();
    }
  }
  collective.run = nullptr;
  try {
    collective.done(status);
  } catch (const std::exception& error) {
    LOG(ERROR) << "the end of a collective between hosts: " << error.what();
  }
}

bool CollectiveQueue::Abort() {
  bool idle = false;
  {
    MutexLock lock(mutex_);
    idle = waiting_.empty() && !running_;
    broken_.Update(absl::CancelledError("the backend was destroyed or aborted"));
  }
  if (!idle) parts_.group->Abort();
  parts_.close_connections();
  if (idle) return true;
  const bool quiet = parts_.local->Abort();
  if (OnThread()) return false;
  const MonotonicClock clock;
  const absl::Time end = clock.Now() + kAbortPatience;
  MutexLock lock(mutex_);
  while ((running_ || !waiting_.empty()) && clock.Now() < end) {
    (void)changed_.WaitFor(mutex_, end - clock.Now());
  }
  return quiet && !running_ && waiting_.empty();
}

}  // namespace ddp::internal
