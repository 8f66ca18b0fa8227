#ifndef DDP_COMM_FAILURE_NOTICE_H_
#define DDP_COMM_FAILURE_NOTICE_H_

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"

namespace c10d {
class Store;
}  // namespace c10d
namespace c10::ivalue {
struct Future;
}  // namespace c10::ivalue

namespace ddp::internal {

class CollectiveLog;
struct NoticeMessage;

// Spreads the news that a rank cannot go on, so that its peers stop waiting for it, and answers for
// this process when a peer asks whether it is alive.
//
// A collective of Gloo that a peer will never join ends only by its timeout, and cannot be aborted.
// So whoever waits in ddp/ waits for two things at once: the collective, or the news.
//
// A failure belongs to an incarnation of the group (see ProcessGroup). Within one the first news
// stays; later ones are its consequences. News of an earlier incarnation is ignored, of a later one
// kept until this rank is there.
//
// The news travels through the store, as entries of one log that all ranks read. A rank appends an
// entry (one compareSet, so that no entry is lost or half there, whoever dies) and wakes every rank
// by a key of its own (one multiSet): two commands, however many ranks there are. In every process
// a thread of this class is blocked in the store until it is woken; there is no polling.
//
// Thread-safe. Owns one thread, "ddp-failure", blocked in a clone of the store: on Redis over the
// connection that all groups of the process share, on a TCPStore over one more.
class FailureNotice {
 public:
  struct Failure {
    int rank = -1;       // the rank that failed; -1: the ranks disagree, and none is to blame alone
    std::string reason;  // as that rank put it, or the rank that found it dead

    // "rank 2 failed: <reason>", or the reason alone.
    std::string ToString() const;
  };

  enum class WaitResult { kCompleted, kPeerFailed, kTimedOut };

  // Writes into the store which process this rank is, where the group has other ranks. Throws what
  // the store throws.
  //
  // `store` is this group's alone (a prefix); it must not be null. `command_timeout` becomes its
  // timeout once it has connected: seconds, since it bounds how long a lost store holds up Report()
  // and the destructor. Zero: the store keeps its own.
  FailureNotice(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                std::chrono::milliseconds command_timeout = std::chrono::milliseconds(0));

  // Calls Leave() and ends the thread: at once while the store answers, else within a minute.
  ~FailureNotice();
  FailureNotice(const FailureNotice&) = delete;
  FailureNotice& operator=(const FailureNotice&) = delete;

  // Tells all ranks, this one included, that this rank failed. Does nothing when a failure is known
  // already. Never throws: a store that cannot be reached costs a line in the log.
  void Report(const std::string& reason);

  // The same for a failure that this rank has found and others may find as well: of a rank that
  // cannot report it any more, or of no single rank (-1). Where another rank has reported a failure
  // before, that one becomes failure() here too, so that all ranks name the same.
  void ReportFound(const Failure& failure);

  // Tells the other ranks that this rank has left the group for good: those that wait in a renewal,
  // and those that ask later (see StandingKey). Call it before the connections are closed. Nothing
  // happens in a second call. Never throws.
  void Leave();

  // The news of this incarnation; and whether there is any: one atomic load.
  std::optional<Failure> failure() const;
  bool failed() const;

  // Notes that this rank has thrown because of this incarnation's failure, whoever's it is. Returns
  // whether it had before.
  bool MarkRaised();

  // The group has a new communicator: forgets the failures of earlier ones.
  void Begin(int64_t incarnation);
  int64_t incarnation() const;

  // A rank that will never come back, which makes the group useless for good. The first one stays.
  void SetGone(Failure failure);
  std::optional<Failure> gone() const;

  // Asks ranks that are missing where an incarnation is to be built whether their process is alive;
  // each sets AliveKey() within milliseconds. `number` tells the questions apart. Throws what the
  // store throws.
  void Ping(int64_t incarnation, int64_t number, const std::vector<int>& ranks);
  static std::string AliveKey(int64_t incarnation, int64_t number, int rank);

  // The collectives of the current incarnation: what this rank answers when a peer asks where it
  // is. Null: nothing to tell.
  void SetLog(std::shared_ptr<const CollectiveLog> log);

  // Asks all ranks where they are. Each sets PositionKey() to its RankPosition within milliseconds,
  // however busy its own thread is. Returns the question's number, or nullopt when another rank has
  // asked since `since_ns` (on the monotonic clock), so that its answers serve. Throws what the
  // store throws.
  std::optional<int64_t> AskWhere(int64_t since_ns);
  static std::string PositionKey(int64_t incarnation, int64_t number, int rank);

  // Where a rank has written how it stands: "process <ProcessIdentity>", or, once it has left,
  // "left <incarnation> <number of collectives>".
  static std::string StandingKey(int rank);

  // This group's own part of the store. Thread-safe as far as the store is.
  c10d::Store& store() const { return *store_; }

  // The meeting at which the ranks build an incarnation (see StoreMeeting), and the verdict that
  // ends it when a rank is gone.
  static std::string RenewalName(int64_t incarnation);
  static std::string GoneVerdict(const Failure& failure);
  static std::optional<Failure> ParseGoneVerdict(const std::string& verdict);

  // The verdict of a meeting that the news of a failure ended.
  static constexpr char kFailedVerdict[] = "failed";

  // While it lives, such news ends the meeting with this verdict key, for all its ranks; news that
  // is known already does so in the constructor. One at a time.
  class EndMeetingOnFailure {
   public:
    EndMeetingOnFailure(FailureNotice& notice, const std::string& verdict_key);
    ~EndMeetingOnFailure();
    EndMeetingOnFailure(const EndMeetingOnFailure&) = delete;
    EndMeetingOnFailure& operator=(const EndMeetingOnFailure&) = delete;

   private:
    FailureNotice& notice_;
  };

  // The same as failure(), after waiting up to `timeout` for one. For a rank whose connections
  // broke: the news of why usually follows at once.
  std::optional<Failure> AwaitFailure(absl::Duration timeout) const;

  // Returns after `head_start`: a rank that ends because of a peer lets that peer end first, so
  // that whoever watches the processes sees the cause before its consequences.
  void YieldToCause(absl::Duration head_start) const;

  // Blocks until `future` is complete (with a value or an error), a failure is known, or `timeout`
  // has passed; looked at in this order.
  WaitResult Wait(c10::ivalue::Future& future, absl::Duration timeout) const;

  // The same, whatever news there is: whether the future was complete within `timeout`. For one
  // that Wait() has waited for.
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
  const std::shared_ptr<State> state_;  // shared with callbacks of futures, which may outlive us
  struct Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_FAILURE_NOTICE_H_
