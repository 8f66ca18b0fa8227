#include "ddp/join.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/optimizer_joinable.h"
#include "ddp/process_group.h"

namespace ddp {
namespace {

using internal::Communicator;

// The code of a rank that has joined; all other codes are larger.
constexpr int64_t kJoined = 0;

// A rank sends one integer. The low bits are its code. The high bits are its terms: the options and
// the number of joinables, on which all ranks must agree.
constexpr int kCodeBits = 32;
constexpr int64_t kCodeMask = (int64_t{1} << kCodeBits) - 1;
constexpr int64_t kDivideByInitialWorldSize = 1;
constexpr int64_t kThrowOnEarlyTermination = 2;
constexpr int64_t kOneJoinable = 4;

std::string DescribeTerms(int64_t terms) {
  const auto text = [terms](int64_t bit) { return (terms & bit) != 0 ? "true" : "false"; };
  return absl::StrCat("divide_by_initial_world_size=", text(kDivideByInitialWorldSize),
                      ", throw_on_early_termination=", text(kThrowOnEarlyTermination), " and ",
                      terms / kOneJoinable, " joinables");
}

// The number of rounds after which uneven inputs are probably a mistake.
constexpr int64_t kRoundsBeforeWarning = 1000;

std::string Ranks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

std::string TextOf(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return internal::WithoutStackTrace(torch_error != nullptr ? torch_error->what_without_backtrace()
                                                            : error.what());
}

std::vector<Joinable*> Addresses(const std::vector<JoinableRef>& joinables) {
  std::vector<Joinable*> addresses;
  for (const JoinableRef& joinable : joinables) addresses.push_back(joinable.get());
  return addresses;
}

}  // namespace

JoinableRef::JoinableRef(torch::optim::Optimizer* optimizer)
    : joinable_(internal::MakeOptimizerJoinable(optimizer)) {}

Join::Join(const std::vector<JoinableRef>& joinables, const JoinOptions& options)
    : references_(joinables),
      joinables_(Addresses(joinables)),
      options_(options),
      exceptions_at_start_(std::uncaught_exceptions()) {
  if (joinables_.empty()) throw ConfigurationError("a Join needs at least one joinable");
  for (Joinable* const joinable : joinables_) {
    if (!group_) group_ = joinable->join_process_group();
  }
  if (!group_) {
    throw ConfigurationError(
        "no joinable of a Join has a process group: add the DistributedDataParallel to it");
  }
  for (size_t i = 0; i < joinables_.size(); ++i) {
    Joinable* const joinable = joinables_[i];
    const std::shared_ptr<ProcessGroup> group = joinable->join_process_group();
    if (group && group != group_) {
      throw ConfigurationError(absl::StrCat("rank ", group_->rank(), ": joinable ", i,
                                            " of a Join has another process group than joinable "
                                            "0; all must have the same"));
    }
    if (joinable->in_join_ ||
        std::find(joinables_.begin(), joinables_.begin() + i, joinable) != joinables_.begin() + i) {
      throw ConfigurationError(absl::StrCat("rank ", group_->rank(), ": joinable ", i,
                                            " is under a Join already; finish() that one first"));
    }
  }
  if (!options_.enable) {
    ended_ = true;
    return;
  }
  group_->ensure_usable();
  incarnation_ = group_->incarnation();
  for (Joinable* const joinable : joinables_) hooks_.push_back(joinable->join_hook(options_));
  for (Joinable* const joinable : joinables_) {
    joinable->in_join_ = true;
    joinable->enter_join(this);
  }
}

Join::~Join() {
  if (ended_) return;
  if (std::uncaught_exceptions() > exceptions_at_start_) {
    abandon(absl::StrCat("an exception ended the loop under a Join on rank ", group_->rank(),
                         "; its own output says which"));
    return;
  }
  const std::string reason =
      absl::StrCat("rank ", group_->rank(), " left the scope of a Join without finish()");
  LOG(ERROR) << reason << ": call it after the loop";
  Leave(reason);
  group_->report_failure_and_throw_later(reason);
}

void Join::abandon(const std::string& reason) {
  if (ended_) return;
  Leave(reason);
  group_->report_failure(reason);
}

// After a failure, some ranks have left the Join and some have not. The Join then ends for all.
void Join::CheckIncarnation() {
  if (group_->incarnation() == incarnation_) return;
  Leave("a rank failed");
  throw ReductionError(
      absl::StrCat("rank ", group_->rank(), ": a failure has ended this Join: begin a new one"));
}

void Join::Leave(const std::string& failure) {
  ended_ = true;
  failure_ = failure;
  for (Joinable* const joinable : joinables_) {
    joinable->in_join_ = false;
    joinable->leave_join();
  }
}

int64_t Join::CodeOf(const Joinable& joinable, int event) const {
  const auto found = std::find(joinables_.begin(), joinables_.end(), &joinable);
  CHECK(found != joinables_.end()) << "notify() from a joinable that is not under this Join";
  CHECK(event >= 0 && event < kMaxEvents) << "event " << event << " is not below " << kMaxEvents;
  return kJoined + 1 + (found - joinables_.begin()) * kMaxEvents + event;
}

JoinRound Join::notify(const Joinable& joinable, int event) {
  CHECK(!ended_) << "notify() after the Join has ended";
  CheckIncarnation();
  CheckNoOtherEvent(joinable, event);
  const JoinRound round = Exchange(CodeOf(joinable, event)).round;
  if (options_.throw_on_early_termination && round.num_active() < group_->size()) {
    ThrowEarlyTermination(round);
  }
  return round;
}

int64_t Join::Terms() const {
  return (options_.divide_by_initial_world_size ? kDivideByInitialWorldSize : 0) +
         (options_.throw_on_early_termination ? kThrowOnEarlyTermination : 0) +
         static_cast<int64_t>(joinables_.size()) * kOneJoinable;
}

// All ranks throw.
void Join::ThrowDifferentTerms(const std::vector<int64_t>& codes) {
  std::map<int64_t, std::vector<int>> ranks_by_terms;
  for (size_t rank = 0; rank < codes.size(); ++rank) {
    ranks_by_terms[codes[rank] >> kCodeBits].push_back(static_cast<int>(rank));
  }
  std::vector<std::string> parts;
  for (const auto& [terms, ranks] : ranks_by_terms) {
    parts.push_back(
        absl::StrCat(Ranks(ranks), ranks.size() == 1 ? " has " : " have ", DescribeTerms(terms)));
  }
  const std::string message =
      absl::StrCat("the ranks have different Joins: ", absl::StrJoin(parts, "; "),
                   ". Give all ranks the same JoinOptions and joinables");
  Leave(message);
  throw ConfigurationError(message);
}

// A joined rank repeats one event at a time, from its beginning to its end.
void Join::CheckNoOtherEvent(const Joinable& joinable, int event) {
  for (size_t i = 0; i < joinables_.size(); ++i) {
    if (joinables_[i] == &joinable || !joinables_[i]->in_join_event()) continue;
    const std::string message = absl::StrCat(
        "rank ", group_->rank(), ": under a Join, ", Describe(CodeOf(joinable, event)),
        " began before the collectives of ", NameOf(i),
        " were complete: one backward goes through both, or a backward of ", NameOf(i),
        " left out gradients. Ranks without inputs take part in one reduction at a time: call "
        "backward once for each model, or make both submodules of one module with one "
        "DistributedDataParallel");
    abandon(message);
    throw ReductionError(message);
  }
}

// Exchanges every rank's code in one all-reduce: each rank adds its own code in an entry that is
// zero on all other ranks.
Join::Announcement Join::Exchange(int64_t code) {
  const at::Tensor tensor = at::zeros({group_->size()}, at::kLong);
  tensor.mutable_data_ptr<int64_t>()[group_->rank()] = (Terms() << kCodeBits) + code;
  const at::Tensor on_device = tensor.to(group_->device());
  Communicator::Pending pending =
      group_->communicator().AllReduce(on_device, {"the exchange of a Join"});
  group_->communicator().Wait(pending);
  const at::Tensor sum = on_device.to(at::kCPU);
  std::vector<int64_t> codes(sum.const_data_ptr<int64_t>(),
                             sum.const_data_ptr<int64_t>() + sum.numel());
  for (const int64_t sent : codes) {
    if (sent >> kCodeBits != Terms()) ThrowDifferentTerms(codes);
  }
  for (int64_t& sent : codes) sent &= kCodeMask;
  Announcement announcement;
  int64_t agreed = kJoined;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (codes[rank] == kJoined) continue;
    announcement.round.active_ranks.push_back(rank);
    if (agreed == kJoined) agreed = codes[rank];
    if (codes[rank] != agreed) {
      const std::string message = Disagreement(codes);
      Leave(message);  // all ranks throw
      throw ReductionError(message);
    }
  }
  if (agreed == kJoined) return announcement;
  announcement.joinable = static_cast<int>((agreed - 1) / kMaxEvents);
  announcement.round.event = static_cast<int>((agreed - 1) % kMaxEvents);
  last_joiner_ = announcement.round.active_ranks.back();
  return announcement;
}

