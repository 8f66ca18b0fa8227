#ifndef DDP_COMM_FAILURE_NOTICE_H_
#define DDP_COMM_FAILURE_NOTICE_H_

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"
#include "ddp/health/group_failure.h"
#include "ddp/health/group_health.h"

namespace c10d {
class Store;
}  // namespace c10d
namespace c10::ivalue {
struct Future;
}  // namespace c10::ivalue

namespace ddp::internal {

class CollectiveLog;
struct NoticeMessage;

// Publishes and receives failure reports: a rank that cannot continue reports it, and its peers
// stop waiting for that rank. Also answers for this process when a peer asks whether it is alive,
// and which collectives it has launched. A ProcessGroup owns one, over all its incarnations.
//
// Reason: a Gloo collective that a peer never joins ends only by its timeout, and cannot be
// aborted. So every wait in ddp/ ends with the collective or with a failure report (see Wait()).
//
// Health. GroupHealth holds what is known of failures and decides what a call on the group throws.
// This class owns it and guards it by its mutex.
//
// Protocol. Reports are entries of one log in the store, which all ranks read. A rank appends an
// entry by one compareSet, so no entry is lost or incomplete when a rank dies. One multiSet then
// sets a wake key for every rank. A report costs these two commands for any number of ranks (on
// a store without multiSet, one set per rank). Every rank waits for its wake key; none polls.
//
// Thread-safe. Owns one thread, "ddp-failure", which waits in a clone of the store. On Redis the
// clone shares the connection of all groups of the process; on a TCPStore it has its own.
class FailureNotice {
 public:
  using Failure = GroupFailure;

  enum class WaitResult { kCompleted, kPeerFailed, kTimedOut };

  // Starts the thread. In a group of several ranks, first writes this process's identity into the
  // store (see StandingKey). Throws what the store throws.
  //
  // `store` must not be null; no other group uses its keys (it has a prefix). `command_timeout`
  // becomes the timeout of `store`, once it has connected; zero changes nothing. Use seconds: this
  // timeout bounds how long a lost store blocks Report() and the destructor.
  FailureNotice(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                std::chrono::milliseconds command_timeout = std::chrono::milliseconds(0));

  // Calls Leave(), then ends and joins the thread: at once while the store answers, otherwise
  // within a minute.
  ~FailureNotice();
  FailureNotice(const FailureNotice&) = delete;
  FailureNotice& operator=(const FailureNotice&) = delete;

  // Reports to all ranks, this one included, that this rank failed. Does nothing when a failure of
  // this incarnation is known. Never throws: an unreachable store causes only a log line.
  void Report(const std::string& reason);

  // Reports a failure that this rank has found and other ranks may find as well. The rank at fault
  // cannot report it itself, or there is no single one (-1). If another rank has reported a failure
  // before, that failure becomes failure() here too, so all ranks name the same. Never throws.
  void ReportFound(const Failure& failure);

  // Tells the other ranks that this rank has left the group for good: those that wait in a renewal,
  // and those that read StandingKey() later. Call it before the connections are closed. A second
  // call does nothing. Never throws.
  void Leave();

  // Returns the failure of this incarnation.
  std::optional<Failure> failure() const;

  // Returns true when there is one. Costs one atomic load.
  bool failed() const;

  // Records that this rank has thrown because of this incarnation's failure, its own or a peer's.
  // Returns true when that was recorded before.
  bool MarkRaised();

  // The decisions of GroupHealth: what a call on this group throws. Each is one step under the
  // lock.
  GroupError OnOperationFailed(const std::string& what, const std::string& reason);
  GroupError OnOwnError(GroupError::Kind kind, std::string message);
  std::optional<GroupError> OnUse(bool retired, const std::string& what);
  GroupError OnWaitEnded(const std::string& what);
  GroupHealth::Forward OnForward(std::optional<GroupError>* error);
  std::optional<GroupError> GoneError() const;

  // Throws `error` as the exception of its kind. First reports its message when this rank is the
  // cause.
  [[noreturn]] void Throw(const GroupError& error);

