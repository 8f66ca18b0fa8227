// A model of InPlaceChannel's passes, of which every interleaving is visited.
//
// In each pass a member writes and publishes its arrays, in an order of its own. At any time
// between these steps it may take a piece of an array that it and all others have published, and
// sum that piece in the memory of all members. It arrives when nothing is left to take, and leaves
// the pass when all have arrived. The channel looks for pieces when it publishes and at the end,
// the model more often. A step that touches arrays has a begin and an end, and other members run
// between the two. The model breaks a rule when
//   - a member begins to write what another member writes or reads;
//   - a member sums a piece that not all members have written, or that is summed already;
//   - a member leaves a pass and a piece of its arrays is not summed;
//   - all members wait.
//
// The model is sequentially consistent. The channel may assume as much: the arrays are ordered by
// the words that publish them and by the arrivals, stores with release that are loaded with
// acquire; and a count of pieces is one word, which orders nothing else.
#include <cstdint>
#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "testing/shared_memory/state_explorer.h"

namespace ddp::internal {
namespace {

constexpr int kMost = 3;  // members, and pieces of an array
constexpr int kArrays = 2;
constexpr uint8_t kSum = 0x80;  // of a content: the piece is summed

// A change of the protocol.
enum class Mutation : uint8_t {
  kNone,
  kSumAtOnce,       // an array that not all have published is summed
  kTakeInTwoSteps,  // another member may take a piece between the look at the count and its change
  kArriveWhileSumming,  // the piece that the member has taken is not summed yet
  kArriveEarly,         // pieces are left, and nobody has taken them
  kLeaveAtOnce,         // no wait for the arrivals of others
  kCountWithoutPass,    // the count of the last pass stays
};

enum Activity : uint8_t { kIdle, kWriting, kTaking, kSumming, kReading };

struct Member {
  uint8_t pass = 1;
  uint8_t published = 0;  // how many arrays, in the member's order
  uint8_t waiting = 0;    // a bit for each published array with pieces to take
  uint8_t arrived = 0;    // the pass
  uint8_t activity = kIdle;
  uint8_t array = 0;  // of the activity
  uint8_t piece = 0;
};

struct Region {
  uint8_t content = 0;  // the pass, and kSum
  uint8_t readers = 0;
  uint8_t writers = 0;
};

struct State {
  Member member[kMost];
  uint8_t word[kMost][kArrays] = {};  // the pass in which the member has published the array
  uint8_t arrivals = 0;               // of all members, at the ends of all passes
  uint8_t taken_pass[kArrays] = {};
  uint8_t taken[kArrays] = {};
  Region memory[kMost][kArrays][kMost];  // member, array, piece
};

class InPlaceModel {
 public:
  InPlaceModel(int size, int pieces, int passes, Mutation mutation)
      : size_(size), pieces_(pieces), passes_(passes), mutation_(mutation) {}

  template <typename Emit>
  std::string Next(const State& state, const Emit& emit) const {
    for (int member = 0; member < size_; ++member) {
      const std::string broken = state.member[member].activity == kIdle ? Begin(state, member, emit)
                                                                        : End(state, member, emit);
      if (!broken.empty()) return absl::StrCat("member ", member, " ", broken);
    }
    return "";
  }

  bool IsEnd(const State& state) const {
    for (int member = 0; member < size_; ++member) {
      if (state.member[member].pass <= passes_) return false;
    }
    return true;
  }

 private:
  int ArrayAt(int member, int place) const { return (member + place) % kArrays; }

  // A member may begin the next array of its own, a piece of any array, or the end.
  template <typename Emit>
  std::string Begin(const State& state, int member, const Emit& emit) const {
    const Member& self = state.member[member];
    if (self.pass > passes_) return "";
    if (self.published < kArrays) {
      State next = state;
      const int array = ArrayAt(member, self.published);
      next.member[member].activity = kWriting;
      next.member[member].array = static_cast<uint8_t>(array);
      for (int piece = 0; piece < pieces_; ++piece) {
        const std::string broken = BeginWrite(next.memory[member][array][piece]);
        if (!broken.empty()) return broken;
      }
      emit(next);
    }
    for (int array = 0; array < kArrays; ++array) {
      if ((self.waiting & (1 << array)) == 0) continue;
      if (mutation_ != Mutation::kSumAtOnce && !AllPublished(state, array, self.pass)) continue;
      const std::string broken = Take(state, member, array, emit);
      if (!broken.empty()) return broken;
    }
    const bool done =
        self.published == kArrays && (self.waiting == 0 || mutation_ == Mutation::kArriveEarly);
    if (done && self.arrived < self.pass) {
      State next = state;
      next.member[member].arrived = self.pass;
      ++next.arrivals;
      emit(next);
    }
    if (self.arrived == self.pass &&
        (AllArrived(state, self.pass) || mutation_ == Mutation::kLeaveAtOnce)) {
      State next = state;
      next.member[member].activity = kReading;
      const std::string broken = BeginRead(next, member);
      if (!broken.empty()) return broken;
      emit(next);
    }
    return "";
  }

