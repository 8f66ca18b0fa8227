#ifndef DDP_COMM_REPORTS_REPORT_LOG_H_
#define DDP_COMM_REPORTS_REPORT_LOG_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/comm/reports/deferred_writes.h"
#include "ddp/common/membership.h"
#include "ddp/health/group_failure.h"

namespace ddp::internal {

// An entry of a group's log in the store. The ranks of the group communicate through this log
// outside the collectives. A value. Its text is one of:
//   failure <incarnation> <rank> <reason>  reports a failure
//   where <incarnation> <number> <rank>    asks all ranks where they are
struct LogEntry {
  enum class Kind { kFailure, kWhere };

  Kind kind = Kind::kFailure;
  int64_t incarnation = 0;

  int rank = -1;       // kFailure: the rank at fault, -1 for no single one; kWhere: the asker
  std::string reason;  // kFailure: the cause, for a person

  int64_t number = 0;  // kWhere: of the question

  static LogEntry Of(int64_t incarnation, const GroupFailure& failure) {
    return {.incarnation = incarnation, .rank = failure.rank, .reason = failure.reason};
  }
  std::string Serialize() const;

  // Returns nullopt when `text` is not the result of Serialize().
  static std::optional<LogEntry> Parse(absl::string_view text);
};

// The log of a group in the store, and the thread that reads it. A group has one ReportLog, which
// it keeps when it is formed again after a failure (a new incarnation).
//
// Protocol. All ranks read one log. A rank appends an entry by compareSet: the log has the whole
// entry or none of it. One multiSet then sets the wake keys of all ranks (a store without multiSet
// gets one set per rank). Each rank waits for a wake key of its own; none polls. A rank that dies
// between the two commands wakes nobody: all ranks read its entry together with the next one, such
// as the question of a peer that has waited for a second (see AskWhere()).
//
// Thread-safe. Owns the thread "ddp-failure", which waits in a clone of the store. On Redis, all
// clones of a store share one connection. On a TCPStore, the clone has a connection of its own.
// While an exception unwinds a thread, another thread does its writes (see DeferredWrites).
class ReportLog {
 public:
  // The object that gets the entries of the log. Thread: "ddp-failure". The methods may throw what
  // the store throws; the thread then reads the entry again. They must not destroy the log.
  class Reader {
   public:
    virtual ~Reader() = default;

    // A rank has reported `failure`.
    virtual void OnFailureRead(int64_t incarnation, const GroupFailure& failure) = 0;

    // A peer asks where this rank is in `incarnation`. Returns the answer, any text.
    virtual std::string OnAsked(int64_t incarnation) = 0;
  };

  // Starts the thread. In a group of several ranks, first writes this process's identity into the
  // store (see StandingKey). Throws what the store throws. `reader` must outlive the log.
  ReportLog(std::shared_ptr<GroupStore> store, std::shared_ptr<GroupStore> watched,
            const Membership& membership, Reader& reader);

  // Ends and joins the thread: at once while the store answers, otherwise within a minute. Delivers
  // the writes that are queued. Never throws.
  ~ReportLog();
  ReportLog(const ReportLog&) = delete;
  ReportLog& operator=(const ReportLog&) = delete;

  // Appends `message` and wakes all ranks. Returns nullopt when the message is published, or an
  // earlier message of another rank that makes it superfluous. Throws what the store throws.
  std::optional<LogEntry> Append(const LogEntry& message);

  // Runs the writes of this rank.
  DeferredWrites& writes() { return writes_; }

  // Tells the other ranks that this rank has left the group for good, after it has launched
  // `collectives` in `incarnation`: those that wait in a renewal, and those that read StandingKey()
  // later. Blocks until that is written, and all queued writes before it. A second call does
  // nothing. Never throws.
  void Leave(int64_t incarnation, int64_t collectives);

  // Asks all ranks where they are in `incarnation`. The thread of each living process sets
  // AnswerKey() to "<number> <answer>" within milliseconds, even while its trainer is busy. So the
  // answers tell the living from the dead as well. One rank asks for all, and tells the others what
  // it has found: returns the question's number, or nullopt when another rank has asked since
  // `since_ns` (monotonic clock). Throws what the store throws.
  std::optional<int64_t> AskWhere(int64_t incarnation, int64_t since_ns);
  static std::string AnswerKey(int rank);

  // Time within which a living process answers.
  static constexpr absl::Duration kAnswerTimeout = absl::Seconds(3);

  // The answers of the other ranks to one question, and the ranks that have not answered.
  struct Answers {
    std::map<int, std::string> by_rank;
    std::vector<int> silent;
  };
  // Reads the answers to question `number`, without waiting. Throws what the store throws.
  Answers ReadAnswers(int64_t number) const;

  // Returns the key of a rank's standing: "process <ProcessIdentity()>", or, after the rank has
  // left, "left <incarnation> <number of collectives>".
  static std::string StandingKey(int rank);

  // Name of the StoreMeeting in which the ranks build an incarnation, and the verdict that ends
  // this meeting when a rank is gone. ParseGoneVerdict() returns nullopt for other verdicts.
  static std::string RenewalName(int64_t incarnation);
  static std::string GoneVerdict(const GroupFailure& failure);
  static std::optional<GroupFailure> ParseGoneVerdict(const std::string& verdict);

  GroupStore& store() const { return *store_; }

 private:
  void WatchStore(GroupStore& store);
  bool AwaitRetry(absl::Duration interval);
  void ReadEntries(GroupStore& store, int64_t entry);
  void HandleMessage(GroupStore& store, const LogEntry& message);

  const std::shared_ptr<GroupStore> store_;
  Reader& reader_;
  const int rank_;
  const int size_;

  mutable Mutex mutex_;
  CondVar stopping_changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t next_entry_ ABSL_GUARDED_BY(mutex_) = 0;  // the first one that the thread has not read
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t last_question_ ABSL_GUARDED_BY(mutex_) = 0;  // highest number seen of any AskWhere()
  int64_t last_question_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_answered_ ABSL_GUARDED_BY(mutex_) = false;

  std::atomic<bool> store_lost_{false};  // Leave() has logged that the store does not answer
  DeferredWrites writes_;
  std::thread thread_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_REPORTS_REPORT_LOG_H_
