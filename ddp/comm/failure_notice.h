#ifndef DDP_COMM_FAILURE_NOTICE_H_
#define DDP_COMM_FAILURE_NOTICE_H_

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

namespace ddp {

struct NoticeMessage;

// Spreads the news that a rank cannot go on, so that its peers stop waiting for it.
//
// A collective of Gloo that a peer will never join ends only by its timeout, and cannot be aborted.
// So whoever waits in ddp/ waits for two things at once: the collective, or the news. The news
// travels through the store: the group has a log there, whose entries are written by whoever has
// something to say, and in every process a thread of this class waits for the next one. It also
// answers pings, so that a rank that is busy can be told from one that is gone.
//
// A failure belongs to an incarnation of the group. The first news of an incarnation stays; later
// ones are its consequences. News of an older incarnation is ignored, of a later one kept for then.
//
// Thread-safe. Owns one thread, "ddp-failure", blocked in the store on a connection of its own.
class FailureNotice {
 public:
  struct Failure {
    int rank = -1;       // that failed
    std::string reason;  // as that rank put it
  };

  enum class WaitResult { kCompleted, kPeerFailed, kTimedOut };

  // `store` is this group's alone (a prefix); it must not be null.
  FailureNotice(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Ends the thread: at once while the store answers, else within 5 s.
  ~FailureNotice();
  FailureNotice(const FailureNotice&) = delete;
  FailureNotice& operator=(const FailureNotice&) = delete;

  // Tells all ranks, this one included, that this rank failed. Does nothing when a failure is known
  // already. Never throws: a store that cannot be reached costs a line in the log.
  void Report(const std::string& reason);

  // Asks `ranks` to set AliveKey(number, rank). Throws what the store throws.
  void Ping(int64_t number, const std::vector<int>& ranks);
  static std::string AliveKey(int64_t number, int rank);

  // The news of the current incarnation.
  std::optional<Failure> failure() const;
  bool failed() const;  // whether there is any; cheap

  // Notes that this rank has thrown for the failure; returns whether it had before.
  bool MarkRaised();

  int64_t incarnation() const;
  void Begin(int64_t incarnation);

  // A rank that will never come back; the first one stays.
  void SetGone(Failure failure);
  std::optional<Failure> gone() const;

  // How the meeting that begins an incarnation is called, and how it ends when a rank is gone or
  // when somebody fails meanwhile: the verdicts of its StoreMeeting.
  static std::string RenewalName(int64_t incarnation);
  static std::string GoneVerdict(const Failure& failure);
  static std::optional<Failure> ParseGoneVerdict(const std::string& verdict);
  static constexpr char kFailedVerdict[] = "failed";

  // While it lives, a failure ends the meeting with this verdict key.
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

 private:
  struct State;
  void WatchStore(c10d::Store& store);
  bool TakeInNews(c10d::Store& store);
  void HandleMessage(c10d::Store& store, const NoticeMessage& message);
  void Publish(const NoticeMessage& message);
  void EndMeeting(c10d::Store& store);

  const int rank_;
  const int size_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<State> state_;  // shared with callbacks of futures, which may outlive us
  struct Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace ddp

#endif  // DDP_COMM_FAILURE_NOTICE_H_
