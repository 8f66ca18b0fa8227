// A model of CollectiveEngine's rounds, of which every interleaving is visited.
//
// Each member runs the steps of the engine for a list of collectives: announce, fill, signal,
// await, take, add a slice, gather, reduce in place. A step that copies memory has a begin and an
// end, and other members run between the two. The model breaks a rule when
//   - a member begins to write a region that another member reads or writes;
//   - a member begins to read a region that another member writes;
//   - a member reads the header or the data of another round, or of a slice that is not added yet;
//   - all members wait.
//
// A signal that announces a header is a number in the word beside the header. Every other signal
// is one more arrival in a counter of all members. A member does not look again for an announcement
// that it has seen from all.
//
// The model is sequentially consistent. The engine may assume as much: each access to memory of
// another member is ordered by a signal, a store with release that the reader loads with acquire.
#include <algorithm>
#include <array>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "testing/shared_memory/state_explorer.h"

namespace ddp::internal {
namespace {

constexpr int kMost = 4;  // members

enum class Kind : uint8_t {
  kShort,       // the data go along with the announcement
  kLong,        // two rounds of data after the announcement
  kSliced,      // a short all-reduce whose additions are divided
  kLongSliced,  // the same with two rounds of data
  kInPlace,     // reduced where the tensors lie
  kGrouped,     // the same by two members of each of two NUMA nodes
};
constexpr std::array kKinds = {Kind::kShort, Kind::kLong, Kind::kSliced, Kind::kLongSliced,
                               Kind::kInPlace};

// A change of the protocol.
enum class Mutation : uint8_t {
  kNone,
  kOneHalf,             // the buffers have one half
  kTakeAtOnce,          // no wait before others' data are taken
  kGatherAtOnce,        // no wait before others' slices are gathered
  kLeaveAtOnce,         // no wait for the others after a reduction in place
  kFillBeforeTake,      // the next round is filled before the last one is taken
  kSignalBeforeHeader,  // the signal says that the header is there; it is not
  kSignalBeforeFill,    // the signal says that the data are there; they are not
  kSignalBeforeSlice,   // the same for a slice
  kAwaitOneLess,        // the signal before is awaited
  kTouchBeforeAgree,    // in place before all have announced
  kNoSignalOfSlices,    // a member waits for a signal that nobody gives
  kNextStepAtOnce,      // no wait between the steps of a reduction by nodes
  kEnterWithoutAwait,   // no wait before the announcement: see the test
};

// In a wait: the counter is read.
constexpr uint8_t kCounter = 2;

// One step of one member. What the numbers mean depends on the step.
struct Step {
  enum Do : uint8_t {
    kWriteHeader,  // a: half, b: collective
    kReadHeader,   // a: half, b: collective, member
    kFill,         // a: half, b: content
    kTake,         // a: half, b: content, member: all slices
    kTakeSlice,    // a: half, b: content, member: this member's slice
    kPutSlice,     // a: half, b: content: this member's slice of its own buffer
    kGather,       // a: half, b: content, member: the member's own slice
    kUse,          // b: content: the caller writes this member's tensor
    kTouch,        // b: content: this member's slice of all tensors
    kGroupStep,    // a: the step of StepOf(), b: content: of four members, in groups of two
    kCheck,        // b: content: the caller reads this member's tensor
    kAnnounce,     // a: half, b: number: the word beside the header
    kSignal,       // one more arrival
    kAwait,        // a: number, b: the half whose word is read, or kCounter: of arrivals
  };
  Do what;
  uint8_t a = 0;
  uint8_t b = 0;
  uint8_t member = 0;
};

// Memory that is read and written as one.
struct Region {
  uint8_t content = 0;
  uint8_t readers = 0;
  uint8_t writers = 0;
};

struct State {
  uint8_t at[kMost] = {};            // the next step
  uint8_t midway[kMost] = {};        // the step has begun
  uint8_t arrivals = 0;              // of all members
  uint8_t announced[kMost][2] = {};  // the words beside the headers
  uint8_t seen[kMost] = {};          // the last announcement that the member has seen from all
  Region header[kMost][2];
  Region buffer[kMost][2][kMost];  // member, half, slice
  Region tensor[kMost][kMost];     // member, slice
};

// Contents: the number of a collective or a round; a sum has this bit too.
constexpr uint8_t kSum = 0x80;
constexpr uint8_t kPartial = 0x40;  // of a slice: the sum over the members of a node

// Writes down the steps of one member: as CollectiveEngine::Enter(), Agree(), FillRound(),
// DrainRound(), GatherSlices(), GoDirect().
class Script {
 public:
  Script(int member, int size, const std::vector<Kind>& kinds, Mutation mutation)
      : member_(static_cast<uint8_t>(member)), size_(size), mutation_(mutation) {
    for (const Kind kind : kinds) Collective(kind);
  }

