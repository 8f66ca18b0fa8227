#include "ddp/comm/device_watch.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <utility>

#include <c10/core/impl/VirtualGuardImpl.h>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/backend/operation_fault.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/common/peer_wait.h"

namespace ddp::internal {
namespace {

// Between two looks of the thread: without operations and marks, with some, and at the end.
constexpr absl::Duration kIdleLook = absl::Milliseconds(200);
constexpr absl::Duration kLook = absl::Milliseconds(20);
constexpr absl::Duration kEndLook = absl::Milliseconds(1);
constexpr absl::Duration kHeadStart = absl::Milliseconds(200);
constexpr absl::Duration kExplanationTimeout = absl::Milliseconds(300);

// How long an operation takes before the thread asks the other ranks: at first, and at most.
constexpr absl::Duration kFirstPatience = absl::Milliseconds(500);
constexpr absl::Duration kLongestPatience = absl::Seconds(30);

c10::Event Recorded(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event event(device.type());
  event.record(guard.getStream(device));
  return event;
}

void Conclude(std::atomic<DeviceOutcome>& proof, DeviceOutcome outcome) {
  proof = outcome;
  proof.notify_all();
}

}  // namespace

DeviceWatch::DeviceWatch(c10::intrusive_ptr<c10d::Backend> backend,
                         std::shared_ptr<FailureMonitor> monitor,
                         std::shared_ptr<CollectiveLog> log, const Membership& membership,
                         absl::Duration timeout)
    : backend_(std::move(backend)),
      monitor_(std::move(monitor)),
      log_(std::move(log)),
      self_(membership),
      timeout_(timeout),
      inquiry_(monitor_, log_, membership),
      thread_([this] { Run(); }) {}

DeviceWatch::~DeviceWatch() { End(); }

void DeviceWatch::Add(Operation operation, at::Device device) {
  MutexLock lock(mutex_);
  entries_.push_back({.operation = std::move(operation),
                      .event = Recorded(device),
                      .start_ns = MonotonicNanoseconds(),
                      .proof = nullptr});
}

DeviceProof DeviceWatch::Mark(at::Device device) {
  auto proof = std::make_shared<std::atomic<DeviceOutcome>>(DeviceOutcome::kOpen);
  MutexLock lock(mutex_);
  if (aborted_) *proof = DeviceOutcome::kLost;
  entries_.push_back({.operation = {},
                      .event = Recorded(device),
                      .start_ns = MonotonicNanoseconds(),
                      .proof = proof});
  return proof;
}

void DeviceWatch::Look() {
  MutexLock lock(mutex_);
  Settle();
}

// Entries complete in about the order in which they started, so the loop ends early. An entry that
// an abort has ended proves nothing.
void DeviceWatch::Settle() {
  int64_t complete_before = -1;
  while (!entries_.empty() && !failed_.has_value()) {
    const Entry& first = entries_.front();
    c10d::Work* const work = first.operation.work.get();
    if (work == nullptr ? !first.event.query() : !work->isCompleted()) break;
    if (work != nullptr && work->exception()) {
      failed_ = Failed{.what = first.operation.what, .error = TextOf(work->exception())};
      break;
    }
    if (first.proof && !aborted_) Conclude(*first.proof, DeviceOutcome::kProven);
    if (first.operation.sequence >= 0) complete_before = first.operation.sequence + 1;
    entries_.pop_front();
  }
  if (log_ != nullptr && complete_before >= 0) log_->SetCompleteBefore(complete_before);
}

std::optional<DeviceWatch::Failed> DeviceWatch::failed() const {
  MutexLock lock(mutex_);
  return failed_;
}

// An abort completes all operations, so it is looked for last.
bool DeviceWatch::AwaitCompletion(c10d::Work& work) const {
  while (!work.isCompleted()) {
    if (aborted()) return false;
    monitor_->signal()->Wait([] { return false; }, kEndLook);
  }
  return !work.exception() && !aborted();
}

bool DeviceWatch::aborted() const {
  MutexLock lock(mutex_);
  return aborted_;
}

bool DeviceWatch::idle() const {
  MutexLock lock(mutex_);
  return entries_.empty();
}

bool DeviceWatch::done() const {
  MutexLock lock(mutex_);
  return aborted_ || (ending_ && entries_.empty());
}

bool DeviceWatch::End() {
  ending_ = true;
  monitor_->signal()->Notify();
  if (thread_.joinable()) thread_.join();
  MutexLock lock(mutex_);
  return !aborted_;
}

// Returns the oldest operation that is not complete, when it has started, and whether the stream
// has come to it: then it is the peers that are late.
std::optional<Inquiry::Awaited> DeviceWatch::Oldest(int64_t* start_ns,
                                                    bool* waits_for_peers) const {
  MutexLock lock(mutex_);
  for (const Entry& entry : entries_) {
    const Operation& operation = entry.operation;
    if (!operation.work) continue;
    *start_ns = entry.start_ns;
    *waits_for_peers = entry.event.query();
    return Inquiry::Awaited{.sequence = operation.sequence,
                            .needs_all_ranks = operation.needs_all_ranks,
                            .peer = operation.peer,
                            .what = operation.what.ToString()};
  }
  return std::nullopt;
}

void DeviceWatch::Run() {
  pthread_setname_np(pthread_self(), "ddp-device");
  absl::Duration patience = kFirstPatience;
  int64_t oldest_ns = 0;  // when the operation started that was the oldest at the last look
  int64_t asked_ns = 0;
  std::optional<PeerWaitScope> wait;
  while (!done()) {
    if (monitor_->failed()) return Abort();
    Look();
    int64_t start_ns = 0;
    bool waits_for_peers = false;
    const std::optional<Inquiry::Awaited> awaited = Oldest(&start_ns, &waits_for_peers);
    if (!awaited.has_value() || start_ns != oldest_ns) {
      wait.reset();
      patience = kFirstPatience;
      oldest_ns = asked_ns = start_ns;
    } else if (const std::optional<Failed> found = failed()) {
      ReportError(*awaited, found->error, /*timed_out=*/false);
    } else if (waits_for_peers) {
      if (!wait.has_value()) wait.emplace();
      const int64_t now_ns = MonotonicNanoseconds();
      if (absl::Nanoseconds(now_ns - start_ns) >= timeout_) {
        ReportError(*awaited,
                    absl::StrCat("it was not complete within ", absl::FormatDuration(timeout_)),
                    /*timed_out=*/true);
      } else if (absl::Nanoseconds(now_ns - asked_ns) >= patience) {
        Inquire(*awaited, asked_ns);
        asked_ns = MonotonicNanoseconds();
        patience = std::min(2 * patience, kLongestPatience);
      }
    }
    const absl::Duration look = ending_ ? kEndLook : idle() ? kIdleLook : kLook;
    const bool ending = ending_;
    monitor_->signal()->Wait([&] { return monitor_->failed() || ending_ != ending; }, look);
  }
}

// Reports the failure that the other ranks' answers prove, if any.
DeviceWatch::Inquired DeviceWatch::Inquire(const Inquiry::Awaited& awaited, int64_t since_ns) {
  if (log_ == nullptr) return Inquired::kByThisRank;
  const auto failed = [&](absl::Duration limit) {
    return monitor_->AwaitFailure(limit).has_value();
  };
  const auto still = [&] { return IsOldest(awaited) ? std::optional(awaited) : std::nullopt; };
  try {
    return inquiry_.Search(since_ns, failed, still) ? Inquired::kByThisRank : Inquired::kByAnother;
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << self_.rank
                 << ": could not ask the other ranks where they are: " << error.what();
    return Inquired::kStoreFailed;
  }
}

bool DeviceWatch::IsOldest(const Inquiry::Awaited& awaited) {
  Look();
  int64_t start_ns = 0;
  bool waits = false;
  const std::optional<Inquiry::Awaited> oldest = Oldest(&start_ns, &waits);
  return oldest.has_value() && oldest->sequence == awaited.sequence;
}

// One rank asks for all, and reports what it finds. When nothing explains the error, this rank is
// the one that has failed.
void DeviceWatch::ReportError(const Inquiry::Awaited& awaited, const std::string& error,
                              bool timed_out) {
  int64_t since_ns = MonotonicNanoseconds();
  Inquired inquired = Inquired::kByAnother;
  for (bool expects_report = !timed_out; inquired == Inquired::kByAnother; expects_report = true) {
    if (expects_report && monitor_->AwaitFailure(kExplanationTimeout).has_value()) return;
    inquired = Inquire(awaited, since_ns);
    since_ns = MonotonicNanoseconds();
  }
  if (monitor_->failed() || !IsOldest(awaited)) return;
  const bool unexplained = inquired == Inquired::kStoreFailed || !inquiry_.silent().empty();
  if (timed_out || log_ == nullptr || !unexplained) {
    const std::string late = log_ == nullptr ? "" : inquiry_.DescribeLate(awaited);
    return monitor_->ReportOperation(absl::StrCat(awaited.what, " failed: ", error, late));
  }
  const std::optional<GroupFailure> cause = inquiry_.Explain(awaited, error);
  if (cause.has_value() && cause->rank != self_.rank) return monitor_->ReportFound(*cause);
  if (!monitor_->failed()) {
    monitor_->ReportOperation(absl::StrCat(awaited.what, " failed: ", error));
  }
}

// A peer may have completed an operation before it failed.
void DeviceWatch::Abort() {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + kHeadStart;
  while (clock.Now() < deadline) {
    Look();
    {
      MutexLock lock(mutex_);
      if (entries_.empty() || failed_.has_value()) break;
    }
    monitor_->signal()->Wait([] { return false; }, kEndLook);
  }
  {
    MutexLock lock(mutex_);
    Settle();
    aborted_ = true;
    for (const Entry& entry : entries_) {
      if (entry.proof) Conclude(*entry.proof, DeviceOutcome::kLost);
    }
  }
  try {
    backend_->abort();
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << self_.rank << ": could not abort the backend "
                 << backend_->getBackendName() << ": " << MessageOf(error);
  }
}

}  // namespace ddp::internal
