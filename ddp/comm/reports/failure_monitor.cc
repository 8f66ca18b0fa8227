#include "ddp/comm/reports/failure_monitor.h"

#include <exception>
#include <utility>

#include <glog/logging.h>

#include "absl/cleanup/cleanup.h"

namespace ddp::internal {
namespace {

// Verdict of a StoreMeeting that a failure report ended.
constexpr char kFailedVerdict[] = "failed";

}  // namespace

FailureMonitor::FailureMonitor(std::shared_ptr<GroupStore> store, const Membership& membership,
                               Options options)
    : store_(std::move(store)), on_failure_(std::move(options.on_failure)), health_(membership) {
  std::shared_ptr<GroupStore> watched = store_->Clone();
  if (options.command_timeout > absl::ZeroDuration()) {
    // Set after the store has connected, because connecting may take longer on a busy host.
    store_->SetTimeout(options.command_timeout);
    watched->SetTimeout(options.command_timeout);
  }
  ReportLog::Reader& reader = *this;
  log_ = std::make_unique<ReportLog>(store_, std::move(watched), membership, reader);
}

FailureMonitor::~FailureMonitor() { Leave(); }

void FailureMonitor::Report(const std::string& reason) {
  const Membership self = membership();
  const GroupFailure failure{.rank = self.rank, .reason = reason};
  if (!SetFailure(self.incarnation, failure) || self.size == 1) return;
  log_->writes().Run([this, self, failure] { Publish(LogEntry::Of(self.incarnation, failure)); });
}

void FailureMonitor::ReportOperation(const std::string& reason) {
  {
    MutexLock lock(mutex_);
    health_.OnOperation();
  }
  Report(reason);
}

// Returns an earlier report of the same incarnation.
std::optional<GroupFailure> FailureMonitor::Publish(const LogEntry& message) {
  try {
    const std::optional<LogEntry> earlier = log_->Append(message);
    EndMeeting();
    if (earlier.has_value() && earlier->incarnation == message.incarnation) {
      return GroupFailure{.rank = earlier->rank, .reason = earlier->reason};
    }
  } catch (const std::exception& error) {
    const GroupFailure failure{.rank = message.rank, .reason = message.reason};
    LOG(WARNING) << "could not tell the other ranks of a failure (" << failure.ToString()
                 << "): " << error.what();
  }
  return std::nullopt;
}

void FailureMonitor::ReportFound(const GroupFailure& failure) {
  if (failed()) return;
  const int64_t incarnation = membership().incarnation;
  SetFailure(incarnation, Publish(LogEntry::Of(incarnation, failure)).value_or(failure));
}

void FailureMonitor::ReportSeen(const GroupFailure& failure) {
  const int64_t incarnation = membership().incarnation;
  if (!SetFailure(incarnation, failure)) return;
  log_->writes().RunLater(
      [this, incarnation, failure] { Publish(LogEntry::Of(incarnation, failure)); });
}

void FailureMonitor::Leave() {
  int64_t incarnation = 0;
  std::shared_ptr<const PositionSource> position;
  {
    MutexLock lock(mutex_);
    incarnation = health_.incarnation();
    position = position_;
  }
  log_->Leave(incarnation, position ? position->launched() : 0);
}

void FailureMonitor::Begin(const Membership& membership) {
  log_->writes().Flush();  // a late report would end a meeting of the new incarnation
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
  if (on_failure_) on_failure_(failure);
  return true;
}

void FailureMonitor::OnFailureRead(int64_t incarnation, const GroupFailure& failure) {
  if (SetFailure(incarnation, failure)) EndMeeting();
}

// A rank in another incarnation than the asker answers too: alive, without collectives.
std::string FailureMonitor::OnAsked(int64_t incarnation) {
  std::shared_ptr<const PositionSource> position;
  {
    MutexLock lock(mutex_);
    if (incarnation == health_.incarnation()) position = position_;
  }
  return position ? position->Answer() : std::string();
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

std::optional<MeetingEnd> FailureMonitor::Attend(StoreMeeting& meeting, const std::string& value,
                                                 absl::Duration timeout) {
  const auto set_meeting = [this](const std::string& verdict_key) {
    MutexLock lock(mutex_);
    meeting_ = verdict_key;
  };
  set_meeting(meeting.verdict_key());
  const absl::Cleanup forget = [&] { set_meeting(""); };
  if (failed()) EndMeeting();
  MeetingEnd end = AttendMeeting(meeting, value, timeout);
  return end.verdict == kFailedVerdict ? std::nullopt : std::optional(std::move(end));
}

std::optional<GroupFailure> FailureMonitor::failure() const {
  MutexLock lock(mutex_);
  return health_.failure();
}

std::optional<GroupFailure> FailureMonitor::AwaitFailure(absl::Duration timeout) const {
  signal_->Wait([this] { return failed(); }, timeout);
  return failure();
}

}  // namespace ddp::internal