  const std::vector<Step>& steps() const { return steps_; }

 private:
  uint8_t half() const { return mutation_ == Mutation::kOneHalf ? 0 : round_ & 1; }
  void Add(Step step) { steps_.push_back(step); }
  void Announce() {
    Add({Step::kAnnounce, half(), ++signals_});
    await_ = filled_ = {Step::kAwait, signals_, half()};
  }
  void Signal() {
    if (mutation_ != Mutation::kNoSignalOfSlices || !in_slices_) Add({Step::kSignal});
    ++signals_;
    arrivals_ = static_cast<uint8_t>(arrivals_ + size_);
    await_ = {Step::kAwait, arrivals_, kCounter};
  }
  void Await() { Await(await_); }
  void Await(Step await) {
    if (mutation_ == Mutation::kAwaitOneLess && await.a > 0) --await.a;
    Add(await);
  }
  void Fill() { Add({Step::kFill, half(), round_}); }

  void Collective(Kind kind) {
    ++collective_;
    const bool sliced = kind == Kind::kSliced || kind == Kind::kLongSliced;
    const bool fits = kind == Kind::kShort || kind == Kind::kSliced;
    const bool in_place = kind == Kind::kInPlace || kind == Kind::kGrouped;
    if (in_place) Add({Step::kUse, 0, collective_});
    // Enter().
    if (mutation_ != Mutation::kEnterWithoutAwait) Await(filled_);
    ++round_;
    const Step header = {Step::kWriteHeader, half(), collective_};
    if (mutation_ != Mutation::kSignalBeforeHeader) Add(header);
    if (fits && mutation_ != Mutation::kSignalBeforeFill) Fill();
    Announce();
    if (mutation_ == Mutation::kSignalBeforeHeader) Add(header);
    if (fits && mutation_ == Mutation::kSignalBeforeFill) Fill();
    // Agree().
    if (in_place && mutation_ == Mutation::kTouchBeforeAgree) Add({Step::kTouch, 0, collective_});
    Await();
    for (uint8_t member = 0; member < size_; ++member) {
      Add({Step::kReadHeader, half(), collective_, member});
    }
    if (kind == Kind::kGrouped) return Grouped();
    if (in_place) return InPlace();
    if (fits) return Drain(sliced);
    FillRound();
    if (mutation_ == Mutation::kFillBeforeTake) {
      const uint8_t first = round_;
      FillRound();
      Drain(sliced, first);
    } else {
      Drain(sliced);
      Await(filled_);
      FillRound();
    }
    Drain(sliced);
  }

  void FillRound() {
    ++round_;
    if (mutation_ != Mutation::kSignalBeforeFill) Fill();
    Signal();
    if (mutation_ == Mutation::kSignalBeforeFill) Fill();
    filled_ = await_;
  }