  // The end of what the member has begun.
  template <typename Emit>
  std::string End(const State& state, int member, const Emit& emit) const {
    State next = state;
    Member& self = next.member[member];
    self.activity = kIdle;
    switch (state.member[member].activity) {
      case kWriting:
        for (int piece = 0; piece < pieces_; ++piece) {
          Region& region = next.memory[member][self.array][piece];
          --region.writers;
          region.content = self.pass;
        }
        next.word[member][self.array] = self.pass;
        ++self.published;
        self.waiting |= static_cast<uint8_t>(1 << self.array);
        break;
      case kTaking: {
        const std::string broken = BeginSum(next, member, self.array, self.piece);
        if (!broken.empty()) return broken;
        break;
      }
      case kSumming:
        EndSum(next, self.array, self.piece, self.pass);
        break;
      default:
        EndRead(next, member);
        self.pass = static_cast<uint8_t>(self.pass + 1);
        self.published = 0;
        self.waiting = 0;
        break;
    }
    emit(next);
    const bool arrives = mutation_ == Mutation::kArriveWhileSumming &&
                         state.member[member].activity == kSumming &&
                         state.member[member].arrived < state.member[member].pass &&
                         state.member[member].published == kArrays;
    if (arrives) {
      next = state;
      next.member[member].arrived = next.member[member].pass;
      ++next.arrivals;
      emit(next);
    }
    return "";
  }

  template <typename Emit>
  std::string Take(const State& state, int member, int array, const Emit& emit) const {
    State next = state;
    Member& self = next.member[member];
    const bool counted =
        mutation_ == Mutation::kCountWithoutPass || state.taken_pass[array] == self.pass;
    const uint8_t piece = counted ? state.taken[array] : 0;
    if (piece == pieces_) {
      self.waiting &= static_cast<uint8_t>(~(1 << array));
      emit(next);
      return "";
    }
    self.array = static_cast<uint8_t>(array);
    self.piece = piece;
    if (mutation_ == Mutation::kTakeInTwoSteps) {
      self.activity = kTaking;
      emit(next);
      return "";
    }
    const std::string broken = BeginSum(next, member, array, piece);
    if (broken.empty()) emit(next);
    return broken;
  }

  // Counts the piece, and begins to sum it.
  std::string BeginSum(State& state, int member, int array, uint8_t piece) const {
    Member& self = state.member[member];
    self.activity = kSumming;
    state.taken_pass[array] = self.pass;
    state.taken[array] = static_cast<uint8_t>(piece + 1);
    for (int other = 0; other < size_; ++other) {
      Region& region = state.memory[other][array][piece];
      if (region.content != self.pass) return "sums what is not there";
      const std::string broken = BeginWrite(region);
      if (!broken.empty()) return broken;
    }
    return "";
  }

  void EndSum(State& state, int array, int piece, uint8_t pass) const {
    for (int other = 0; other < size_; ++other) {
      Region& region = state.memory[other][array][piece];
      --region.writers;
      region.content = pass | kSum;
    }
  }

  static std::string BeginWrite(Region& region) {
    if (region.writers > 0) return "meets the write of another";
    if (region.readers > 0) return "writes what another reads";
    ++region.writers;
    return "";
  }

  // The caller uses the results of a pass.
  std::string BeginRead(State& state, int member) const {
    for (int array = 0; array < kArrays; ++array) {
      for (int piece = 0; piece < pieces_; ++piece) {
        Region& region = state.memory[member][array][piece];
        if (region.writers > 0) return "reads what another writes";
        if (region.content != (state.member[member].pass | kSum)) return "reads what is no sum";
        ++region.readers;
      }
    }
    return "";
  }

  void EndRead(State& state, int member) const {
    for (int array = 0; array < kArrays; ++array) {
      for (int piece = 0; piece < pieces_; ++piece) --state.memory[member][array][piece].readers;
    }
  }

  bool AllPublished(const State& state, int array, uint8_t pass) const {
    for (int member = 0; member < size_; ++member) {
      if (state.word[member][array] != pass) return false;
    }
    return true;
  }

  bool AllArrived(const State& state, uint8_t pass) const { return state.arrivals >= pass * size_; }

  const int size_;
  const int pieces_;
  const int passes_;
  const Mutation mutation_;
};

Exploration ExplorePasses(int size, int pieces, int passes, Mutation mutation = Mutation::kNone) {
  return Explore(InPlaceModel(size, pieces, passes, mutation), State{});
}

TEST(InPlaceProtocolModelTest, TwoMembersInThreePasses) {
  for (const int pieces : {1, 2, 3}) {
    const Exploration found = ExplorePasses(2, pieces, 3);
    EXPECT_EQ(found.violation, "") << pieces;
    EXPECT_GT(found.states, 500u) << pieces;
    std::cout << found.states << " states\n";
  }
}

TEST(InPlaceProtocolModelTest, ThreeMembersInTwoPasses) {
  const Exploration found = ExplorePasses(3, 3, 2);
  EXPECT_EQ(found.violation, "");
  EXPECT_GT(found.states, 10'000u);
  std::cout << found.states << " states\n";
}

class InPlaceProtocolDefectTest : public ::testing::TestWithParam<int> {};

TEST_P(InPlaceProtocolDefectTest, TheModelFindsIt) {
  for (const int size : {2, 3}) {
    EXPECT_NE(ExplorePasses(size, 2, 2, static_cast<Mutation>(GetParam())).violation, "") << size;
  }
}

INSTANTIATE_TEST_SUITE_P(Mutations, InPlaceProtocolDefectTest,
                         ::testing::Range(static_cast<int>(Mutation::kSumAtOnce),
                                          static_cast<int>(Mutation::kCountWithoutPass) + 1));

}  // namespace
}  // namespace ddp::internal
