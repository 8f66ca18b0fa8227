// Length: one state machine. Every event may end the pass, so a part would need most of the fields.

#include "ddp/reducer/pass/pass_core.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ddp/common/name_list.h"

namespace ddp::internal {
namespace {

using Kind = PassAction::Kind;
using Part = PassAction::Part;
using Origin = ForwardHistory::Origin;

}  // namespace

PassCore::PassCore(std::vector<std::string> parameter_names, Options options)
    : names_(std::move(parameter_names)),
      options_(options),
      bucket_of_(names_.size(), 0),
      forwards_(options.find_unused_parameters && !options.static_graph),
      ready_pass_(names_.size(), 0),
      used_(names_.size(), 0),
      used_map_(names_.size(), 0),
      untouched_(names_.size(), 0),
      counts_(names_.size(), 0),
      remaining_(names_.size(), 0),
      last_seen_(names_.size(), 0) {
  order_.reserve(names_.size());
}

// ---- Between passes.

void PassCore::Reset(int rank, bool unsettled) {
  rank_ = rank;
  unsettled_ = unsettled;
  state_ = State::kIdle;
  rebuild_requested_ = false;
  first_pass_begun_ = false;
  counted_ = false;
  untouched_known_ = false;
  map_in_flight_ = false;
  agreeing_on_unused_ = false;
  finalized_within_ = false;
  forwards_.Clear();
  searched_forward_.reset();
  std::fill(used_.begin(), used_.end(), 0);
  std::fill(untouched_.begin(), untouched_.end(), 0);
  Abandon();
}

void PassCore::SetPlan(const BucketPlan& plan, PlanState state) {
  if (state == PlanState::kRebuilt) rebuild_requested_ = false;
  if (state != PlanState::kRebuilt || plan_state_ == PlanState::kFirst) plan_state_ = state;
  members_.clear();
  for (const BucketPlan::Bucket& bucket : plan.buckets()) {
    for (const int parameter : bucket.parameters) {
      bucket_of_[parameter] = static_cast<int>(members_.size());
    }
    members_.push_back(bucket.parameters);
  }
  missing_.assign(members_.size(), 0);
  dropped_.assign(members_.size(), 0);
  Reserve();
}

void PassCore::SetRounds(int rounds) {
  rounds_ = rounds;
  Reserve();
}

// The most that one event can bring: a whole pass, with a few actions around it.
void PassCore::Reserve() {
  actions_.reserve(2 * names_.size() + (4 + rounds_) * members_.size() + 16);
}

void PassCore::SetManual(bool manual) {
  if (!in_pass()) {
    manual_ = manual;
    return;
  }
  ThrowOnly(absl::StrCat("rank ", rank_,
                         ": require_manual_backward_finalization cannot change between the first "
                         "gradient of a backward and the end of its reduction"));
}

void PassCore::RequestRebuild() {
  rebuild_requested_ = true;
  ForgetCounts();
}

// ---- Actions.

std::optional<PassAction> PassCore::Next() {
  if (next_action_ == actions_.size()) {
    Abandon();
    return std::nullopt;
  }
  return actions_[next_action_++];
}

void PassCore::Abandon() {
  actions_.clear();
  next_action_ = 0;
}

void PassCore::Break(std::string error) {
  state_ = State::kBroken;
  error_ = std::move(error);
  Abandon();
}

void PassCore::Fail(std::string error) {
  // The actions before it are still done.
  message_ = error;
  state_ = State::kBroken;
  error_ = std::move(error);
  Add(Kind::kReportAndThrow);
}

void PassCore::ThrowOnly(std::string message) {
  message_ = std::move(message);
  Add(Kind::kThrow);
}

// ---- Forwards.

void PassCore::OnForwardEnd(const ForwardPtr& forward, bool seen) {
  part_ = Part::kBegin;
  forwards_.Add(forward, seen);
  if (!forward->synchronized || !finds_unused()) return;
  if (forwards_.HasOutstanding()) return forwards_.Keep(forward);
  searched_forward_ = forward;
  Add(Kind::kSearchForward);
}

void PassCore::OnForwardSearched(bool reaches_a_parameter) {
  const ForwardPtr forward = std::exchange(searched_forward_, nullptr);
  if (reaches_a_parameter) return forwards_.Keep(forward);
  // No gradient will ever come from this forward, and the other ranks would wait for it.
  forwards_.AddWithoutBackward(forward);
  BeginPass(AllParameters(), Then::kNoGradients);
}

// ---- Gradients. In the state reducing this is the hot path: array accesses only.

void PassCore::OnGradient(int parameter, bool defined, const BackwardView& backward) {
  part_ = Part::kGradient;
  cause_ = parameter;
  if (state_ == State::kReducing) return EnterGradient(parameter, defined);
  if (state_ == State::kGathering) return GatherGradient(parameter, defined);
  if (state_ == State::kHeld) return FailSecondGradient(parameter);
  if (!asks_backward()) return CountGradient(parameter, defined);
  const Origin origin = forwards_.FindOrigin(backward);
  if (origin == Origin::kReduced) {
    return ThrowOnly(absl::StrCat(
        "rank ", rank_, ": a second gradient for parameter ", names_[parameter],
        " after its gradient of this forward was reduced. A synchronized forward allows one "
        "backward: add the losses up and call backward once, or run every further backward after "
        "a forward of its own, or under no_sync()"));
  }
  if (origin != Origin::kReduce) {
    if (origin == Origin::kBare) Add(Kind::kBareBackward, parameter);
    // The gradient in the bucket is an earlier one; the average would overwrite this one.
    if (between_backwards() && ready_pass_[parameter] == pass_) {
      return FailSecondGradient(parameter);
    }
    used_[parameter] |= static_cast<uint8_t>(defined);
    return;
  }
  if (!backward.watched) {
    Add(Kind::kCallAtEnd);
    forwards_.AddToPass(forwards_.awaiting());
  }
  if (state_ == State::kOpen) {
    state_ = State::kReducing;
    return EnterGradient(parameter, defined);
  }
  if (state_ == State::kGathered || begins_at_end()) {
    if (state_ == State::kIdle) StartGathering(backward.unreached);
    state_ = State::kGathering;
    return GatherGradient(parameter, defined);
  }
  first_parameter_ = parameter;
  first_defined_ = defined;
  BeginPass(backward.unreached, Then::kGradient);
}

void PassCore::EnterGradient(int parameter, bool defined) {
  if (ready_pass_[parameter] == pass_) return FailSecondGradient(parameter);
  used_[parameter] |= static_cast<uint8_t>(defined);
  if (counted_ && --remaining_[parameter] > 0) return;
  order_.push_back(parameter);  // reserved
  MarkReady(parameter);
  if (next_bucket_ == members_.size()) Add(Kind::kFinishAtEnd);
}

// ---- A pass that begins at the end of a backward.

void PassCore::StartGathering(const std::vector<int>& unreached) {
  ++pass_;
  order_.clear();
  gathered_ = 0;
  next_unused_.clear();
  if (must_count()) {
    std::fill(counts_.begin(), counts_.end(), 0);
    seen_ = 0;
    return;
  }
  if (options_.static_graph) remaining_ = counts_;
  if (finds_unused()) next_unused_ = unreached;
  const std::vector<int>& unused = finds_unused() ? next_unused_ : unused_;
  for (const int parameter : unused) ready_pass_[parameter] = pass_;
  gathered_ = unused.size();
}

void PassCore::GatherGradient(int parameter, bool defined) {
  if (must_count()) return CountGradient(parameter, defined);
  if (ready_pass_[parameter] == pass_) return FailSecondGradient(parameter);
  used_[parameter] |= static_cast<uint8_t>(defined);
  if (counted_ && --remaining_[parameter] > 0) return;
  ready_pass_[parameter] = pass_;
  order_.push_back(parameter);  // reserved
  ++gathered_;
}

void PassCore::ReduceGathered() {
  const std::vector<int> order = order_;
  for (const int parameter : unused_) MarkReady(parameter);
  for (const int parameter : order) MarkReady(parameter);
  Finish();
}

void PassCore::MarkReady(int parameter) {
  part_ = Part::kGradient;
  cause_ = parameter;
  ready_pass_[parameter] = pass_;
  const int bucket = bucket_of_[parameter];
  if (!dropped_[bucket]) Add(Kind::kCopyIn, parameter);
  if (--missing_[bucket] > 0) return;
  Add(Kind::kFinishCopyIn, bucket);
  LaunchReadyBuckets();
}

void PassCore::LaunchReadyBuckets() {
  while (next_bucket_ < members_.size() && missing_[next_bucket_] == 0) {
    LaunchBucket(next_bucket_);
    ++next_bucket_;
  }
  if (next_bucket_ < members_.size() || !parts_.used_map_after || map_in_flight_) return;
  used_map_ = used_;
  StartUsedMap();
}

void PassCore::LaunchBucket(size_t bucket) {
  const int index = static_cast<int>(bucket);
  if (dropped_[bucket]) return Add(Kind::kSkip, index);
  if (CarriesMap(bucket)) {
    used_map_ = used_;
    map_in_flight_ = true;
    Add(Kind::kAttachUsedMap, index);
  }
  Add(Kind::kLaunch, index);
}

// A pass with a map after the buckets drops no bucket.
bool PassCore::CarriesMap(size_t bucket) const {
  return map_carrier_ && parts_.used_map_after && bucket + 1 == members_.size();
}

// ---- The beginning of a pass.

PassParts PassCore::PartsOfNextPass() const {
  const bool dynamic = finds_unused();
  // Until the ranks agree on rebuilt buckets, they count as first ones. OnPlanAgreed() takes that
  // back.
  const bool first =
      plan_state_ == PlanState::kFirst || (plan_state_ == PlanState::kRebuilt && unsettled_);
  return {.rebuild_after = rebuild_requested_ || (first && !dynamic),
          .used_map_after = must_count() || (dynamic && !options_.skip_unused_buckets),
          .used_map_before = dynamic && options_.skip_unused_buckets};
}

void PassCore::BeginPass(std::vector<int> unused, Then then) {
  finalized_within_ = false;
  part_ = Part::kBegin;
  next_unused_ = std::move(unused);
  then_ = then;
  parts_ = PartsOfNextPass();
  Add(Kind::kAnnounce);
}

void PassCore::OnAnnounced(Start start) {
  start_ = start;
  if (std::exchange(first_pass_begun_, true)) return OnFirstPassReady();
  Add(Kind::kFirstPass);
}

// The failure may have come when some ranks had new buckets and others did not.
void PassCore::OnFirstPassReady() {
  if (!unsettled_) return Begin();
  Add(Kind::kAgreeOnPlan);
}

void PassCore::OnPlanAgreed(bool equal, bool rebuild_requested) {
  unsettled_ = false;
  if (!equal || !rebuilt()) return Add(Kind::kTakeFirstPlan);
  if (!rebuild_requested) parts_.rebuild_after = false;
  Begin();
}

void PassCore::Begin() {
  next_bucket_ = 0;
  if (then_ != Then::kGathered) {
    ++pass_;
    order_.clear();
  }
  std::fill(dropped_.begin(), dropped_.end(), 0);
  for (size_t b = 0; b < members_.size(); ++b) missing_[b] = static_cast<int>(members_[b].size());
  Add(Kind::kBegin);
  if (then_ == Then::kShadow) return BeginShadow();
  if (then_ == Then::kGathered && must_count()) return ReduceCounted();
  if (must_count()) {
    state_ = State::kCounting;
    std::fill(counts_.begin(), counts_.end(), 0);
    seen_ = 0;
    return CountGradient(first_parameter_, first_defined_);
  }
  state_ = State::kReducing;
  if (options_.static_graph && then_ != Then::kGathered) remaining_ = counts_;
  if (finds_unused()) NoteUnused();
  AgreeOnUnused();
}

void PassCore::NoteUnused() {
  unused_ = std::move(next_unused_);
  if (pass_ == 1 && unused_.empty()) Add(Kind::kWarnAllUsed);
  if (pass_ > 1 && unused_ != last_unused_) can_set_static_graph_ = false;
  last_unused_ = unused_;
  Add(Kind::kLogUnused, 1);
}

// Finds the buckets that no rank uses. Each rank knows its own use from the graph of the backward.
void PassCore::AgreeOnUnused() {
  if (!parts_.used_map_before) {
    if (options_.skip_unused_buckets) FindDroppedBuckets();
    return GoOn();
  }
  std::fill(used_map_.begin(), used_map_.end(), 1);
  for (const int parameter : unused_) used_map_[parameter] = used_[parameter];
  agreeing_on_unused_ = true;
  StartUsedMap();
  Add(Kind::kWaitUsedMap);
}

void PassCore::GoOn() {
  if (then_ == Then::kGathered) return ReduceGathered();
  for (const int parameter : unused_) MarkReady(parameter);
  if (then_ == Then::kNoGradients) return Finish();
  part_ = Part::kGradient;
  cause_ = first_parameter_;
  EnterGradient(first_parameter_, first_defined_);
}

void PassCore::FindDroppedBuckets() {
  for (size_t b = 0; b < members_.size(); ++b) {
    dropped_[b] = std::all_of(members_[b].begin(), members_[b].end(),
                              [this](int parameter) { return untouched_[parameter] != 0; });
  }
}

std::vector<int> PassCore::AllParameters() const {
  std::vector<int> all(names_.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

void PassCore::CountGradient(int parameter, bool defined) {
  if (state_ == State::kBroken) {
    return ThrowOnly(absl::StrCat("rank ", rank_, ": a gradient for parameter ", names_[parameter],
                                  " after a reduction that failed: run a forward first"));
  }
  ++counts_[parameter];
  last_seen_[parameter] = ++seen_;
  used_[parameter] |= static_cast<uint8_t>(defined);
  ready_pass_[parameter] = pass_;
}

// ---- Which parameters are used.

void PassCore::StartUsedMap() {
  map_in_flight_ = true;
  Add(Kind::kStartUsedMap);
}

// Of a map that follows the buckets.
void PassCore::AddWaitForMap() {
  if (!map_carrier_ || members_.empty()) return Add(Kind::kWaitUsedMap);
  Add(Kind::kTakeUsedMap, static_cast<int>(members_.size()) - 1);
}

bool PassCore::wants_used_map() const {
  return options_.static_graph ||
         std::find(used_map_.begin(), used_map_.end(), 0) != used_map_.end();
}

void PassCore::OnUsedMap(const std::vector<int32_t>& sums) {
  map_in_flight_ = false;
  std::fill(untouched_.begin(), untouched_.end(), 0);
  for (size_t i = 0; i < sums.size(); ++i) untouched_[i] = sums[i] == 0;
  if (!sums.empty()) untouched_known_ = options_.static_graph;
  if (!std::exchange(agreeing_on_unused_, false)) return;
  if (then_ == Then::kShadow) return ShadowBuckets();
  FindDroppedBuckets();
  GoOn();
}

// ---- The end of a backward.

void PassCore::OnBackwardEnd(const BackwardView& backward) {
  if (std::exchange(finalized_within_, false)) {
    // The backward has passed further outputs since then; no gradient came through them.
    forwards_.AddToPass(backward.forwards);
    return forwards_.FinishPass();
  }
  if (state_ == State::kHeld) return forwards_.AddToPass(backward.forwards);
  if (reducing()) {
    forwards_.AddToPass(backward.forwards);
    if (state_ == State::kCounting) return ReduceCounted();
    if (next_bucket_ < members_.size()) state_ = State::kOpen;
    return;
  }
  if (state_ == State::kGathering) {
    forwards_.AddToPass(backward.forwards);
    state_ = State::kGathered;
    // A backward that counts a static graph is a whole pass.
    if (!must_count() && gathered_ < names_.size()) return;
    return BeginPass(std::move(next_unused_), Then::kGathered);
  }
  if (state_ == State::kIdle && finds_unused() && !backward.limited &&
      forwards_.AnyAwaits(backward.forwards)) {
    // The outputs that the backward passed reach no parameter.
    BeginPass(AllParameters(), Then::kNoGradients);
  }
}

void PassCore::OnBackwardException(const BackwardView& backward) {
  const bool had_its_pass = std::exchange(finalized_within_, false);
  const bool begins =
      state_ == State::kIdle && !had_its_pass && forwards_.AnyAwaits(backward.forwards);
  // The peers may wait in a collective of the model, also in a backward that reduces nothing.
  const bool in_model = backward.collectives && !broken() && !begins && !in_pass();
  if (!begins && !in_pass() && !in_model) return;
  const std::string cause = backward.failure.empty() ? "; this rank's own output says which"
                                                     : absl::StrCat(" (", backward.failure, ")");
  const std::string missing = begins || in_model ? "any parameter" : Missing();
  Break(absl::StrCat("rank ", rank_, ": an exception ended the backward", cause, ". ",
                     missing.empty() ? "The gradients of all parameters had come"
                                     : absl::StrCat("No gradient had come for ", missing)));
  Add(Kind::kReport);
}

void PassCore::ReduceCounted() {
  counted_ = true;
  unused_.clear();
  for (size_t i = 0; i < names_.size(); ++i) {
    if (counts_[i] == 0) unused_.push_back(static_cast<int>(i));
  }
  Add(Kind::kLogUnused, 0);
  order_ = RecordedOrder();
  state_ = State::kReducing;
  for (const int parameter : order_) MarkReady(parameter);
  Finish();
}

void PassCore::Finish() {
  if (!reducing() || next_bucket_ < members_.size()) return;  // broken or finalized meanwhile
  if (!manual_) return EndPass();
  state_ = State::kHeld;
  told_of_held_ = false;
  Add(Kind::kHold);
}

void PassCore::OnFinalize(bool within) {
  part_ = Part::kBegin;
  const std::string about = absl::StrCat("rank ", rank_, ": finalize_backward() was called ");
  if (!manual_) {
    return ThrowOnly(absl::StrCat(
        about, "without the option require_manual_backward_finalization: set the option first"));
  }
  if (state_ == State::kHeld) return EndPass();
  if (broken()) return ThrowOnly(absl::StrCat(about, "after a reduction that failed: ", *error_));
  if (!in_pass()) {
    return ThrowOnly(absl::StrCat(
        about,
        "without a reduction to finalize: it was called already for this backward, or the "
        "backward was one under no_sync()"));
  }
  const std::string missing = Missing();
  if (!missing.empty()) {
    return ThrowOnly(absl::StrCat(about, "before all gradients had come: none yet for ", missing));
  }
  if (within && state_ == State::kReducing && next_action_ == actions_.size()) {
    finalized_within_ = true;
    return EndPass();
  }
  ThrowOnly(absl::StrCat(about,
                         "within a backward that has to end first, as "
                         "should_finalize_after_backward() says"));
}

void PassCore::EndPass() {
  part_ = Part::kEnd;
  if (map_in_flight_) AddWaitForMap();
  AddFurtherRounds();
  buckets_sent_ = 0;
  for (size_t b = 0; b < members_.size(); ++b) {
    Add(dropped_[b] ? Kind::kDiscard : Kind::kWaitAndCopyOut, static_cast<int>(b));
    if (!dropped_[b]) ++buckets_sent_;
  }
  EndOfPass();
  Add(Kind::kComplete);
}

// Round k of every bucket starts before round k + 1 of any bucket. Ranks run the continuations of
// futures in different orders, so a continuation cannot start a round.
void PassCore::AddFurtherRounds() {
  for (int round = 1; round < rounds_; ++round) {
    for (size_t b = 0; b < members_.size(); ++b) {
      if (dropped_[b]) continue;
      Add(Kind::kNextRound, static_cast<int>(b));
      actions_.back().round = round;
    }
  }
}

void PassCore::EndOfPass() {
  Add(Kind::kForgetLaunched);
  // The rebuild is here because all ranks reach this point after the same collectives, whatever
  // they do between backwards.
  if (parts_.rebuild_after) Add(Kind::kRebuild, start_.source);
}

void PassCore::OnComplete(const std::vector<ForwardPtr>& passed) {
  last_order_ = order_;
  buckets_reduced_ = buckets_sent_;
  forwards_.AddToPass(passed);
  forwards_.FinishPass();
  std::fill(used_.begin(), used_.end(), 0);
  state_ = State::kIdle;
}

std::vector<int> PassCore::RecordedOrder() const {
  std::vector<int> order = order_;
  if (options_.static_graph) {
    order.clear();
    for (size_t i = 0; i < names_.size(); ++i) {
      if (counts_[i] > 0) order.push_back(static_cast<int>(i));
    }
    std::sort(order.begin(), order.end(),
              [this](int a, int b) { return last_seen_[a] < last_seen_[b]; });
  }
  std::vector<bool> recorded(names_.size(), false);
  for (const int index : order) recorded[index] = true;
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!recorded[i]) order.push_back(static_cast<int>(i));
  }
  return order;
}

// ---- A rank that has joined.

void PassCore::OnShadow(PassParts parts, Start start) {
  part_ = Part::kBegin;
  then_ = Then::kShadow;
  parts_ = parts;
  OnAnnounced(start);
}

void PassCore::BeginShadow() {
  part_ = Part::kShadow;
  std::fill(used_.begin(), used_.end(), 0);
  if (!parts_.used_map_before) return ShadowBuckets();
  used_map_ = used_;
  agreeing_on_unused_ = true;
  StartUsedMap();
  Add(Kind::kWaitUsedMap);
}

void PassCore::ShadowBuckets() {
  if (options_.skip_unused_buckets && !parts_.used_map_after) FindDroppedBuckets();
  for (size_t b = 0; b < members_.size(); ++b) {
    Add(Kind::kZero, static_cast<int>(b));
    if (!dropped_[b]) LaunchBucket(b);
  }
  if (parts_.used_map_after) {
    if (!map_in_flight_) {
      used_map_ = used_;
      StartUsedMap();
    }
    AddWaitForMap();
  }
  AddFurtherRounds();
  for (size_t b = 0; b < members_.size(); ++b) {
    if (!dropped_[b]) Add(Kind::kWait, static_cast<int>(b));
  }
  for (size_t b = 0; b < members_.size(); ++b) Add(Kind::kDiscard, static_cast<int>(b));
  EndOfPass();
}

// ---- Errors.

std::string PassCore::Missing() const {
  std::vector<std::string> names;
  for (size_t i = 0; i < names_.size(); ++i) {
    if (ready_pass_[i] != pass_) names.push_back(names_[i]);
  }
  return names.empty() ? std::string() : NameList(names);
}

void PassCore::FailSecondGradient(int parameter) {
  const std::string& name = names_[parameter];
  if (state_ == State::kHeld) {
    return Fail(absl::StrCat("rank ", rank_, ": a gradient for parameter ", name,
                             " came before finalize_backward() of the backward before it: call "
                             "finalize_backward() once after each synchronized backward"));
  }
  if (options_.static_graph) {
    return Fail(absl::StrCat(
        "rank ", rank_, ": the graph has changed: parameter ", name, " got more than the ",
        counts_[parameter],
        " gradients that it got in the first synchronized backward, and static_graph promises "
        "that all backwards are alike. Leave static_graph off, or call rebuild_buckets() on all "
        "ranks before the graph changes"));
  }
  Fail(absl::StrCat(
      "rank ", rank_, ": a second gradient for parameter ", name,
      " while the reduction that its first one belongs to is not complete. Reasons: a second "
      "backward through the same outputs; a backward of the bare module before the last one of "
      "this forward; a re-entrant checkpoint of a segment that is used twice (use static_graph, "
      "or a checkpoint that is not re-entrant)",
      options_.find_unused_parameters
          ? "; a parameter of a re-entrant checkpoint, which find_unused_parameters cannot see"
          : ""));
}

void PassCore::OnCheck() {
  if (!in_pass()) return;
  if (state_ == State::kHeld) {
    const std::string message = absl::StrCat(
        "rank ", rank_,
        ": the last backward is not finalized: with require_manual_backward_finalization, call "
        "finalize_backward() once after each synchronized backward, before the next forward");
    // The other ranks may wait for the forward. A program that makes none but goes on would let
    // them wait for ever.
    return std::exchange(told_of_held_, true) ? Fail(message) : ThrowOnly(message);
  }
  const char* advice =
      "Every parameter that requires a gradient must contribute to the loss of every synchronized "
      "backward, on every rank: freeze those that never do (set_requires_grad(false)) before "
      "wrapping the model, or set find_unused_parameters when it depends on the input. Another "
      "reason: a member was assigned another tensor (net->weight = ...), and parameters() still "
      "has the registered one: give that one the values instead (net->weight.set_data(...))";
  if (options_.static_graph) {
    advice =
        "In the first synchronized backward each of them got a gradient, and static_graph promises "
        "that all backwards are alike: leave it off when the graph depends on the input";
  } else if (options_.find_unused_parameters) {
    advice =
        "The backward reaches them, but was called with inputs that leave them out: call it "
        "without "
        "inputs, or name every parameter";
  }
  const std::string missing = Missing();
  if (missing.empty()) {
    return Fail(absl::StrCat("rank ", rank_,
                             ": the last backward did not finish the reduction of gradients, "
                             "although all of them came"));
  }
  Fail(absl::StrCat("rank ", rank_,
                    ": the last backward did not finish the reduction of gradients: no gradient "
                    "came for ",
                    missing, ". ", advice));
}

void PassCore::OnDestruction() {
  if (!in_pass()) return;
  const std::string missing = Missing();
  Break(absl::StrCat(
      "rank ", rank_,
      ": the model was destroyed before the reduction of its gradients was complete",
      missing.empty() ? std::string() : absl::StrCat(": no gradient came for ", missing)));
  Add(Kind::kReport);
}

}  // namespace ddp::internal
