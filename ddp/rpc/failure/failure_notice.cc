#include "ddp/rpc/failure/failure_notice.h"

#include <exception>
#include <utility>

#include <glog/logging.h>

#include "absl/time/time.h"

namespace ddp::rpc::internal {

using ddp::internal::GroupStore;
using ddp::internal::LogEntry;
using ddp::internal::Membership;
using ddp::internal::ReportLog;

namespace {

// The time limit of one command of the store: bounds a Report() on a lost store.
constexpr absl::Duration kCommandTimeout = absl::Seconds(5);

}  // namespace

FailureNotice::FailureNotice(std::shared_ptr<GroupStore> store, const Membership& membership,
                             std::function<void(const GroupFailure&)> on_failure)
    : on_failure_(std::move(on_failure)) {
  std::shared_ptr<GroupStore> watched = store->Clone();
  store->SetTimeout(kCommandTimeout);
  watched->SetTimeout(kCommandTimeout);
  ReportLog::Reader& reader = *this;
  log_ = std::make_unique<ReportLog>(std::move(store), std::move(watched), membership, reader);
}

FailureNotice::~FailureNotice() { log_.reset(); }

void FailureNotice::Report(const GroupFailure& failure) {
  if (!Set(failure)) return;
  log_->writes().Run([this, failure] { Publish(failure); });
}

// Returns an earlier report of another worker.
std::optional<FailureNotice::GroupFailure> FailureNotice::Publish(const GroupFailure& failure) {
  try {
    const std::optional<LogEntry> earlier = log_->Append(LogEntry::Of(0, failure));
    if (earlier.has_value()) return GroupFailure{.rank = earlier->rank, .reason = earlier->reason};
  } catch (const std::exception& error) {
    LOG(WARNING) << "could not tell the other workers that " << failure.reason << ": "
                 << error.what();
  }
  return std::nullopt;
}

FailureNotice::GroupFailure FailureNotice::ReportFound(const GroupFailure& failure) {
  if (const auto known = this->failure()) return *known;
  Set(Publish(failure).value_or(failure));
  return *this->failure();
}

void FailureNotice::TellFound(const GroupFailure& failure) {
  log_->writes().Run([this, failure] { (void)ReportFound(failure); });
}

std::optional<FailureNotice::GroupFailure> FailureNotice::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

void FailureNotice::OnFailureRead(int64_t /*incarnation*/, const GroupFailure& failure) {
  Set(failure);
}

bool FailureNotice::Set(const GroupFailure& failure) {
  {
    MutexLock lock(mutex_);
    if (failure_.has_value()) return false;
    failure_ = failure;
  }
  on_failure_(failure);
  return true;
}

}  // namespace ddp::rpc::internal