  void Drain(bool sliced) { Drain(sliced, round_); }
  void Drain(bool sliced, uint8_t round) {
    const auto half = static_cast<uint8_t>(mutation_ == Mutation::kOneHalf ? 0 : round & 1);
    if (mutation_ != Mutation::kTakeAtOnce) Await(filled_);
    for (uint8_t member = 0; member < size_; ++member) {
      Add({sliced ? Step::kTakeSlice : Step::kTake, half, round, member});
    }
    if (!sliced) return;
    const Step put = {Step::kPutSlice, half, static_cast<uint8_t>(round | kSum)};
    if (mutation_ != Mutation::kSignalBeforeSlice) Add(put);
    in_slices_ = true;
    Signal();
    in_slices_ = false;
    if (mutation_ == Mutation::kSignalBeforeSlice) Add(put);
    if (mutation_ != Mutation::kGatherAtOnce) Await();
    for (uint8_t member = 0; member < size_; ++member) {
      if (member == member_) continue;
      Add({Step::kGather, half, static_cast<uint8_t>(round | kSum), member});
    }
  }

  void InPlace() {
    if (mutation_ != Mutation::kTouchBeforeAgree) Add({Step::kTouch, 0, collective_});
    Signal();
    if (mutation_ != Mutation::kLeaveAtOnce) Await();
    Add({Step::kCheck, 0, static_cast<uint8_t>(collective_ | kSum)});
  }

  void Grouped() {
    for (uint8_t step = 0; step < 3; ++step) {
      Add({Step::kGroupStep, step, collective_});
      Signal();
      if (mutation_ != Mutation::kNextStepAtOnce || step == 2) Await();
    }
    Add({Step::kCheck, 0, static_cast<uint8_t>(collective_ | kSum)});
  }

  const uint8_t member_;
  const int size_;
  const Mutation mutation_;
  std::vector<Step> steps_;
  uint8_t collective_ = 0;
  uint8_t round_ = 0;
  uint8_t signals_ = 0;   // of this member
  uint8_t arrivals_ = 0;  // of all members
  bool in_slices_ = false;
  Step await_ = {Step::kAwait, 0, kCounter};   // the last signal
  Step filled_ = {Step::kAwait, 0, kCounter};  // that of the last filling
};

class RoundModel {
 public:
  RoundModel(int size, const std::vector<Kind>& kinds, Mutation mutation) : size_(size) {
    for (int member = 0; member < size; ++member) {
      scripts_.push_back(Script(member, size, kinds, mutation).steps());
    }
  }

  template <typename Emit>
  std::string Next(const State& state, const Emit& emit) const {
    for (int member = 0; member < size_; ++member) {
      if (state.at[member] == scripts_[member].size()) continue;
      const Step& step = scripts_[member][state.at[member]];
      State next = state;
      bool whole = true;
      std::string broken;
      if (step.what == Step::kAnnounce) {
        next.announced[member][step.a] = step.b;
      } else if (step.what == Step::kSignal) {
        ++next.arrivals;
      } else if (step.what == Step::kAwait) {
        if (!AllSignalled(state, member, step)) continue;
        if (step.b != kCounter) next.seen[member] = std::max(next.seen[member], step.a);
      } else if (state.midway[member] == 0) {
        broken = Begin(next, member, step);
        whole = false;
      } else {
        End(next, member, step);
      }
      if (!broken.empty()) return absl::StrCat("member ", member, " ", broken);
      next.midway[member] = whole ? 0 : 1;
      if (whole) ++next.at[member];
      emit(next);
    }
    return "";
  }

  bool IsEnd(const State& state) const {
    for (int member = 0; member < size_; ++member) {
      if (state.at[member] != scripts_[member].size()) return false;
    }
    return true;
  }

 private:
  bool AllSignalled(const State& state, int member, const Step& await) const {
    if (await.b == kCounter) return state.arrivals >= await.a;
    if (state.seen[member] >= await.a) return true;
    return std::all_of(state.announced, state.announced + size_,
                       [&](const auto& words) { return words[await.b] >= await.a; });
  }

