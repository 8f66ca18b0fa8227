#include "ddp/comm/check/inquiry.h"

#include <exception>
#include <utility>

#include <glog/logging.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/clock.h"
#include "base/process/process_identity.h"
#include "base/text_fields.h"
#include "ddp/comm/check/mismatch.h"
#include "ddp/comm/meeting/group_store.h"
#include "ddp/comm/reports/report_log.h"
#include "ddp/common/name_list.h"

namespace ddp::internal {
namespace {

using Failure = GroupFailure;

// Interval at which a rank whose connection broke looks for the cause.
constexpr absl::Duration kLookInterval = absl::Milliseconds(50);

// Time that a rank waits for a failure report before it asks its peers.
constexpr absl::Duration kQuietTime = absl::Milliseconds(150);

// Waits before each reading of the answers.
constexpr absl::Duration kAnswerLooks[] = {absl::Milliseconds(50), absl::Milliseconds(200),
                                           absl::Milliseconds(750)};

// Time for the last message of a peer that has left.
constexpr absl::Duration kMessagePatience = absl::Seconds(1);

// Time within which a living peer reports its failure.
constexpr absl::Duration kReportTimeout = absl::Seconds(1);

std::string Where(const Inquiry::Awaited& awaited, int rank) {
  if (awaited.sequence < 0) return absl::StrCat("rank ", rank, " was in ", awaited.what);
  return absl::StrCat("rank ", rank, " was in collective ", awaited.sequence, ", ", awaited.what);
}

}  // namespace

Inquiry::Inquiry(std::shared_ptr<FailureMonitor> monitor, std::shared_ptr<const CollectiveLog> log,
                 const Membership& membership)
    : monitor_(std::move(monitor)), log_(std::move(log)), self_(membership) {}

bool Inquiry::Ask(int64_t since_ns) {
  positions_.clear();
  silent_.clear();
  question_ = monitor_->log().AskWhere(self_.incarnation, since_ns);
  asked_ns_ = MonotonicNanoseconds();
  return question_.has_value();
}

bool Inquiry::ReadAnswers() {
  if (!question_.has_value()) return false;
  ReportLog::Answers answers = monitor_->log().ReadAnswers(*question_);
  silent_ = std::move(answers.silent);
  positions_.clear();
  for (const auto& [rank, answer] : answers.by_rank) {
    // An empty answer comes from a rank without collectives.
    auto position = answer.empty() ? RankPosition() : RankPosition::Parse(answer);
    if (position.has_value()) positions_[rank] = *std::move(position);
  }
  positions_[self_.rank] = log_->Position();
  return silent().empty();
}

std::optional<Failure> Inquiry::Judge(const Awaited& awaited) {
  const std::string mismatch = DescribeMismatch(positions_, self_.rank, awaited.sequence);
  if (!mismatch.empty()) return Failure{.rank = -1, .reason = mismatch};
  if (silent().empty()) return std::nullopt;
  if (awaited.peer >= 0) return FindGone(awaited, awaited.peer, awaited.peer + 1, true);
  return FindGone(awaited, 0, self_.size, awaited.needs_all_ranks);
}

std::optional<Failure> Inquiry::FindGone(const Awaited& awaited, int begin, int end,
                                         bool ended_counts) {
  std::vector<std::string> keys;
  for (int rank = begin; rank < end; ++rank) keys.push_back(ReportLog::StandingKey(rank));
  if (keys.empty()) return std::nullopt;
  const std::vector<std::optional<std::string>> standings =
      monitor_->log().store().GetPresent(keys);
  std::vector<int> ended;
  std::optional<Failure> left;
  for (int rank = begin; rank < end; ++rank) {
    if (rank == self_.rank) continue;
    const std::string text = standings[rank - begin].value_or("");
    if (!left.has_value()) left = FindLeft(awaited, rank, text);
    const bool on_this_host = self_.IsOnThisHost(rank);
    if (!ended_counts || !on_this_host) continue;
    if (ProcessHasEnded(std::string(absl::StripPrefix(text, "process ")))) ended.push_back(rank);
  }
  if (ended.empty()) return left;
  return DescribeEnded(awaited, ended);
}

Failure Inquiry::DescribeEnded(const Awaited& awaited, const std::vector<int>& ranks) const {
  return {
      .rank = ranks.front(),
      .reason = absl::StrCat("the process of ", RankList(ranks),
                             " has ended (killed, crashed, or finished early: its own output or "
                             "its launcher says which), while ",
                             Where(awaited, self_.rank))};
}

// Returns the failure of a rank whose standing says that it has left without launching `awaited`.
std::optional<Failure> Inquiry::FindLeft(const Awaited& awaited, int rank,
                                         const std::string& standing) const {
  std::string word;
  int64_t incarnation = 0;
  int64_t launched = 0;
  if (!ReadFields(standing, ' ', word, incarnation, launched) || word != "left" ||
      (awaited.peer < 0 && incarnation == self_.incarnation && launched > awaited.sequence)) {
    return std::nullopt;
  }
  return Failure{
      .rank = rank,
      .reason = absl::StrCat(
          "it has left the process group (its program ended, or destroyed the group) "
          "after ",
          launched, " collectives, while ", Where(awaited, self_.rank),
          awaited.peer >= 0 ? ". Each receive needs a send of its peer"
                            : ". If the ranks ran different numbers of batches, use ddp::Join, or "
                              "give every rank the same number")};
}

bool Inquiry::Search(int64_t since_ns, const Wait& wait, const StillAwaited& awaited) {
  if (!Ask(since_ns)) return false;
  for (const absl::Duration look : kAnswerLooks) {
    if (wait(look)) return true;
    const bool all = ReadAnswers();
    std::optional<Awaited> operation = awaited();
    if (!operation.has_value()) return true;
    const std::optional<Failure> failure = Judge(*operation);
    // A peer may send a message and leave; the message may still arrive.
    const bool may_come = failure.has_value() && operation->peer >= 0;
    if (may_come && (wait(kMessagePatience) || !awaited().has_value())) return true;
    if (failure.has_value()) monitor_->ReportFound(*failure);
    if (all || failure.has_value()) return true;
  }
  return true;
}

std::string Inquiry::DescribeLateNow(const Awaited& awaited) {
  try {
    if (!Ask(MonotonicNanoseconds())) return std::string();
    for (const absl::Duration look : kAnswerLooks) {
      if (monitor_->AwaitFailure(look).has_value() || ReadAnswers()) break;
    }
    return DescribeLate(awaited);
  } catch (const std::exception&) {
    return std::string();  // the timeout itself is the error
  }
}

std::string Inquiry::DescribeLate(const Awaited& awaited) const {
  std::vector<std::string> parts;
  for (const auto& [rank, position] : positions_) {
    const bool came =
        awaited.peer >= 0 ? rank != awaited.peer : position.launched > awaited.sequence;
    if (came) continue;
    parts.push_back(absl::StrCat(
        "rank ", rank, " is alive and has launched ", position.launched, " collectives",
        position.newest.empty()
            ? ""
            : absl::StrCat(", the last of them ", position.newest.back().Describe())));
  }
  if (!silent().empty()) parts.push_back(absl::StrCat("no answer from ", RankList(silent())));
  if (parts.empty()) return std::string();
  if (awaited.sequence < 0) return absl::StrCat("; ", absl::StrJoin(parts, "; "));
  return absl::StrCat(". This is collective ", awaited.sequence, "; ", absl::StrJoin(parts, "; "));
}

// Looks for the cause once. Returns nullopt when none is known yet.
std::optional<Failure> Inquiry::FindCause(const Awaited& awaited, absl::Duration waited,
                                          int64_t start_ns) {
  std::optional<Failure> gone =
      FindGone(awaited, self_.local_begin, self_.local_end, /*ended_counts=*/true);
  if (gone.has_value() || waited < kQuietTime) return gone;
  if (!question_.has_value()) Ask(start_ns);
  // A single rank asks for all. This rank asks as well when that rank died before it could report.
  if (!question_.has_value() && waited > ReportLog::kAnswerTimeout + kReportTimeout) {
    Ask(MonotonicNanoseconds());
  }
  if (!question_.has_value()) return std::nullopt;
  const bool all_answered = ReadAnswers();
  gone = FindGone(awaited, 0, self_.size, /*ended_counts=*/true);
  if (gone.has_value() || all_answered) return gone;
  const auto age = absl::Nanoseconds(MonotonicNanoseconds() - asked_ns_);
  if (age < ReportLog::kAnswerTimeout) return std::nullopt;
  return Failure{.rank = silent().front(),
                 .reason = absl::StrCat(
                     "no sign of life from ", RankList(silent()), " for ",
                     absl::FormatDuration(ReportLog::kAnswerTimeout),
                     " after a connection broke: the process has died, or the host is out of "
                     "reach; ",
                     Where(awaited, self_.rank))};
}

std::optional<Failure> Inquiry::Explain(const Awaited& awaited, const std::string& error) {
  const MonotonicClock clock;
  const absl::Time start = clock.Now();
  const int64_t start_ns = MonotonicNanoseconds();
  question_.reset();
  while (true) {
    const absl::Duration waited = clock.Now() - start;
    try {
      if (monitor_->failed()) return std::nullopt;
      if (auto cause = FindCause(awaited, waited, start_ns); cause.has_value()) return cause;
    } catch (const std::exception& store_error) {
      if (monitor_->AwaitFailure(kLookInterval).has_value()) return std::nullopt;
      if (self_.store_is_rank_0 && self_.rank != 0) {
        return Failure{.rank = 0,
                       .reason = absl::StrCat(
                           "its connections and the store, which it serves, are gone: the process "
                           "has died, or the host is out of reach; ",
                           Where(awaited, self_.rank))};
      }
      LOG(WARNING) << "rank " << self_.rank
                   << ": a connection broke, and the store does not say which rank is gone: "
                   << store_error.what();
      if (monitor_->AwaitFailure(kReportTimeout).has_value()) return std::nullopt;
      return Failure{.rank = self_.rank, .reason = error};
    }
    // When every process is alive, either a failure report is on its way or the network failed.
    const bool all_alive = question_.has_value() && silent().empty() && !positions_.empty();
    const absl::Duration limit =
        all_alive ? kQuietTime + kReportTimeout : 2 * (ReportLog::kAnswerTimeout + kReportTimeout);
    if (waited >= limit) break;
    if (monitor_->AwaitFailure(kLookInterval).has_value()) return std::nullopt;
  }
  return Failure{
      .rank = self_.rank,
      .reason = absl::StrCat(error, ". The processes of all ranks are alive: the network failed")};
}

}  // namespace ddp::internal
