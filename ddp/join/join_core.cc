#include "ddp/join/join_core.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace ddp::internal {
namespace {

// A word: the low bits are 0 for a rank that has joined, else 1 + the number of the announcement.
// The high bits are the terms.
constexpr int kCodeBits = 32;
constexpr int64_t kCodeMask = (int64_t{1} << kCodeBits) - 1;
constexpr int64_t kJoined = 0;
constexpr int64_t kDivideByInitialWorldSize = 1;
constexpr int64_t kThrowOnEarlyTermination = 2;
constexpr int64_t kOneJoinable = 4;

int64_t Encode(const JoinTerms& terms) {
  return (terms.divide_by_initial_world_size ? kDivideByInitialWorldSize : 0) +
         (terms.throw_on_early_termination ? kThrowOnEarlyTermination : 0) +
         int64_t{terms.joinables} * kOneJoinable;
}

JoinTerms DecodeTerms(int64_t word) {
  const int64_t terms = word >> kCodeBits;
  return {.divide_by_initial_world_size = (terms & kDivideByInitialWorldSize) != 0,
          .throw_on_early_termination = (terms & kThrowOnEarlyTermination) != 0,
          .joinables = static_cast<int>(terms / kOneJoinable)};
}

int64_t CodeOf(int64_t word) { return word & kCodeMask; }

JoinAnnouncement DecodeAnnouncement(int64_t code) {
  return {.joinable = static_cast<int>((code - 1) / JoinCore::kMaxEvents),
          .event = static_cast<int>((code - 1) % JoinCore::kMaxEvents)};
}

std::string ToString(const JoinTerms& terms) {
  const auto text = [](bool value) { return value ? "true" : "false"; };
  return absl::StrCat("divide_by_initial_world_size=", text(terms.divide_by_initial_world_size),
                      ", throw_on_early_termination=", text(terms.throw_on_early_termination),
                      " and ", terms.joinables, " joinables");
}

std::string Ranks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

}  // namespace

JoinCore::JoinCore(int rank, int size, JoinTerms terms, Names names)
    : rank_(rank), size_(size), terms_(terms), names_(std::move(names)) {}

int64_t JoinCore::WordOf(const std::optional<JoinAnnouncement>& announcement) const {
  int64_t code = kJoined;
  if (announcement.has_value()) {
    code = kJoined + 1 + int64_t{announcement->joinable} * kMaxEvents + announcement->event;
  }
  return (Encode(terms_) << kCodeBits) + code;
}

JoinVerdict JoinCore::Read(const std::vector<int64_t>& words) {
  JoinVerdict verdict;
  if (std::any_of(words.begin(), words.end(),
                  [this](int64_t word) { return DecodeTerms(word) != terms_; })) {
    verdict.kind = JoinVerdict::Kind::kDifferentJoins;
    verdict.message = DifferentJoins(words);
    return verdict;
  }
  int64_t agreed = kJoined;
  bool equal = true;
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t code = CodeOf(words[rank]);
    if (code == kJoined) continue;
    verdict.active_ranks.push_back(rank);
    if (agreed == kJoined) agreed = code;
    equal = equal && code == agreed;
  }
  if (!equal) {
    verdict.kind = JoinVerdict::Kind::kDifferentEvents;
    verdict.message = DifferentEvents(words);
    return verdict;
  }
  if (agreed == kJoined) {
    verdict.kind = JoinVerdict::Kind::kAllJoined;
    return verdict;
  }
  verdict.announcement = DecodeAnnouncement(agreed);
  last_joiner_ = verdict.active_ranks.back();
  last_active_ = verdict.active_ranks;
  const bool joined = CodeOf(words[rank_]) == kJoined;
  if (terms_.throw_on_early_termination && static_cast<int>(verdict.active_ranks.size()) < size_) {
    verdict.kind = JoinVerdict::Kind::kEarlyTermination;
    verdict.message = EarlyTermination(verdict.active_ranks, joined);
    return verdict;
  }
  if (joined) ++rounds_as_joined_;
  return verdict;
}

std::optional<std::string> JoinCore::Warning() const {
  if (rounds_as_joined_ != kRoundsBeforeWarning) return std::nullopt;
  return absl::StrCat("rank ", rank_, " has no inputs left and has taken part in ",
                      rounds_as_joined_, " rounds of ", Ranks(last_active_),
                      ": the inputs are very uneven, which costs time");
}

std::string JoinCore::Overlap(const JoinAnnouncement& announcement, size_t busy) const {
  return absl::StrCat(
      "rank ", rank_, ": under a Join, ", Describe(announcement),
      " began before the collectives of ", NameOf(busy),
      " were complete: one backward goes through both, or a backward of ", NameOf(busy),
      " left out gradients. Ranks without inputs take part in one reduction at a time: call "
      "backward once for each model, or make both submodules of one module with one "
      "DistributedDataParallel");
}

std::string JoinCore::NameOf(size_t joinable) const {
  const bool known = joinable < static_cast<size_t>(terms_.joinables);
  const std::string name = known ? names_.joinable(joinable) : "";
  return absl::StrCat("joinable ", joinable, name.empty() ? "" : absl::StrCat(" (", name, ")"));
}

std::string JoinCore::Describe(const JoinAnnouncement& announcement) const {
  const auto joinable = static_cast<size_t>(announcement.joinable);
  const bool known = announcement.joinable < terms_.joinables;
  return absl::StrCat(known ? names_.event(joinable, announcement.event)
                            : absl::StrCat("event ", announcement.event),
                      " of ", NameOf(joinable));
}

std::string JoinCore::DifferentJoins(const std::vector<int64_t>& words) const {
  std::map<int64_t, std::vector<int>> ranks_by_terms;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    ranks_by_terms[Encode(DecodeTerms(words[rank]))].push_back(static_cast<int>(rank));
  }
  std::vector<std::string> parts;
  for (const auto& [terms, ranks] : ranks_by_terms) {
    parts.push_back(absl::StrCat(Ranks(ranks), ranks.size() == 1 ? " has " : " have ",
                                 ToString(DecodeTerms(terms << kCodeBits))));
  }
  return absl::StrCat("the ranks have different Joins: ", absl::StrJoin(parts, "; "),
                      ". Give all ranks the same JoinOptions and joinables");
}

std::string JoinCore::DifferentEvents(const std::vector<int64_t>& words) const {
  std::map<int64_t, std::vector<int>> ranks_by_code;
  for (size_t rank = 0; rank < words.size(); ++rank) {
    const int64_t code = CodeOf(words[rank]);
    if (code != kJoined) ranks_by_code[code].push_back(static_cast<int>(rank));
  }
  std::vector<std::string> parts;
  for (const auto& [code, ranks] : ranks_by_code) {
    parts.push_back(absl::StrCat(Ranks(ranks), " came to ", Describe(DecodeAnnouncement(code))));
  }
  return absl::StrCat("under a Join the ranks with inputs must do the same, but ",
                      absl::StrJoin(parts, ", "));
}

std::string JoinCore::EarlyTermination(const std::vector<int>& active_ranks, bool joined) const {
  if (joined) return absl::StrCat("Rank ", rank_, " exhausted all inputs.");
  std::vector<int> exhausted;
  for (int rank = 0; rank < size_; ++rank) {
    if (!std::binary_search(active_ranks.begin(), active_ranks.end(), rank)) {
      exhausted.push_back(rank);
    }
  }
  return absl::StrCat(
      "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
      "Without inputs: ",
      Ranks(exhausted), ".");
}

}  // namespace ddp::internal
