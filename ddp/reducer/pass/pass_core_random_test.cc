// Random stories of several ranks. Each rank is a PassCore and a player that does its actions; the
// collectives between them are a log. A story trains some steps: parameters unused by some ranks or
// by all, several losses of one forward, accumulation under no_sync, backwards of the bare module,
// failures in the middle, a rank that has joined. The order of gradients and of ranks is random.
//
// After every action the test checks what must hold:
//   - All ranks start the same collectives in the same order.
//   - A bucket is launched once in a pass, in plan order, after all its gradients were copied in.
//   - A bucket's round starts after its last one was awaited, and after that round of all buckets.
//   - Under a Join, a model with collectives in its backward is reduced after the backward.
//   - A gradient is copied in once in a pass, and never into a bucket that is skipped.
//   - A pass that ends has waited for each bucket that it launched, and is complete on every rank.
//   - Ranks agree on the parameters that no rank used.
//   - A map that the last bucket carries has no collective of its own.
//   - No rank waits forever, and no rank throws.
//
// Length: the player of a rank and the model of what must hold are one program for one test.
#include "ddp/reducer/pass/pass_core.h"

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/reducer/buckets/bucket_plan.h"

namespace ddp::internal {
namespace {

using Kind = PassAction::Kind;

constexpr int kStories = 100'000;

// One collective. Every rank adds its part; it is complete when all have.
struct Collective {
  std::string name;
  std::vector<int32_t> sums;
  std::vector<std::vector<int>> plan;  // of a rebuild: its source's; else the first rank's
  bool rebuilt = false;                // of the rank that came first
  bool equal = true;                   // the plans of all ranks
  bool rebuild_requested = false;      // by some rank
  int arrived = 0;
};

// All that the ranks of one story share.
struct World {
  std::mt19937 random;
  int ranks = 2;
  int parameters = 3;
  int rounds = 1;
  PassCore::Options options;
  std::deque<Collective> collectives;
  std::vector<std::vector<int>> first_plan;
  bool announces = false;            // under a Join
  bool carries = false;              // the last bucket carries the map of used parameters
  bool manual = false;               // the program finalizes each pass
  bool short_form = false;           // gradients come by OnPlainGradient(), as in the Reducer
  std::vector<PassParts> announced;  // the parts of each pass, for the rank that has joined