  static bool Writes(const Step& step) {
    return step.what == Step::kWriteHeader || step.what == Step::kFill ||
           step.what == Step::kPutSlice || step.what == Step::kUse || step.what == Step::kTouch;
  }

  // What a step does with a region. `before`, of a region that is read: its content.
  struct Access {
    bool reads = false;
    bool writes = false;
    uint8_t before = 0;
    uint8_t after = 0;
  };

  // Calls `act` with each region that the step reads or writes.
  template <typename Act>
  void ForRegions(State& state, int member, const Step& step, const Act& act) const {
    const bool touches = step.what == Step::kTouch;
    const Access access = {.reads = !Writes(step) || touches,
                           .writes = Writes(step),
                           .before = step.b,
                           .after = static_cast<uint8_t>(step.b | (touches ? kSum : 0))};
    for (int i = 0; i < size_; ++i) {
      switch (step.what) {
        case Step::kWriteHeader:
          if (i == 0) act(state.header[member][step.a], access);
          break;
        case Step::kReadHeader:
          if (i == 0) act(state.header[step.member][step.a], access);
          break;
        case Step::kFill:
          act(state.buffer[member][step.a][i], access);
          break;
        case Step::kTake:
          act(state.buffer[step.member][step.a][i], access);
          break;
        case Step::kTakeSlice:
          if (i == 0) act(state.buffer[step.member][step.a][member], access);
          break;
        case Step::kPutSlice:
          if (i == 0) act(state.buffer[member][step.a][member], access);
          break;
        case Step::kGather:
          if (i == 0) act(state.buffer[step.member][step.a][step.member], access);
          break;
        case Step::kUse:
        case Step::kCheck:
          act(state.tensor[member][i], access);
          break;
        case Step::kTouch:
          act(state.tensor[i][member], access);
          break;
        case Step::kGroupStep:
          if (i == 0) ForGroupStep(state, member, step, act);
          break;
        default:
          break;
      }
    }
  }

  // A tensor has four slices. Slice i of StepOf() is the slices 2 * i and 2 * i + 1.
  template <typename Act>
  static void ForGroupStep(State& state, int member, const Step& step, const Act& act) {
    const int me = member % 2;
    const int neighbour = member ^ 1;
    const auto partial = static_cast<uint8_t>(step.b | kPartial);
    const auto sum = static_cast<uint8_t>(step.b | kSum);
    if (step.a == 1) {
      for (const int other : {me, me + 2}) {
        act(state.tensor[other][2 * me + member / 2],
            Access{.reads = true, .writes = true, .before = partial, .after = sum});
      }
      return;
    }
    for (const int slice : {2 * me, 2 * me + 1}) {
      if (step.a == 0) {
        act(state.tensor[neighbour][slice], Access{.reads = true, .before = step.b});
        act(state.tensor[member][slice],
            Access{.reads = true, .writes = true, .before = step.b, .after = partial});
      } else {
        act(state.tensor[member][slice], Access{.reads = true, .before = sum});
        act(state.tensor[neighbour][slice], Access{.writes = true, .after = sum});
      }
    }
  }

  std::string Begin(State& state, int member, const Step& step) const {
    std::string broken;
    ForRegions(state, member, step, [&](Region& region, const Access& access) {
      if (region.writers > 0) broken = "meets the write of another";
      if (access.writes && region.readers > 0) broken = "writes what another reads";
      if (access.reads && region.content != access.before) broken = "reads another round";
      ++(access.writes ? region.writers : region.readers);
    });
    return broken;
  }

  void End(State& state, int member, const Step& step) const {
    ForRegions(state, member, step, [&](Region& region, const Access& access) {
      --(access.writes ? region.writers : region.readers);
      if (access.writes) region.content = access.after;
    });
  }