std::string Join::NameOf(size_t joinable) const {
  const std::string name =
      joinable < joinables_.size() ? joinables_[joinable]->join_name() : std::string();
  return absl::StrCat("joinable ", joinable, name.empty() ? "" : absl::StrCat(" (", name, ")"));
}

std::string Join::Describe(int64_t code) const {
  const auto joinable = static_cast<size_t>((code - 1) / kMaxEvents);
  const int event = static_cast<int>((code - 1) % kMaxEvents);
  return absl::StrCat(joinable < joinables_.size() ? joinables_[joinable]->join_event_name(event)
                                                   : absl::StrCat("event ", event),
                      " of ", NameOf(joinable));
}

std::string Join::Disagreement(const std::vector<int64_t>& codes) const {
  std::map<int64_t, std::vector<int>> ranks_by_code;
  for (size_t rank = 0; rank < codes.size(); ++rank) {
    if (codes[rank] != kJoined) ranks_by_code[codes[rank]].push_back(static_cast<int>(rank));
  }
  std::vector<std::string> parts;
  for (const auto& [code, ranks] : ranks_by_code) {
    parts.push_back(absl::StrCat(Ranks(ranks), " came to ", Describe(code)));
  }
  return absl::StrCat("under a Join the ranks with inputs must do the same, but ",
                      absl::StrJoin(parts, ", "));
}