  int Draw(int below) {
    return static_cast<int>(std::uniform_int_distribution<>(0, below - 1)(random));
  }
  bool OneIn(int n) { return Draw(n) == 0; }
};

BucketPlan MakePlan(const std::vector<std::vector<int>>& buckets, int parameters) {
  std::vector<int32_t> words;
  for (const auto& bucket : buckets) words.insert(words.end(), bucket.begin(), bucket.end());
  words.push_back(static_cast<int32_t>(buckets.size()));
  for (const auto& bucket : buckets) words.push_back(static_cast<int32_t>(bucket.size()));
  words.resize(BucketPlan::EncodedSize(parameters), 0);
  auto plan = BucketPlan::Decode(words, std::vector<BucketPlan::Tensor>(parameters));
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

std::vector<std::vector<int>> Split(World& world, const std::vector<int>& order) {
  std::vector<std::vector<int>> buckets(1);
  for (const int parameter : order) {
    if (!buckets.back().empty() && world.OneIn(2)) buckets.emplace_back();
    buckets.back().push_back(parameter);
  }
  return buckets;
}

// The part of a rank in one step of a story.
struct Step {
  enum class Kind { kTrain, kBare, kNoSync, kShadow } kind = Kind::kTrain;
  std::vector<std::vector<int>> backwards;  // the gradients of each, in order
  bool unreachable = false;                 // find_unused_parameters: the forward uses nothing
};

class Rank {
 public:
  Rank(World& world, int number) : world_(world), number_(number) {
    std::vector<std::string> names;
    for (int i = 0; i < world.parameters; ++i) names.push_back(absl::StrCat("p", i));
    core_.emplace(names, world.options);
    core_->Reset(number, false);
    TakeFirstPlan();
    core_->SetRounds(world.rounds);
    core_->SetAnnounced(world.announces);
    core_->SetMapCarrier(world.carries);
    core_->SetManual(world.manual);
  }

  // Does the step's next event or action. Returns false when it has to wait for other ranks.
  bool Advance(const Step& step) {
    const auto action = waiting_ ? std::exchange(waiting_, std::nullopt) : core_->Next();
    if (action.has_value()) return Do(*action);
    if (std::exchange(shadowing_, false)) return true;
    if (calls_.empty() && std::exchange(held_, false)) {
      core_->OnFinalize(/*within=*/world_.OneIn(2));
      return true;
    }
    if (!calls_.empty()) {
      const auto call = std::move(calls_.front());
      calls_.pop_front();
      call();
      return true;
    }
    NextEvent(step);
    return true;
  }

  bool StepIsDone() const { return done_ && !waiting_; }
  void BeginStep() {
    done_ = false;
    backward_ = -1;
    gradient_ = 0;
    forward_.reset();
  }

  // Another rank failed, or this one: the reducer is reset, and may have other buckets than others.
  void Fail(bool at_fault) {
    if (at_fault) core_->OnBackwardException(View());
    core_->Break("a peer failed");
    waiting_.reset();
    at_end_.clear();
    calls_.clear();
    untouched_.clear();
    rebuilding_ = agreeing_ = shadowing_ = held_ = false;
    attached_.clear();
    next_collective_ = 0;
    done_ = true;
    core_->Reset(number_, true);
    core_->SetPlan(MakePlan(plan_, world_.parameters), core_->plan_state());
  }

  PassCore& core() { return *core_; }
  int passes_completed() const { return passes_completed_; }
  size_t collectives() const { return next_collective_; }
  const std::string& thrown() const { return thrown_; }

 private:
  void TakePlan(const std::vector<std::vector<int>>& plan) {
    plan_ = plan;
    copied_.assign(world_.parameters, 0);
    launched_.assign(plan_.size(), 0);
    waited_.assign(plan_.size(), 0);
    round_.assign(plan_.size(), 0);
  }

  void TakeFirstPlan() {
    TakePlan(world_.first_plan);
    core_->SetPlan(MakePlan(plan_, world_.parameters), PassCore::PlanState::kFirst);
  }

  void NextEvent(const Step& step) {
    if (step.kind == Step::Kind::kShadow) {
      if (shadowed_ == world_.announced.size()) return void(done_ = true);
      shadowing_ = true;
      return core_->OnShadow(world_.announced[shadowed_++], {.divisor = world_.ranks, .source = 0});
    }
    if (!forward_ && step.kind != Step::Kind::kBare) return Forward(step);
    if (step.backwards.empty()) return Check();
    if (backward_ < 0) return BeginBackward(step, 0);
    const std::vector<int>& gradients = step.backwards[backward_];
    if (gradient_ < gradients.size()) {
      const int parameter = gradients[gradient_++];
      if (!world_.short_form || !core_->OnPlainGradient(parameter, true)) {
        return core_->OnGradient(parameter, true, View());
      }
      EXPECT_FALSE(core_->Next().has_value());
      Do({.kind = Kind::kCopyIn, .part = PassAction::Part::kGradient, .index = parameter});
      return;
    }
    if (!ended_) return EndBackward();
    if (backward_ + 1 < static_cast<int>(step.backwards.size())) {
      return BeginBackward(step, backward_ + 1);
    }
    Check();
  }

  void Check() {
    core_->OnCheck();
    done_ = true;
  }

  void Forward(const Step& step) {
    forward_ = std::make_shared<ForwardRecord>();
    forward_->synchronized = step.kind == Step::Kind::kTrain;
    forward_->outputs.resize(step.backwards.size());
    reaches_ = !step.unreachable;
    core_->OnForwardEnd(forward_, true);
  }

  void BeginBackward(const Step& step, int number) {
    backward_ = number;
    gradient_ = 0;
    ended_ = false;
    ++task_;
    passed_.clear();
    unreached_.clear();
    std::vector<bool> reached(world_.parameters, false);
    for (const int parameter : step.backwards[number]) reached[parameter] = true;
    for (int i = 0; i < world_.parameters; ++i) {
      if (!reached[i]) unreached_.push_back(i);
    }
    watched_ = step.kind != Step::Kind::kBare;
    if (!watched_) return;
    forward_->outputs[number] = ForwardRecord::Output::kPassed;
    if (forward_->synchronized) passed_.push_back(forward_);
    at_end_.emplace_back([this] { core_->OnBackwardEnd(View()); });
  }

  void EndBackward() {
    ended_ = true;
    std::swap(calls_, at_end_);
  }

  BackwardView View() const {
    return {.task = task_, .watched = watched_, .forwards = passed_, .unreached = unreached_};
  }

  // The collective that this rank starts next.
  Collective& Start(const std::string& name) {
    if (next_collective_ == world_.collectives.size()) {
      world_.collectives.push_back({.name = name, .sums = {}, .plan = {}});
    }
    if (world_.options.collectives_in_backward && world_.announces) {
      EXPECT_TRUE(ended_ || gradient_ == 0) << "rank " << number_ << ": " << name;
    }
    Collective& collective = world_.collectives[next_collective_++];
    EXPECT_EQ(collective.name, name) << "rank " << number_ << ", collective " << next_collective_;
    ++collective.arrived;
    return collective;
  }

  bool Do(const PassAction& action) {
    switch (action.kind) {
      case Kind::kSearchForward:
        core_->OnForwardSearched(reaches_);
        return true;
      case Kind::kCallAtEnd:
        at_end_.emplace_back([this] { core_->OnBackwardEnd(View()); });
        return true;
      case Kind::kFinishAtEnd:
        at_end_.emplace_back([this] { core_->Finish(); });
        return true;
      case Kind::kAnnounce:
        if (number_ == 0) world_.announced.push_back(core_->parts());
        core_->OnAnnounced({.divisor = world_.ranks, .source = 0});
        return true;
      case Kind::kFirstPass:
        core_->OnFirstPassReady();
        return true;
      case Kind::kAgreeOnPlan:
        return Agree(action);
      case Kind::kTakeFirstPlan:
        TakeFirstPlan();
        core_->OnFirstPlanTaken();
        return true;
      case Kind::kBegin:
        TakePlan(std::vector(plan_));
        return true;
      case Kind::kZero:
        for (const int parameter : plan_[action.index]) ++copied_[parameter];
        return true;
      case Kind::kCopyIn:
        EXPECT_EQ(++copied_[action.index], 1) << "p" << action.index;
        return true;
      case Kind::kLaunch:
      case Kind::kSkip:
        Launch(action);
        return true;
      case Kind::kStartUsedMap:
        StartMap();
        return true;
      case Kind::kAttachUsedMap:
      case Kind::kTakeUsedMap:
      case Kind::kWaitUsedMap:
        return action.kind == Kind::kAttachUsedMap ? AttachMap(action) : WaitForMap(action);
      case Kind::kNextRound:
        return NextRound(action);
      case Kind::kWait:
      case Kind::kWaitAndCopyOut:
        EXPECT_EQ(round_[action.index], world_.rounds - 1);
        return WaitFor(action, static_cast<size_t>(launched_[action.index]) - 1,
                       [&](const Collective&) { ++waited_[action.index]; });
      case Kind::kForgetLaunched:
        for (size_t b = 0; b < plan_.size(); ++b) EXPECT_EQ(waited_[b], launched_[b] > 0) << b;
        if (world_.options.find_unused_parameters) untouched_.push_back(core_->untouched());
        return true;
      case Kind::kRebuild:
        return Rebuild(action);
      case Kind::kComplete:
        ++passes_completed_;
        core_->OnComplete(passed_);
        return true;
      case Kind::kReportAndThrow:
      case Kind::kThrow:
        thrown_ = core_->message();
        return true;
      default:
        held_ |= action.kind == Kind::kHold;
        return true;
    }
  }

  void Launch(const PassAction& action) {
    const auto bucket = static_cast<size_t>(action.index);
    for (const int parameter : plan_[bucket]) {
      EXPECT_EQ(copied_[parameter], action.kind == Kind::kLaunch ? 1 : 0) << "p" << parameter;
    }
    EXPECT_EQ(launched_[bucket], 0);
    if (action.kind == Kind::kSkip) return;
    const std::vector<uint8_t> map = std::exchange(attached_, {});
    const char* const with_map = map.empty() ? "" : " with the used map";
    AddMap(Start(absl::StrCat("bucket ", absl::StrJoin(plan_[bucket], ","), with_map)), map);
    launched_[bucket] = static_cast<int>(next_collective_);  // one more than its number
  }

  bool NextRound(const PassAction& action) {
    const auto bucket = static_cast<size_t>(action.index);
    EXPECT_EQ(round_[bucket], action.round - 1);
    for (size_t b = 0; b < plan_.size(); ++b) {
      if (launched_[b] == 0) continue;
      EXPECT_EQ(round_[b], b < bucket ? action.round : action.round - 1);
    }
    return WaitFor(action, static_cast<size_t>(launched_[bucket]) - 1, [&](const Collective&) {
      ++round_[bucket];
      Start(absl::StrCat("round ", action.round, " of bucket ", absl::StrJoin(plan_[bucket], ",")));
      launched_[bucket] = static_cast<int>(next_collective_);
    });
  }

  void StartMap() {
    EXPECT_TRUE(!world_.carries || core_->parts().used_map_before);
    Collective& map = Start("used map");
    map_ = next_collective_ - 1;
    AddMap(map, core_->used_map());
  }

  bool AttachMap(const PassAction& action) {
    EXPECT_TRUE(world_.carries);
    EXPECT_EQ(static_cast<size_t>(action.index) + 1, plan_.size());
    attached_ = core_->used_map();
    return true;
  }

  bool WaitForMap(const PassAction& action) {
    if (action.kind == Kind::kTakeUsedMap) {
      map_ = static_cast<size_t>(launched_[action.index]) - 1;
    }
    return WaitFor(action, map_, [this](const Collective& map) {
      EXPECT_EQ(map.sums.size(), static_cast<size_t>(world_.parameters));
      core_->OnUsedMap(core_->wants_used_map() ? map.sums : std::vector<int32_t>());
    });
  }

  static void AddMap(Collective& collective, const std::vector<uint8_t>& map) {
    collective.sums.resize(map.size(), 0);
    for (size_t i = 0; i < map.size(); ++i) collective.sums[i] += map[i];
  }

  bool Agree(const PassAction& action) {
    if (!std::exchange(agreeing_, true)) {
      Collective& agreement = Start("agreement");
      if (agreement.arrived == 1) {
        agreement.plan = plan_;
        agreement.rebuilt = core_->rebuilt();
      }
      agreement.equal &= agreement.plan == plan_ && agreement.rebuilt == core_->rebuilt();
      agreement.rebuild_requested |= core_->rebuild_requested();
    }
    return WaitFor(action, next_collective_ - 1, [this](const Collective& agreement) {
      agreeing_ = false;
      core_->OnPlanAgreed(agreement.equal, agreement.rebuild_requested);
    });
  }

  bool Rebuild(const PassAction& action) {
    if (!std::exchange(rebuilding_, true)) {
      Collective& rebuild = Start("rebuild");
      if (number_ == action.index) rebuild.plan = Split(world_, core_->RecordedOrder());
    }
    return WaitFor(action, next_collective_ - 1, [this](const Collective& rebuild) {
      rebuilding_ = false;
      TakePlan(rebuild.plan);
      core_->SetPlan(MakePlan(plan_, world_.parameters), PassCore::PlanState::kRebuilt);
    });
  }

  bool WaitFor(const PassAction& action, size_t number,
               const std::function<void(const Collective&)>& then) {
    EXPECT_LT(number, next_collective_) << "waits for what was not started";
    if (number >= next_collective_) return true;
    const Collective& collective = world_.collectives[number];
    if (collective.arrived < world_.ranks) {
      waiting_ = action;
      return false;
    }
    then(collective);
    return true;
  }

  World& world_;
  const int number_;
  std::optional<PassCore> core_;
  std::vector<std::vector<int>> plan_;

  bool done_ = true;
  ForwardPtr forward_;
  bool reaches_ = true;
  int backward_ = -1;
  size_t gradient_ = 0;
  bool ended_ = false;
  bool watched_ = true;
  int task_ = 0;
  std::vector<ForwardPtr> passed_;
  std::vector<int> unreached_;
  std::deque<std::function<void()>> at_end_;  // of the backward
  std::deque<std::function<void()>> calls_;   // now due
  std::optional<PassAction> waiting_;
  size_t shadowed_ = 0;
  bool shadowing_ = false;
  bool held_ = false;

  size_t next_collective_ = 0;
  size_t map_ = 0;
  std::vector<uint8_t> attached_;
  bool agreeing_ = false;
  bool rebuilding_ = false;
  std::vector<int> copied_;
  std::vector<int> launched_;
  std::vector<int> waited_;
  std::vector<int> round_;
  std::vector<std::vector<uint8_t>> untouched_;
  int passes_completed_ = 0;
  std::string thrown_;

  friend class RandomStory;
};

class RandomStory {
 public:
  explicit RandomStory(uint32_t seed) {
    world_.random.seed(seed);
    world_.ranks = 2 + world_.Draw(2);
    world_.parameters = 1 + world_.Draw(5);
    const int mode = world_.Draw(4);
    world_.options.static_graph = mode == 1;
    world_.options.find_unused_parameters = mode >= 2;
    world_.options.skip_unused_buckets = mode == 3;
    world_.options.collectives_in_backward = world_.OneIn(3);
    world_.announces = world_.OneIn(2);
    world_.rounds = world_.OneIn(3) ? 2 + world_.Draw(2) : 1;
    world_.carries = world_.rounds == 1 && world_.OneIn(2);
    world_.manual = world_.OneIn(3);
    world_.short_form = world_.OneIn(2);
    world_.first_plan = Split(world_, Shuffled());
    repeated_ = mode == 1 && world_.OneIn(2) ? world_.Draw(world_.parameters) : -1;
    dead_ =
        mode == 1 && world_.parameters > 1 && world_.OneIn(3) ? world_.Draw(world_.parameters) : -1;
    for (int i = 0; i < world_.ranks; ++i) ranks_.push_back(std::make_unique<Rank>(world_, i));
  }

  void Tell() {
    const int steps = 1 + world_.Draw(4);
    const int joined_from = world_.OneIn(3) ? 1 + world_.Draw(steps) : steps;
    for (int step = 0; step < steps && !::testing::Test::HasFailure(); ++step) {
      if (world_.OneIn(6) && step < joined_from) {
        for (auto& rank : ranks_) rank->core().RequestRebuild();
      }
      world_.announced.clear();
      for (auto& rank : ranks_) rank->shadowed_ = 0;
      DrawSteps(step >= joined_from);
      Play();
    }
    for (const auto& rank : ranks_) {
      EXPECT_EQ(rank->collectives(), world_.collectives.size());
      EXPECT_EQ(rank->untouched_, ranks_.front()->untouched_);
    }
  }

 private:
  std::vector<int> Shuffled() {
    std::vector<int> order(world_.parameters);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), world_.random);
    return order;
  }

