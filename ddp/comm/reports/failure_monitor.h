#ifndef DDP_COMM_REPORTS_FAILURE_MONITOR_H_
#define DDP_COMM_REPORTS_FAILURE_MONITOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/comm/meeting/store_meeting.h"
#include "ddp/comm/reports/report_log.h"
#include "ddp/comm/reports/wake_signal.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"
#include "ddp/health/group_health.h"

namespace ddp::internal {

// The object that knows where this rank is: a CollectiveLog. Thread-safe.
class PositionSource {
 public:
  virtual ~PositionSource() = default;

  // Returns the number of collectives that this rank has launched so far in this incarnation.
  virtual int64_t launched() const = 0;

  // Returns the answer to peers that ask where this rank is. Thread: "ddp-failure".
  virtual std::string Answer() const = 0;
};

// The failures of a group that this rank knows: GroupHealth under a lock, kept up to date by
// a ReportLog. A ProcessGroup owns one, over all its incarnations. The workers of remote calls have
// one as well, with their ids as ranks.
//
// Reason: a Gloo collective that a peer never joins ends only by its timeout, and cannot be
// aborted. A failure report therefore ends the waits in ddp/ before the timeout.
//
// Thread-safe. Makes the ReportLog, and with it the thread "ddp-failure".
class FailureMonitor : private ReportLog::Reader {
 public:
  struct Options {
    // The time limit of a command of the store and of its clone; zero changes nothing. Use a few
    // seconds: the limit bounds how long a lost store blocks Report() and Leave().
    absl::Duration command_timeout = absl::ZeroDuration();
    // Called once for each incarnation, when a failure becomes known: on the reporting thread, or
    // on "ddp-failure". Must not destroy the monitor.
    std::function<void(const GroupFailure&)> on_failure = {};
  };

  // Starts the ReportLog's thread. Throws what the store throws. No other group may use the keys of
  // `store`: give it a prefix.
  FailureMonitor(std::shared_ptr<GroupStore> store, const Membership& membership, Options options);
  FailureMonitor(std::shared_ptr<GroupStore> store, const Membership& membership)
      : FailureMonitor(std::move(store), membership, Options()) {}

  // Calls Leave(), then ends the ReportLog.
  ~FailureMonitor() override;
  FailureMonitor(const FailureMonitor&) = delete;
  FailureMonitor& operator=(const FailureMonitor&) = delete;

  // Reports to all ranks, this one included, that this rank failed. Does nothing when a failure of
  // this incarnation is known. Never throws: an unreachable store causes only a log line. While an
  // exception unwinds the calling thread, queues the report and returns at once.
  void Report(const std::string& reason);

  // The same for an operation of this rank that has failed, or has taken too long, while no call
  // waited for it.
  void ReportOperation(const std::string& reason);

  // Reports a failure that this rank has found and other ranks may find as well. Does nothing when
  // a failure of this incarnation is known. `failure.rank` is -1 when no single rank is at fault.
  // If another rank has reported a failure before, that failure becomes failure() on this rank too,
  // so all ranks name the same failure. Never throws.
  void ReportFound(const GroupFailure& failure);

  // Reports a failure that every rank of the group sees for itself, such as a death in shared
  // memory. The failure becomes failure() at once, and the other ranks are told afterwards, by the
  // thread "ddp-report": the round trip to the store costs a third of the time to the error. All
  // ranks name the same rank, each with the reason that it has seen. Does nothing when a failure of
  // this incarnation is known. Never throws.
  void ReportSeen(const GroupFailure& failure);

  // Tells the other ranks that this rank has left the group for good. Call it before the
  // connections are closed. Blocks until this and all reports queued before it are written, or the
  // store has failed. A second call does nothing. Never throws.
  void Leave();

  // Starts an incarnation, with the same ranks. Forgets the position source, and the failures of
  // earlier incarnations.
  void Begin(const Membership& membership);
  Membership membership() const;

  // Returns the first known failure of this incarnation; nullopt when none is known.
  std::optional<GroupFailure> failure() const;

  // Returns true when failure() has a value. Costs one atomic load.
  bool failed() const { return failed_; }

  // Blocks until a failure is known or `timeout` has passed. Returns failure(). A rank whose
  // connections broke calls it, because the failed rank's report usually follows at once.
  std::optional<GroupFailure> AwaitFailure(absl::Duration timeout) const;

  // The signal that is notified when a failure of this incarnation becomes known, and when a future
  // completes for which a CompletionWait waits.
  const std::shared_ptr<WakeSignal>& signal() const { return signal_; }

  // Runs `step`, an event or a decision of GroupHealth, under the lock. Returns its result.
  template <typename Step>
  auto Health(const Step& step) {
    MutexLock lock(mutex_);
    return step(health_);
  }

  // Sets the object that knows this rank's position in the current incarnation. Without one, the
  // answer to the peers is empty: no collective was launched.
  void SetPositionSource(std::shared_ptr<const PositionSource> source);

  ReportLog& log() { return *log_; }

  // As AttendMeeting() (see store_meeting.h). A failure that is known, or is reported meanwhile,
  // ends the meeting for all its ranks: then returns nullopt. One call at a time.
  std::optional<MeetingEnd> Attend(StoreMeeting& meeting, const std::string& value,
                                   absl::Duration timeout);

 private:
  void OnFailureRead(int64_t incarnation, const GroupFailure& failure) override;
  std::string OnAsked(int64_t incarnation) override;
  bool SetFailure(int64_t incarnation, const GroupFailure& failure);
  std::optional<GroupFailure> Publish(const LogEntry& message);
  void EndMeeting();

  const std::shared_ptr<GroupStore> store_;
  const std::function<void(const GroupFailure&)> on_failure_;
  const std::shared_ptr<WakeSignal> signal_ = std::make_shared<WakeSignal>();
  std::atomic<bool> failed_{false};  // health_.failed(), readable without the mutex

  mutable Mutex mutex_;
  GroupHealth health_ ABSL_GUARDED_BY(mutex_);
  std::string meeting_ ABSL_GUARDED_BY(mutex_);  // verdict key, or empty
  std::shared_ptr<const PositionSource> position_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<ReportLog> log_;  // the last field: its thread uses the others
};

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_FAILURE_MONITOR_H_