// All ranks throw, so the group stays usable.
void Join::ThrowEarlyTermination(const JoinRound& round) {
  std::vector<int> exhausted;
  for (int rank = 0, next = 0; rank < group_->size(); ++rank) {
    if (next < round.num_active() && round.active_ranks[next] == rank) {
      ++next;
    } else {
      exhausted.push_back(rank);
    }
  }
  const std::string message = absl::StrCat(
      "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
      "Without inputs: ",
      Ranks(exhausted), ".");
  Leave(message);
  throw ReductionError(message);
}

void Join::finish() {
  if (!failure_.empty()) {
    throw ReductionError(
        absl::StrCat("rank ", group_->rank(),
                     ": finish() of a Join that an exception has ended, so the models "
                     "were not made equal: begin a new Join. The reason was: ",
                     failure_));
  }
  if (ended_) return;
  try {
    group_->ensure_usable();
    CheckIncarnation();
    for (const auto& hook : hooks_) hook->on_join();
    Shadow();
    for (const auto& hook : hooks_) {
      hook->post_hook(last_joiner_ == group_->rank(), last_joiner_);
    }
  } catch (const CommunicationError& error) {
    if (!ended_) Leave(TextOf(error));  // all ranks know, or find the failure themselves
    throw;
  } catch (const std::exception& error) {
    abandon(absl::StrCat("in the finish() of a Join: ", TextOf(error)));
    throw;
  } catch (...) {
    abandon("an exception of unknown type in the finish() of a Join");
    throw;
  }
  Leave();
}

void Join::Shadow() {
  for (int64_t rounds = 1;; ++rounds) {
    const Announcement announcement = Exchange(kJoined);
    if (announcement.round.active_ranks.empty()) return;
    if (options_.throw_on_early_termination) {
      const std::string message = absl::StrCat("Rank ", group_->rank(), " exhausted all inputs.");
      Leave(message);
      throw ReductionError(message);
    }
    if (rounds == kRoundsBeforeWarning) {
      LOG(WARNING) << "rank " << group_->rank() << " has no inputs left and has taken part in "
                   << rounds << " rounds of " << Ranks(announcement.round.active_ranks)
                   << ": the inputs are very uneven, which costs time";
    }
    hooks_[announcement.joinable]->main_hook(announcement.round);
  }
}

void join(const std::vector<JoinableRef>& joinables, const JoinOptions& options,
          const std::function<void()>& loop) {
  Join guard(joinables, options);
  try {
    loop();
  } catch (const CommunicationError&) {
    throw;  // the destructor of guard does the rest
  } catch (const std::exception& error) {
    guard.abandon(absl::StrCat("in the loop under a Join: ", TextOf(error)));
    throw;
  }
  guard.finish();
}

}  // namespace ddp
