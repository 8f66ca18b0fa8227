#ifndef DDP_COMM_CHECK_INQUIRY_H_
#define DDP_COMM_CHECK_INQUIRY_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/check/collective_record.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"

namespace ddp::internal {

// Finds the cause of a collective that does not complete: a rank that is gone, or ranks that are in
// different collectives. The Communicator owns the inquiry. The inquiry runs after a wait of 1 s or
// more, or after a broken connection.
//
// A rank that waits asks all ranks for their positions (see ReportLog::AskWhere). One rank asks and
// reads for all; the others receive the result as a failure report. Explain() finds a dead process
// of this host by its process id, without a question.
//
// Thread-compatible. Ask(), ReadAnswers() and Judge() throw what the store throws.
class Inquiry {
 public:
  // The operation that this rank waits for.
  struct Awaited {
    int64_t sequence = 0;          // of a collective; -1 for other operations
    bool needs_all_ranks = false;  // completes only after every rank has launched it
    int peer = -1;                 // of a message: the other rank; -1 for other operations
    std::string what;
  };

  // `log` may be null in a group of one rank, where no method may be called.
  Inquiry(std::shared_ptr<FailureMonitor> monitor, std::shared_ptr<const CollectiveLog> log,
          const Membership& membership);

  // Asks. Returns false, and asks nothing, when another rank has asked since `since_ns`.
  bool Ask(int64_t since_ns);
  // Reads the positions of the ranks, this one's among them. Returns true when all have answered;
  // false when the last Ask() returned false. silent() are the ranks that have not answered.
  bool ReadAnswers();
  const std::vector<int>& silent() const { return silent_; }

  // Returns the failure that the last answers prove: ranks in different places (see
  // DescribeMismatch). If there is none and some ranks are silent, reads the store: returns a rank
  // that has left the group before it launched `awaited`, or whose process on this host has ended.
  // Returns nullopt when no failure is found.
  std::optional<GroupFailure> Judge(const Awaited& awaited);

  // Asks, and reads the answers for a second. Returns false when another rank has asked since
  // `since_ns`. Reports the failure that the answers prove. `wait` blocks for the given time, or
  // until the search is of no use any more: then it returns true. `awaited` returns the operation
  // that this rank still waits for; nullopt: it waits no longer.
  using Wait = std::function<bool(absl::Duration limit)>;
  using StillAwaited = std::function<std::optional<Awaited>()>;
  bool Search(int64_t since_ns, const Wait& wait, const StillAwaited& awaited);

  // Describes the ranks that have not launched `awaited` according to the answers, for the message
  // of a timeout. Empty when none is known. DescribeLateNow() asks first, and does not throw.
  std::string DescribeLate(const Awaited& awaited) const;
  std::string DescribeLateNow(const Awaited& awaited);

  // Returns the failure of `ranks`: their processes have ended while this rank waited for
  // `awaited`.
  GroupFailure DescribeEnded(const Awaited& awaited, const std::vector<int>& ranks) const;

  // Finds the cause of a connection that broke with `error` while this rank waited for `awaited`.
  // Returns nullopt when a failure report has come. Returns the rank that is gone, or this rank
  // with `error` when all processes are alive. When the store fails, returns rank 0 if rank 0
  // serves the store, and otherwise this rank. Blocks for about 8 s, and for one command of a store
  // that does not answer. Finds a dead process of this host at once, one of another host after
  // about 3 s. Does not throw.
  std::optional<GroupFailure> Explain(const Awaited& awaited, const std::string& error);

 private:
  std::optional<GroupFailure> FindGone(const Awaited& awaited, int begin, int end,
                                       bool ended_counts);
  std::optional<GroupFailure> FindLeft(const Awaited& awaited, int rank,
                                       const std::string& standing) const;
  std::optional<GroupFailure> FindCause(const Awaited& awaited, absl::Duration waited,
                                        int64_t start_ns);

  const std::shared_ptr<FailureMonitor> monitor_;
  const std::shared_ptr<const CollectiveLog> log_;
  const Membership self_;
  std::optional<int64_t> question_;  // the number of the last question, when this rank asked it
  int64_t asked_ns_ = 0;
  std::map<int, RankPosition> positions_;
  std::vector<int> silent_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_CHECK_INQUIRY_H_
