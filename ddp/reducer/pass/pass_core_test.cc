#include "ddp/reducer/pass/pass_core.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ddp/reducer/buckets/bucket_plan.h"
#include "testing/story_replay.h"

namespace ddp::internal {
namespace {

using Kind = PassAction::Kind;
using PlanState = PassCore::PlanState;
using Words = std::vector<std::string>;

int Number(const std::string& text) {
  int number = 0;
  EXPECT_TRUE(absl::SimpleAtoi(text, &number)) << text;
  return number;
}

// "1,2": numbers; "": none.
std::vector<int> Numbers(const std::string& text) {
  std::vector<int> numbers;
  for (const auto& word : absl::StrSplit(text, ',', absl::SkipEmpty())) {
    numbers.push_back(Number(std::string(word)));
  }
  return numbers;
}

std::string Text(const PassParts& parts) {
  return absl::StrCat(parts.used_map_before ? ", used map before" : "",
                      parts.used_map_after ? ", used map after" : "",
                      parts.rebuild_after ? ", rebuild after" : "");
}

std::string Name(const PassAction& action) {
  static const std::map<Kind, std::string> kNames = {
      {Kind::kSearchForward, "search the forward"},
      {Kind::kBareBackward, "a bare backward, seen by p"},
      {Kind::kCallAtEnd, "await the end"},
      {Kind::kAnnounce, "announce"},
      {Kind::kFirstPass, "first pass"},
      {Kind::kAgreeOnPlan, "agree on the plan"},
      {Kind::kTakeFirstPlan, "take the first plan"},
      {Kind::kBegin, "begin"},
      {Kind::kWarnAllUsed, "warn: all parameters are used"},
      {Kind::kLogUnused, "log the unused parameters, level "},
      {Kind::kZero, "zero bucket "},
      {Kind::kCopyIn, "copy in p"},
      {Kind::kFinishCopyIn, "bucket is full: "},
      {Kind::kLaunch, "launch bucket "},
      {Kind::kSkip, "skip bucket "},
      {Kind::kStartUsedMap, "sum the used map"},
      {Kind::kWaitUsedMap, "wait for the used map"},
      {Kind::kAttachUsedMap, "attach the used map to bucket "},
      {Kind::kTakeUsedMap, "wait for the used map of bucket "},
      {Kind::kFinishAtEnd, "finish at the end"},
      {Kind::kHold, "hold"},
      {Kind::kNextRound, "next round of bucket "},
      {Kind::kWait, "wait for bucket "},
      {Kind::kWaitAndCopyOut, "copy out bucket "},
      {Kind::kDiscard, "discard bucket "},
      {Kind::kForgetLaunched, "forget the reductions"},
      {Kind::kRebuild, "rebuild as rank says: "},
      {Kind::kComplete, "complete"},
      {Kind::kReport, "report: "},
      {Kind::kReportAndThrow, "report and throw: "},
      {Kind::kThrow, "throw: "},
  };
  const std::string name = kNames.at(action.kind);
  return action.index < 0 ? name : absl::StrCat(name, action.index);
}

// Stories of one rank. The player answers each question of the core itself.
//
//   options parameters=3 plan=0|1,2 [find_unused] [static_graph] [skip_unused] [given] [rounds=2]
//           [collectives] [announced] [carrier] [manual]
//   > forward f [outputs=2] [no_sync] [eval] [unseen] [unreachable]
//   > backward f [output=1] [unreached=0,2] [limited]      through a watched output
//   > backward of f | backward of bare                     through none
//   > gradients 0 2                                        of p0, then of p2
//   > end | > throw                                        of the backward
//   > others use 1                                         from now on; first: all of them
//   > buckets differ                                       on another rank, after a failure
//   > finalize [within]                                    of a story with the option manual
//   > manual                                               from now on
//   > check | > rebuild | > reset | > reset after failure | > destroy
//   > shadow [rebuild] [map_after] [map_before]            a pass of the others, with these parts
class Story : public testing::StoryPlayer {
 public:
  void SetOptions(const Words& words) override {
    PassCore::Options options;
    int rounds = 1;
    for (const std::string& word : words) {
      const std::vector<std::string> parts = absl::StrSplit(word, '=');
      if (parts[0] == "parameters") parameters_ = Number(parts[1]);
      if (parts[0] == "plan") plan_ = parts[1];
      if (parts[0] == "rounds") rounds = Number(parts[1]);
      if (word == "find_unused") options.find_unused_parameters = true;
      if (word == "static_graph") options.static_graph = true;
      if (word == "skip_unused") options.skip_unused_buckets = true;
      if (word == "collectives") collectives_ = options.collectives_in_backward = true;
      if (word == "given") given_ = true;
    }
    const bool announced = std::find(words.begin(), words.end(), "announced") != words.end();
    const bool manual = std::find(words.begin(), words.end(), "manual") != words.end();
    const bool carrier = std::find(words.begin(), words.end(), "carrier") != words.end();
    std::vector<std::string> names;
    for (int i = 0; i < parameters_; ++i) names.push_back(absl::StrCat("p", i));
    core_.emplace(names, options);
    for (int i = 0; i < parameters_; ++i) others_use_.push_back(i);
    core_->Reset(0, false);
    core_->SetPlan(Plan(), given_ ? PlanState::kGiven : PlanState::kFirst);
    core_->SetRounds(rounds);
    core_->SetAnnounced(announced);
    core_->SetMapCarrier(carrier);
    core_->SetManual(manual);
  }

