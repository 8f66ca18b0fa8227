#ifndef DDP_COMM_INQUIRY_H_
#define DDP_COMM_INQUIRY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "ddp/comm/collective_log.h"
#include "ddp/comm/failure_notice.h"

namespace ddp::internal {

// Finds out why a collective does not complete: which rank is gone, or which ranks are in different
// collectives. Costs nothing until a rank has waited for long, or a connection has broken.
//
// A rank that waits asks all ranks, through the store, where they are (FailureNotice::AskWhere).
// One rank asks and reads for all; the others hear its verdict as news of a failure. A rank of this
// host that has died is proven dead by its process id, without a question.
//
// Thread-compatible. All methods but Explain() throw what the store throws.
class Inquiry {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    int64_t incarnation = 0;
    // The ranks whose processes run on this host: [local_begin, local_end).
    int local_begin = 0;
    int local_end = 0;
    // Rank 0 serves the store, so a store that is lost means that rank 0 is gone.
    bool store_is_rank_0 = false;
  };

  // The operation that this rank waits for.
  struct Awaited {
    int64_t sequence = 0;          // of a collective; -1: it is none
    bool needs_all_ranks = false;  // it cannot complete here before every rank has launched it
    int peer = -1;                 // of a message: the one rank that it needs
    std::string what;
  };

  // Neither may be null.
  Inquiry(std::shared_ptr<FailureNotice> notice, std::shared_ptr<const CollectiveLog> log,
          const Options& options);

  // Asks all ranks where they are. Returns false when another rank has asked since `since_ns`.
  bool Ask(int64_t since_ns);

  // Reads the answers to the last question of this rank. Returns whether all have come. Then, as
  // before that, positions() holds the answers and silent() the ranks without one.
  bool ReadAnswers();
  const std::map<int, RankPosition>& positions() const { return positions_; }
  const std::vector<int>& silent() const { return silent_; }

  // The failure that the answers read so far prove: ranks in different collectives, or a rank that
  // will never launch `awaited`, because it has left the group or its process has ended.
  std::optional<FailureNotice::Failure> Judge(const Awaited& awaited);

  // The ranks that have not launched `awaited`, as far as the answers tell: for the message of a
  // timeout. Empty: none is known.
  std::string DescribeLate(const Awaited& awaited) const;

  // A connection broke with `error` while this rank waited for `awaited`. Blocks until news of a
  // failure has come (nullopt), or this rank has found the cause: a rank that is gone; or, where
  // every rank answers, this rank itself with the text of `error`. A rank of this host that has
  // died is found at once, another one after 3 s; the longest wait is 8 s.
  std::optional<FailureNotice::Failure> Explain(const Awaited& awaited, const std::string& error);

 private:
  std::optional<FailureNotice::Failure> FindGone(const Awaited& awaited, int begin, int end,
                                                 bool ended_counts);
  std::optional<FailureNotice::Failure> FindLeft(const Awaited& awaited, int rank,
                                                 const std::string& standing) const;
  std::optional<FailureNotice::Failure> FindCause(const Awaited& awaited, absl::Duration waited,
                                                  int64_t start_ns);
  std::vector<std::optional<std::string>> Get(const std::vector<std::string>& keys);

  const std::shared_ptr<FailureNotice> notice_;
  const std::shared_ptr<const CollectiveLog> log_;
  const Options options_;
  std::optional<int64_t> question_;  // this rank's last one
  int64_t asked_ns_ = 0;
  std::map<int, RankPosition> positions_;
  std::vector<int> silent_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_INQUIRY_H_
