#include "ddp/comm/reports/failure_monitor.h"

#include <exception>
#include <utility>

#include <glog/logging.h>

namespace ddp::internal {

FailureMonitor::FailureMonitor(std::shared_ptr<GroupStore> store, const Membership& membership,
                               absl::Duration command_timeout)
    : store_(std::move(store)), health_(membership) {
  std::shared_ptr<GroupStore> watched = store_->Clone();
  if (command_timeout > absl::ZeroDuration()) {
    // Set after the store has connected, because connecting may take longer on a busy host.
    store_->SetTimeout(command_timeout);
    watched->SetTimeout(command_timeout);
  }
  ReportLog::Reader& reader = *this;
  log_ = std::make_unique<ReportLog>(store_, std::move(watched), membership, reader);
}

FailureMonitor::~FailureMonitor() { Leave(); }

void FailureMonitor::Report(const std::string& reason) {
  const Membership self = membership();
  const LogEntry message{.kind = LogEntry::Kind::kFailure,
                         .incarnation = self.incarnation,
                         .rank = self.rank,
                         .reason = reason};
  if (!SetFailure(self.incarnation, {.rank = self.rank, .reason = reason}) || self.size == 1) {
    return;
  }
  log_->Run([this, message] { Publish(message); });
}

void FailureMonitor::Publish(const LogEntry& message) {
  try {
    log_->Append(message);
    EndMeeting();
  } catch (const std::exception& error) {
    LOG(WARNING) << "could not tell the other ranks that rank " << message.rank << " failed ("
                 << message.reason << "): " << error.what();
  }
}

void FailureMonitor::ReportFound(const GroupFailure& failure) {
  if (failed()) return;
  const Membership self = membership();
  const LogEntry message{.kind = LogEntry::Kind::kFailure,
                         .incarnation = self.incarnation,
                         .rank = failure.rank,
                         .reason = failure.reason};
  GroupFailure first = failure;
  try {
    const std::optional<LogEntry> earlier = log_->Append(message);
    if (earlier.has_value() && earlier->incarnation == message.incarnation) {
      first = {.rank = earlier->rank, .reason = earlier->reason};
    }
  } catch (const std::exception& error) {
    LOG(WARNING) << "rank " << self.rank << ": could not tell the other ranks of a failure ("
                 << failure.reason << "): " << error.what();
  }
  SetFailure(message.incarnation, first);
}

void FailureMonitor::ReportSeen(const GroupFailure& failure) {
  const Membership self = membership();
  if (!SetFailure(self.incarnation, failure)) return;
  const LogEntry message{.kind = LogEntry::Kind::kFailure,
                         .incarnation = self.incarnation,
                         .rank = failure.rank,
                         .reason = failure.reason};
  log_->RunLater([this, message] { Publish(message); });
}

void FailureMonitor::Leave() {
  std::shared_ptr<const PositionSource> position;
  {
    MutexLock lock(mutex_);
    position = position_;
  }
  log_->Leave(position ? position->launched() : 0);
}

void FailureMonitor::Begin(const Membership& membership) {
  log_->Flush();  // a late report would end a meeting of the new incarnation
  log_->Begin(membership);
  MutexLock lock(mutex_);
  position_.reset();
  health_.Begin(membership);
  failed_ = health_.failed();
}

Membership FailureMonitor::membership() const {
  MutexLock lock(mutex_);
  return health_.membership();
}

// Sets the failure. Returns false when this incarnation has one already, or another incarnation has
// begun.
bool FailureMonitor::SetFailure(int64_t incarnation, const GroupFailure& failure) {
  {
    MutexLock lock(mutex_);
    if (!health_.OnFailure(incarnation, failure)) return false;
    failed_ = true;
  }
  signal_->Notify();
  return true;
}

void FailureMonitor::OnFailureRead(int64_t incarnation, const GroupFailure& failure) {
  if (SetFailure(incarnation, failure)) EndMeeting();
}

// A rank in another incarnation than the asker answers too: alive, without collectives.
RankPosition FailureMonitor::OnPositionAsked(int64_t incarnation) {
  std::shared_ptr<const PositionSource> position;
  {
    MutexLock lock(mutex_);
    if (incarnation == health_.incarnation()) position = position_;
  }
  return position ? position->Position() : RankPosition();
}

void FailureMonitor::SetPositionSource(std::shared_ptr<const PositionSource> source) {
  MutexLock lock(mutex_);
  position_ = std::move(source);
}

void FailureMonitor::EndMeeting() {
  std::string meeting;
  {
    MutexLock lock(mutex_);
    meeting = meeting_;
  }
  if (!meeting.empty()) store_->SetIfNew(meeting, kFailedVerdict);
}

FailureMonitor::EndMeetingOnFailure::EndMeetingOnFailure(FailureMonitor& monitor,
                                                         const std::string& verdict_key)
    : monitor_(monitor) {
  {
    MutexLock lock(monitor_.mutex_);
    monitor_.meeting_ = verdict_key;
  }
  if (monitor_.failed()) monitor_.EndMeeting();
}

FailureMonitor::EndMeetingOnFailure::~EndMeetingOnFailure() {
  MutexLock lock(monitor_.mutex_);
  monitor_.meeting_.clear();
}

std::optional<GroupFailure> FailureMonitor::failure() const {
  MutexLock lock(mutex_);
  return health_.failure();
}

std::optional<GroupFailure> FailureMonitor::AwaitFailure(absl::Duration timeout) const {
  signal_->Wait([this] { return failed(); }, timeout);
  return failure();
}

bool FailureMonitor::Raise() {
  MutexLock lock(mutex_);
  return health_.Raise();
}

void FailureMonitor::OnGone(GroupFailure failure) {
  MutexLock lock(mutex_);
  health_.OnGone(std::move(failure));
}

GroupError FailureMonitor::OnOperationFailed(const std::string& what, const std::string& reason) {
  MutexLock lock(mutex_);
  return health_.OnOperationFailed(what, reason);
}

GroupError FailureMonitor::OnOwnError(GroupError::Kind kind, std::string message) {
  MutexLock lock(mutex_);
  return health_.OnOwnError(kind, std::move(message));
}

std::optional<GroupError> FailureMonitor::OnUse(bool retired, const std::string& what) {
  MutexLock lock(mutex_);
  return health_.OnUse(retired, what);
}

GroupError FailureMonitor::OnWaitEnded(const std::string& what) {
  MutexLock lock(mutex_);
  return health_.OnWaitEnded(what);
}

GroupHealth::Forward FailureMonitor::OnForward(std::optional<GroupError>* error) {
  MutexLock lock(mutex_);
  return health_.OnForward(error);
}

std::optional<GroupError> FailureMonitor::GoneError() const {
  MutexLock lock(mutex_);
  return health_.GoneError();
}

}  // namespace ddp::internal