  std::vector<std::string> Play(const Words& words) override {
    lines_.clear();
    try {
      Event(words);
      Run();
    } catch (const std::string& thrown) {
      lines_.push_back(thrown);
      core_->Abandon();
    }
    return lines_;
  }

 private:
  // plan=0,1|2 is two buckets, of p0 with p1 and of p2.
  BucketPlan Plan() const {
    std::vector<std::string> names;
    for (int i = 0; i < parameters_; ++i) names.push_back(absl::StrCat("p", i));
    std::vector<std::vector<std::string>> buckets;
    for (const auto& bucket : absl::StrSplit(plan_, '|')) {
      buckets.emplace_back();
      for (const int p : Numbers(std::string(bucket))) buckets.back().push_back(names[p]);
    }
    auto plan = BucketPlan::FromNames(buckets, names, std::vector<BucketPlan::Tensor>(parameters_));
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *std::move(plan);
  }

  void Event(const Words& words) {
    const std::string& what = words[0];
    if (what == "forward") return Forward(words);
    if (what == "backward") return Backward(words);
    if (what == "gradients") {
      for (size_t i = 1; i < words.size(); ++i) {
        core_->OnGradient(Number(words[i]), true, View());
        Run();
      }
      return;
    }
    if (what == "end") return End();
    if (what == "throw") return core_->OnBackwardException(ViewAtEnd());
    if (what == "others") return void(others_use_ = Numbers(words.size() > 2 ? words[2] : ""));
    if (what == "buckets") return void(equal_ = false);
    if (what == "finalize") return core_->OnFinalize(words.size() > 1);
    if (what == "manual") return core_->SetManual(true);
    if (what == "check") return core_->OnCheck();
    if (what == "rebuild") return core_->RequestRebuild();
    if (what == "destroy") return core_->OnDestruction();
    if (what == "shadow") {
      const auto has = [&](const char* word) {
        return std::find(words.begin(), words.end(), word) != words.end();
      };
      return core_->OnShadow({.rebuild_after = has("rebuild"),
                              .used_map_after = has("map_after"),
                              .used_map_before = has("map_before")},
                             {.divisor = 2, .source = 1});
    }
    if (what == "reset") {
      const bool failure = words.size() > 1;
      core_->Reset(0, failure);
      at_end_.clear();
      if (failure) return core_->SetPlan(Plan(), core_->plan_state());
      return core_->SetPlan(Plan(), given_ ? PlanState::kGiven : PlanState::kFirst);
    }
    FAIL() << "unknown event " << what;
  }

  void Forward(const Words& words) {
    auto forward = std::make_shared<ForwardRecord>();
    forward->synchronized = true;
    forward->collectives = collectives_;
    forward->outputs.resize(1);
    bool seen = true;
    reaches_ = true;
    for (const std::string& word : words) {
      if (absl::StartsWith(word, "outputs=")) forward->outputs.resize(Number(word.substr(8)));
      if (word == "no_sync") forward->synchronized = false;
      if (word == "eval") forward->collectives = false;
      if (word == "unseen") seen = false;
      if (word == "unreachable") reaches_ = false;
    }
    by_name_[words[1]] = forward;
    core_->OnForwardEnd(forward, seen);
  }

