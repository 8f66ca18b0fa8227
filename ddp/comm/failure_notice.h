#ifndef DDP_COMM_FAILURE_NOTICE_H_
#define DDP_COMM_FAILURE_NOTICE_H_

#include <memory>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"

namespace c10d {
class Store;
}  // namespace c10d
namespace c10::ivalue {
struct Future;
}  // namespace c10::ivalue

namespace ddp {

// Spreads the news that a rank cannot go on, so that its peers stop waiting for it.
//
// A collective of Gloo that a peer will never join ends only by its timeout, and cannot be aborted.
// So whoever waits in ddp/ waits for two things at once: the collective, or the news. The news
// travels through the store: a failing rank sets one key per rank, and in every process a thread of
// this class waits for its own. The first news stays; later ones are its consequences.
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
  FailureNotice(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);

  // Ends the thread: at once while the store answers, else within 5 s.
  ~FailureNotice();
  FailureNotice(const FailureNotice&) = delete;
  FailureNotice& operator=(const FailureNotice&) = delete;

  // Tells all ranks, this one included, that this rank failed. Does nothing when a failure is known
  // already. Never throws: a store that cannot be reached costs a line in the log.
  void Report(const std::string& reason);

  std::optional<Failure> failure() const;

  // The same, after waiting up to `timeout` for one. For a rank whose connections broke: the news
  // of why usually follows at once.
  std::optional<Failure> AwaitFailure(absl::Duration timeout) const;

  // Returns after `head_start`: a rank that ends because of a peer lets that peer end first, so
  // that whoever watches the processes sees the cause before its consequences.
  void YieldToCause(absl::Duration head_start) const;

  // Blocks until `future` is complete (with a value or an error), a failure is known, or `timeout`
  // has passed; looked at in this order.
  WaitResult Wait(c10::ivalue::Future& future, absl::Duration timeout) const;

 private:
  struct State;
  void WatchStore(const c10::intrusive_ptr<c10d::Store>& store);

  const int rank_;
  const int size_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<State> state_;  // shared with callbacks of futures, which may outlive us
  struct Thread;
  std::unique_ptr<Thread> thread_;
};

}  // namespace ddp

#endif  // DDP_COMM_FAILURE_NOTICE_H_