  // One step of all ranks. What the wrapper asks of a program holds: the same number of
  // synchronized backwards on every rank, the same graph each time for a static graph.
  void DrawSteps(bool last_has_joined) {
    steps_.assign(world_.ranks, {});
    const bool every_rank_splits = world_.OneIn(3);
    const size_t backwards = every_rank_splits ? 2 : 1;
    for (int rank = 0; rank < world_.ranks; ++rank) {
      Step& step = steps_[rank];
      if (last_has_joined && rank == world_.ranks - 1) {
        step.kind = Step::Kind::kShadow;
        continue;
      }
      if (world_.OneIn(5)) local_.push_back(rank);
      std::vector<int> order = Shuffled();
      if (dead_ >= 0) order.erase(std::find(order.begin(), order.end(), dead_));
      if (repeated_ >= 0 && repeated_ != dead_) order.push_back(repeated_);
      if (world_.options.find_unused_parameters) {
        for (size_t i = 0; i < backwards; ++i) step.backwards.push_back(Subset());
        step.unreachable = backwards == 1 && step.backwards[0].empty();
        if (step.unreachable) step.backwards.clear();
      } else if (backwards == 2 && !world_.options.static_graph) {
        const int first = world_.Draw(static_cast<int>(order.size()) + 1);
        step.backwards = {{order.begin(), order.begin() + first},
                          {order.begin() + first, order.end()}};
      } else {
        step.backwards = {order};
      }
    }
  }