  void Backward(const Words& words) {
    passed_.clear();
    unreached_.clear();
    limited_ = false;
    passed_collectives_ = false;
    ++task_;
    watched_ = words[1] != "of";
    if (!watched_) {
      if (words[2] != "bare") passed_.push_back(by_name_.at(words[2]));
      return;
    }
    const ForwardPtr forward = by_name_.at(words[1]);
    size_t output = 0;
    for (const std::string& word : words) {
      if (absl::StartsWith(word, "output=")) output = Number(word.substr(7));
      if (absl::StartsWith(word, "unreached=")) unreached_ = Numbers(word.substr(10));
      if (word == "limited") limited_ = true;
    }
    if (forward->outputs[output] == ForwardRecord::Output::kFresh) {
      forward->outputs[output] = ForwardRecord::Output::kPassed;
    }
    passed_collectives_ = forward->collectives;
    if (forward->synchronized) passed_.push_back(forward);
    at_end_.emplace_back([this] { core_->OnBackwardEnd(ViewAtEnd()); });
  }

  void End() {
    while (!at_end_.empty()) {
      const auto call = std::move(at_end_.front());
      at_end_.pop_front();
      call();
      Run();
    }
    passed_.clear();
  }

  BackwardView View() const {
    return {.task = task_,
            .watched = watched_,
            .forwards = passed_,
            .unreached = unreached_,
            .limited = limited_};
  }

  BackwardView ViewAtEnd() const {
    return {.watched = true,
            .forwards = watched_ ? passed_ : none_,
            .unreached = unreached_,
            .limited = limited_,
            .collectives = passed_collectives_};
  }

  void Run() {
    while (const std::optional<PassAction> action = core_->Next()) {
      std::string line = Name(*action);
      if (action->kind == Kind::kReport || action->kind == Kind::kReportAndThrow) {
        absl::StrAppend(&line, *core_->error());
      }
      if (action->kind == Kind::kReportAndThrow) throw line;
      if (action->kind == Kind::kThrow) throw absl::StrCat(line, core_->message());
      if (action->kind == Kind::kNextRound) absl::StrAppend(&line, ": ", action->round);
      if (action->kind == Kind::kAnnounce) absl::StrAppend(&line, Text(core_->parts()));
      lines_.push_back(line);
      Answer(*action);
    }
  }

  void Answer(const PassAction& action) {
    switch (action.kind) {
      case Kind::kSearchForward:
        return core_->OnForwardSearched(reaches_);
      case Kind::kCallAtEnd:
        at_end_.emplace_back([this] { core_->OnBackwardEnd(ViewAtEnd()); });
        return;
      case Kind::kFinishAtEnd:
        at_end_.emplace_back([this] { core_->Finish(); });
        return;
      case Kind::kAnnounce:
        return core_->OnAnnounced({.divisor = 2, .source = 0});
      case Kind::kFirstPass:
        return core_->OnFirstPassReady();
      case Kind::kAgreeOnPlan:
        return core_->OnPlanAgreed(std::exchange(equal_, true), false);
      case Kind::kTakeFirstPlan:
        core_->SetPlan(Plan(), given_ ? PlanState::kGiven : PlanState::kFirst);
        return core_->OnFirstPlanTaken();
      case Kind::kWaitUsedMap:
      case Kind::kTakeUsedMap: {
        if (!core_->wants_used_map()) return core_->OnUsedMap({});
        std::vector<int32_t> sums(core_->used_map().begin(), core_->used_map().end());
        for (const int parameter : others_use_) ++sums[parameter];
        return core_->OnUsedMap(sums);
      }
      case Kind::kRebuild:
        return core_->SetPlan(Plan(), PlanState::kRebuilt);
      case Kind::kComplete:
        return core_->OnComplete(watched_ ? passed_ : none_);
      default:
        return;
    }
  }

  int parameters_ = 1;
  std::string plan_ = "0";
  bool given_ = false;
  std::optional<PassCore> core_;
  std::map<std::string, ForwardPtr> by_name_;
  bool reaches_ = true;
  bool equal_ = true;
  std::vector<int> others_use_;

  int task_ = 0;
  bool watched_ = true;
  bool limited_ = false;
  bool collectives_ = false;         // of the model
  bool passed_collectives_ = false;  // by the backward under way
  std::vector<ForwardPtr> passed_;
  const std::vector<ForwardPtr> none_ = {};
  std::vector<int> unreached_;
  std::deque<std::function<void()>> at_end_;
  std::vector<std::string> lines_;
};

}  // namespace
}  // namespace ddp::internal

int main(int argc, char** argv) {
  return ddp::testing::RunStories(
      argc, argv,
      {.name = "PassCoreTest",
       .folder = "testing/scenarios/pass",
       .target = "//ddp/reducer/pass:pass_core_test",
       .make_player = [] { return std::make_unique<ddp::internal::Story>(); }});
}