  // Starts an incarnation: the group has a new communicator. Forgets failures of earlier ones.
  void Begin(int64_t incarnation);
  int64_t incarnation() const;

  // Records a rank that will never come back, so the group can never be used again. The first one
  // stays.
  void SetGone(Failure failure);

  // Asks `ranks`, which are missing in the renewal to `incarnation`, whether their processes are
  // alive. The thread of each living process sets AliveKey() within milliseconds. `number`
  // distinguishes the questions. Throws what the store throws.
  void Ping(int64_t incarnation, int64_t number, const std::vector<int>& ranks);
  static std::string AliveKey(int64_t incarnation, int64_t number, int rank);

  // Sets the log from which this rank answers AskWhere() in the current incarnation. With null,
  // the answers say that no collective was launched.
  void SetLog(std::shared_ptr<const CollectiveLog> log);

  // Asks all ranks for their positions. The thread of each process sets PositionKey() to its
  // RankPosition within milliseconds, even while its trainer is busy. Returns the question's
  // number. Returns nullopt when another rank has asked since `since_ns` (monotonic clock); that
  // rank then reads the answers. Throws what the store throws.
  std::optional<int64_t> AskWhere(int64_t since_ns);
  static std::string PositionKey(int64_t incarnation, int64_t number, int rank);

  // Returns the key of a rank's standing: "process <ProcessIdentity>", or, after the rank has left,
  // "left <incarnation> <number of collectives>".
  static std::string StandingKey(int rank);

  // Returns this group's part of the store. Thread-safe when the store is.
  c10d::Store& store() const { return *store_; }

  // Name of the StoreMeeting in which the ranks build an incarnation, and the verdict that ends
  // this meeting when a rank is gone. ParseGoneVerdict() returns nullopt for other verdicts.
  static std::string RenewalName(int64_t incarnation);
  static std::string GoneVerdict(const Failure& failure);
  static std::optional<Failure> ParseGoneVerdict(const std::string& verdict);

  // Verdict of a meeting that a failure report ended.
  static constexpr char kFailedVerdict[] = "failed";

  // Ends a StoreMeeting with kFailedVerdict, for all its ranks, when a failure is reported while
  // this object lives or is known to its constructor. At most one object at a time.
  class EndMeetingOnFailure {
   public:
    EndMeetingOnFailure(FailureNotice& notice, const std::string& verdict_key);
    ~EndMeetingOnFailure();
    EndMeetingOnFailure(const EndMeetingOnFailure&) = delete;
    EndMeetingOnFailure& operator=(const EndMeetingOnFailure&) = delete;

   private:
    FailureNotice& notice_;
  };

  // Blocks until a failure is known or `timeout` has passed. Returns failure(). For a rank whose
  // connections broke: a report of the cause usually follows at once.
  std::optional<Failure> AwaitFailure(absl::Duration timeout) const;

  // Blocks for `head_start`. A rank that ends because of a peer lets that peer end first, so the
  // launcher sees the cause before its consequences.
  void YieldToCause(absl::Duration head_start) const;

  // Blocks until `future` is complete (with a value or an error), a failure is known, or `timeout`
  // has passed; checked in this order. The backend thread that completes the future wakes this
  // call.
  WaitResult Wait(c10::ivalue::Future& future, absl::Duration timeout) const;

  // Blocks until `future` is complete or `timeout` has passed; a failure does not end the wait.
  // Returns true when the future is complete. Call Wait() with the same future before: only its
  // callback wakes this call.
  bool AwaitCompletion(c10::ivalue::Future& future, absl::Duration timeout) const;

 private:
  struct State;
  void WatchStore(c10d::Store& store);
  bool TakeInNews(c10d::Store& store);
  void HandleMessage(c10d::Store& store, const NoticeMessage& message);
  void AnswerWhere(c10d::Store& store, const NoticeMessage& message);
  std::optional<NoticeMessage> Publish(const NoticeMessage& message);
  bool SetFailure(int64_t incarnation, const Failure& failure);
  void EndMeeting(c10d::Store& store);

  const int rank_;
  const int size_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<State> state_;  // futures' callbacks share it and may outlive this object
  struct Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_FAILURE_NOTICE_H_
