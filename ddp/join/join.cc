#include "ddp/join.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/common/logging.h"
#include "ddp/common/sharded_optimizer.h"
#include "ddp/join/join_core.h"
#include "ddp/join/optimizer_joinable.h"
#include "ddp/process_group.h"

namespace ddp {
namespace {

using internal::Communicator;
using internal::JoinAnnouncement;
using internal::JoinCore;
using internal::JoinVerdict;

std::vector<Joinable*> Addresses(const std::vector<JoinableRef>& joinables) {
  std::vector<Joinable*> addresses;
  for (const JoinableRef& joinable : joinables) addresses.push_back(joinable.get());
  return addresses;
}

}  // namespace

JoinableRef::JoinableRef(torch::optim::Optimizer* optimizer) {
  if (const auto* const sharded = dynamic_cast<const ShardedOptimizer*>(optimizer)) {
    joinable_ = std::shared_ptr<Joinable>(std::shared_ptr<void>(), sharded->joinable());
  } else {
    joinable_ = internal::MakeOptimizerJoinable(optimizer);
  }
}

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
  core_ = MakeCore();
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

std::unique_ptr<JoinCore> Join::MakeCore() const {
  JoinCore::Names names;
  names.joinable = [this](size_t joinable) { return joinables_[joinable]->join_name(); };
  names.event = [this](size_t joinable, int event) {
    return joinables_[joinable]->join_event_name(event);
  };
  const internal::JoinTerms terms{
      .divide_by_initial_world_size = options_.divide_by_initial_world_size,
      .throw_on_early_termination = options_.throw_on_early_termination,
      .joinables = static_cast<int>(joinables_.size())};
  return std::make_unique<JoinCore>(group_->rank(), group_->size(), terms, std::move(names));
}

static_assert(Join::kMaxEvents == JoinCore::kMaxEvents);

JoinRound Join::notify(const Joinable& joinable, int event) {
  CHECK(!ended_) << "notify() after the Join has ended";
  CheckIncarnation();
  const auto found = std::find(joinables_.begin(), joinables_.end(), &joinable);
  CHECK(found != joinables_.end()) << "notify() from a joinable that is not under this Join";
  CHECK(event >= 0 && event < kMaxEvents) << "event " << event << " is not below " << kMaxEvents;
  const JoinAnnouncement announcement{.joinable = static_cast<int>(found - joinables_.begin()),
                                      .event = event};
  CheckNoOtherEvent(announcement);
  return {.event = event, .active_ranks = Exchange(announcement).active_ranks};
}

// A joined rank repeats one event at a time, from its beginning to its end.
void Join::CheckNoOtherEvent(const JoinAnnouncement& announcement) {
  for (size_t i = 0; i < joinables_.size(); ++i) {
    if (static_cast<int>(i) == announcement.joinable || !joinables_[i]->in_join_event()) continue;
    const std::string message = core_->Overlap(announcement, i);
    abandon(message);
    throw ReductionError(message);
  }
}

// Exchanges every rank's word in one all-reduce: each rank adds its own word in an entry that is
// zero on all other ranks. All ranks read the same words, so an error of the verdict is thrown on
// all ranks, and the group stays usable.
JoinVerdict Join::Exchange(const std::optional<JoinAnnouncement>& announcement) {
  const at::Tensor tensor = at::zeros({group_->size()}, at::kLong);
  tensor.mutable_data_ptr<int64_t>()[group_->rank()] = core_->WordOf(announcement);
  const at::Tensor on_device = tensor.to(group_->device());
  Communicator::Pending pending =
      group_->communicator().AllReduce(on_device, {"the exchange of a Join"});
  group_->communicator().Wait(pending);
  const at::Tensor sum = group_->to_host(on_device);
  const int64_t* words = sum.const_data_ptr<int64_t>();
  JoinVerdict verdict = core_->Read({words, words + sum.numel()});
  if (verdict.message.empty()) return verdict;
  Leave(verdict.message);
  if (verdict.kind == JoinVerdict::Kind::kDifferentJoins) {
    throw ConfigurationError(verdict.message);
  }
  throw ReductionError(verdict.message);
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
      hook->post_hook(core_->last_joiner() == group_->rank(), core_->last_joiner());
    }
  } catch (const CommunicationError& error) {
    if (!ended_)
      Leave(internal::MessageOf(error));  // all ranks know, or find the failure themselves
    throw;
  } catch (const std::exception& error) {
    abandon(absl::StrCat("in the finish() of a Join: ", internal::MessageOf(error)));
    throw;
  } catch (...) {
    abandon("an exception of unknown type in the finish() of a Join");
    throw;
  }
  Leave();
}

void Join::Shadow() {
  while (true) {
    const JoinVerdict verdict = Exchange(std::nullopt);
    if (verdict.kind == JoinVerdict::Kind::kAllJoined) return;
    if (const auto warning = core_->Warning()) LOG(WARNING) << *warning;
    hooks_[verdict.announcement.joinable]->main_hook(
        {.event = verdict.announcement.event, .active_ranks = verdict.active_ranks});
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
    guard.abandon(absl::StrCat("in the loop under a Join: ", internal::MessageOf(error)));
    throw;
  }
  guard.finish();
}

}  // namespace ddp