  const int size_;
  std::vector<std::vector<Step>> scripts_;
};

Exploration ExploreRounds(int size, const std::vector<Kind>& kinds,
                          Mutation mutation = Mutation::kNone) {
  return Explore(RoundModel(size, kinds, mutation), State{});
}

std::string Name(const std::vector<Kind>& kinds) {
  std::string name;
  for (const Kind kind : kinds) absl::StrAppend(&name, static_cast<int>(kind), " ");
  return name;
}

TEST(RoundProtocolModelTest, TwoMembersInEveryListOfThreeCollectives) {
  size_t states = 0;
  for (const Kind one : kKinds) {
    for (const Kind two : kKinds) {
      for (const Kind three : kKinds) {
        const Exploration found = ExploreRounds(2, {one, two, three});
        ASSERT_EQ(found.violation, "") << Name({one, two, three});
        states += found.states;
      }
    }
  }
  std::cout << states << " states\n";
  EXPECT_GT(states, 10'000);
}

TEST(RoundProtocolModelTest, ThreeMembersInEveryListOfTwoCollectives) {
  size_t states = 0;
  for (const Kind one : kKinds) {
    for (const Kind two : kKinds) {
      const Exploration found = ExploreRounds(3, {one, two});
      ASSERT_EQ(found.violation, "") << Name({one, two});
      states += found.states;
    }
  }
  std::cout << states << " states\n";
  EXPECT_GT(states, 100'000);
}

TEST(RoundProtocolModelTest, ThreeMembersInLongerLists) {
  for (const std::vector<Kind>& kinds : {std::vector<Kind>(4, Kind::kShort),
                                         std::vector<Kind>(3, Kind::kSliced),
                                         {Kind::kInPlace, Kind::kShort, Kind::kInPlace}}) {
    EXPECT_EQ(ExploreRounds(3, kinds).violation, "") << Name(kinds);
  }
}

TEST(RoundProtocolModelTest, FourMembersOnTwoNodes) {
  const Exploration found = ExploreRounds(4, {Kind::kGrouped, Kind::kGrouped});
  EXPECT_EQ(found.violation, "");
  std::cout << found.states << " states\n";
  EXPECT_NE(ExploreRounds(4, {Kind::kGrouped}, Mutation::kNextStepAtOnce).violation, "");
}

class RoundProtocolDefectTest : public ::testing::TestWithParam<int> {};

TEST_P(RoundProtocolDefectTest, TheModelFindsIt) {
  const auto mutation = static_cast<Mutation>(GetParam());
  const std::vector<std::vector<Kind>> lists = {{Kind::kShort, Kind::kShort, Kind::kShort},
                                                {Kind::kLong, Kind::kShort},
                                                {Kind::kLongSliced, Kind::kSliced},
                                                {Kind::kInPlace, Kind::kInPlace}};
  for (const int size : {2, 3}) {
    std::string found;
    for (const std::vector<Kind>& kinds : lists) {
      const std::string violation = ExploreRounds(size, kinds, mutation).violation;
      if (!violation.empty()) absl::StrAppend(&found, violation, "; ");
    }
    const bool stuck = found.find("all wait") != std::string::npos;
    EXPECT_FALSE(found.empty()) << size << " members";
    EXPECT_EQ(stuck, mutation == Mutation::kNoSignalOfSlices) << found;
  }
}

INSTANTIATE_TEST_SUITE_P(Mutations, RoundProtocolDefectTest,
                         ::testing::Range(static_cast<int>(Mutation::kOneHalf),
                                          static_cast<int>(Mutation::kNextStepAtOnce)));

// Enter() waits for the last filling, and the last state of every collective has waited for it
// already. So the wait is no condition of safety; it guards collectives that end in other ways.
TEST(RoundProtocolModelTest, TheWaitBeforeTheAnnouncementIsImpliedByTheOthers) {
  for (const Kind one : kKinds) {
    for (const Kind two : kKinds) {
      EXPECT_EQ(ExploreRounds(3, {one, two}, Mutation::kEnterWithoutAwait).violation, "");
    }
  }
}

}  // namespace
}  // namespace ddp::internal