  std::vector<int> Subset() {
    std::vector<int> subset;
    for (const int parameter : Shuffled()) {
      if (!world_.OneIn(3)) subset.push_back(parameter);
    }
    return subset;
  }

  void Play() {
    // A rank that accumulates alone: no other rank may notice.
    for (const int rank : std::exchange(local_, {})) {
      Step alone{.kind = world_.OneIn(2) ? Step::Kind::kNoSync : Step::Kind::kBare,
                 .backwards = {Shuffled()}};
      ranks_[rank]->BeginStep();
      while (!ranks_[rank]->StepIsDone()) ASSERT_TRUE(ranks_[rank]->Advance(alone));
    }
    for (auto& rank : ranks_) rank->BeginStep();
    std::vector<int> running(world_.ranks);
    std::iota(running.begin(), running.end(), 0);
    int idle = 0;
    const int fails_after = world_.OneIn(5) ? world_.Draw(60) : -1;
    for (int turn = 0; !Finished(); ++turn) {
      if (turn == fails_after) return Fail(world_.Draw(world_.ranks));
      const int number = world_.Draw(world_.ranks);
      Rank& rank = *ranks_[number];
      if (rank.StepIsDone() || MustWaitForAnnouncement(number)) {
        ++idle;
      } else if (rank.Advance(steps_[number])) {
        idle = 0;
      } else {
        ++idle;
      }
      ASSERT_LT(idle, 1000) << "all ranks wait";
      ASSERT_EQ(rank.thrown(), "");
      if (::testing::Test::HasFailure()) return;
    }
  }

  void Fail(int at_fault) {
    for (int i = 0; i < world_.ranks; ++i) ranks_[i]->Fail(i == at_fault);
    world_.collectives.clear();
  }

  bool Finished() const {
    return std::all_of(ranks_.begin(), ranks_.end(),
                       [](const auto& rank) { return rank->StepIsDone(); });
  }

  // A rank that has joined waits for the announcement of each pass, and for the end of the others.
  bool MustWaitForAnnouncement(int number) const {
    if (steps_[number].kind != Step::Kind::kShadow) return false;
    const Rank& rank = *ranks_[number];
    return !rank.shadowing_ && rank.shadowed_ == world_.announced.size() &&
           !ranks_.front()->StepIsDone();
  }

  World world_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Step> steps_;
  std::vector<int> local_;
  int repeated_ = -1;  // a static graph: the parameter that gets two gradients
  int dead_ = -1;      // a static graph: the parameter that gets none
};

TEST(PassCoreRandomTest, RanksStartTheSameCollectivesAndNoRankWaitsForever) {
  for (uint32_t seed = 0; seed < kStories; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RandomStory(seed).Tell();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace ddp::internal
