#ifndef DDP_COMM_CHECK_INQUIRY_H_
#define DDP_COMM_CHECK_INQUIRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ddp/comm/check/collective_log.h"
#include "ddp/comm/news/failure_monitor.h"
#include "ddp/comm/news/rank_position.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"

namespace ddp::internal {

// Finds the cause of a collective that does not complete: a rank that is gone, or ranks that are in
// different collectives. The Communicator owns it, and uses it after a long wait or a broken
// connection; before that it costs nothing.
//
// A rank that waits asks all ranks for their positions, through the store
// (NewsLog::AskWhere). One rank asks and reads for all; the others receive the result as a
// failure report. A dead process on this host is found by its process id, without a question.
//
// Thread-compatible. All methods but Explain() throw what the store throws.
class Inquiry {
 public:
  // The operation that this rank waits for.
  struct Awaited {
    int64_t sequence = 0;          // of a collective; -1 for other operations
    bool needs_all_ranks = false;  // completes only after every rank has launched it
    int peer = -1;                 // of a message: the other rank; -1 for other operations
    std::string what;
  };

  // Every method needs a `monitor` and a `log`; the constructor also takes null.
  Inquiry(std::shared_ptr<FailureMonitor> monitor, std::shared_ptr<const CollectiveLog> log,
          const Membership& membership);

  // Asks all ranks for their positions. Returns false when another rank has asked since `since_ns`
  // (monotonic clock).
  bool Ask(int64_t since_ns);

  // Reads the answers to this rank's last question, without waiting. Returns true when all ranks
  // have answered. Sets positions() to the answers, and silent() to the ranks without one.
  bool ReadAnswers();
  const std::map<int, RankPosition>& positions() const { return positions_; }
  const std::vector<int>& silent() const { return silent_; }

  // Returns the failure that the last answers prove: ranks in different places (see
  // DescribeMismatch), or a rank that will never launch `awaited`, because it has left the group or
  // its process has ended. Nullopt when the answers prove none.
  std::optional<GroupFailure> Judge(const Awaited& awaited);

  // Describes the ranks that have not launched `awaited` according to the answers, for the message
  // of a timeout. Empty when none is known.
  std::string DescribeLate(const Awaited& awaited) const;

  // Finds the cause of a connection that broke with `error` while this rank waited for `awaited`.
  // Returns nullopt when a failure report has come. Returns the rank that is gone, or this rank
  // with `error` when all processes are alive or the store fails. Blocks for about 8 s at most.
  // A process of this host that has died is found at once, one of another host after 3 s.
  std::optional<GroupFailure> Explain(const Awaited& awaited, const std::string& error);

 private:
  std::optional<GroupFailure> FindGone(const Awaited& awaited, int begin, int end,
                                       bool ended_counts);
  std::optional<GroupFailure> FindLeft(const Awaited& awaited, int rank,
                                       const std::string& standing) const;
  std::optional<GroupFailure> FindCause(const Awaited& awaited, absl::Duration waited,
                                        int64_t start_ns);
  std::vector<std::optional<std::string>> Get(const std::vector<std::string>& keys);

  const std::shared_ptr<FailureMonitor> monitor_;
  const std::shared_ptr<const CollectiveLog> log_;
  const Membership self_;
  std::optional<int64_t> question_;  // number of this rank's last question
  int64_t asked_ns_ = 0;
  std::map<int, RankPosition> positions_;
  std::vector<int> silent_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_CHECK_INQUIRY_H_
