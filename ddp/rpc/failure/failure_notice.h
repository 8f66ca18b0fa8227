#ifndef DDP_RPC_FAILURE_FAILURE_NOTICE_H_
#define DDP_RPC_FAILURE_FAILURE_NOTICE_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/comm/reports/report_log.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"

namespace ddp::rpc::internal {

// The first failure among the workers of a generation. Every worker learns of it through the store
// (ReportLog), whether or not a connection to the failed worker shows it.
//
// Thread-safe. Free of LibTorch. The ReportLog has the thread "ddp-failure".
class FailureNotice : private ddp::internal::ReportLog::Reader {
 public:
  using GroupFailure = ddp::internal::GroupFailure;

  // `on_failure` is called once, when a failure becomes known: on the reporting thread, or on
  // "ddp-failure". It must not destroy this object. No other user may have keys of `store`. Throws
  // what the store throws.
  FailureNotice(std::shared_ptr<ddp::internal::GroupStore> store,
                const ddp::internal::Membership& membership,
                std::function<void(const GroupFailure&)> on_failure);
  ~FailureNotice() override;

  // Tells all workers, this one included. Does nothing when a failure is known. Blocks until the
  // report is in the store or the store has failed; while an exception unwinds the caller's thread,
  // another thread writes it. Never throws.
  void Report(const GroupFailure& failure);

  // The same for a failure that this worker has found, and that may be the consequence of one that
  // another worker has reported before. Returns the first of them, which all workers then know.
  // Blocks until the report is in the store or the store has failed. Never throws.
  GroupFailure ReportFound(const GroupFailure& failure);

  // ReportFound() for a caller that needs no result. While an exception unwinds the caller's
  // thread, another thread writes the report. Never throws.
  void TellFound(const GroupFailure& failure);

  std::optional<GroupFailure> failure() const;

 private:
  void OnFailureRead(int64_t incarnation, const GroupFailure& failure) override;
  std::string OnAsked(int64_t /*incarnation*/) override { return {}; }
  std::optional<GroupFailure> Publish(const GroupFailure& failure);
  bool Set(const GroupFailure& failure);

  const std::function<void(const GroupFailure&)> on_failure_;
  mutable Mutex mutex_;
  std::optional<GroupFailure> failure_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<ddp::internal::ReportLog> log_;  // last: its thread uses the others
};

}  // namespace ddp::rpc::internal

#endif  // DDP_RPC_FAILURE_FAILURE_NOTICE_H_
