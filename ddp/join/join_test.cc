// Tests Join over joinables of the test's own. The ranks are threads on a fake backend. In
// one case they are processes, on Gloo.
#include "ddp/join.h"

#include <ATen/ATen.h>
#include <torch/types.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ddp/common/error.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/thread_ranks.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::RunThreadRanks;
using ::testing::AllOf;
using ::testing::HasSubstr;

// The number of different tensor lengths; enough for any test.
constexpr int kLengths = 3;

std::vector<int> AllRanks(int size) {
  std::vector<int> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// A joinable with one collective per step: the sum of a tensor whose length depends on the event. A
// joined rank that uses the wrong event therefore causes an error.
class Summer : public Joinable {
 public:
  explicit Summer(std::shared_ptr<ProcessGroup> group) : group_(std::move(group)) {}

  double Step(double value, int event = 0) {
    round =
        join_ != nullptr ? join_->notify(*this, event) : JoinRound{event, AllRanks(group_->size())};
    return Sum(value, event);
  }

  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    ++hooks;
    return std::make_unique<Shadow>(this);
  }
  std::shared_ptr<ProcessGroup> join_process_group() override { return group_; }
  void enter_join(Join* join) override { join_ = join; }
  void leave_join() override { join_ = nullptr; }

  JoinRound round;  // the last one, on active and joined ranks
  int hooks = 0;
  int joined = 0;
  int shadowed = 0;
  int ended = 0;
  bool was_last = false;
  int last_joiner = -1;
  std::function<void()> on_shadow = [] {};

 private:
  class Shadow : public JoinHook {
   public:
    explicit Shadow(Summer* summer) : summer_(summer) {}
    void on_join() override {
      EXPECT_EQ(summer_->shadowed, 0);
      ++summer_->joined;
    }
    void main_hook(const JoinRound& round) override {
      ++summer_->shadowed;
      summer_->round = round;
      summer_->on_shadow();
      summer_->Sum(0, round.event);
    }
    void post_hook(bool is_last_joiner, int last_joiner) override {
      ++summer_->ended;
      summer_->was_last = is_last_joiner;
      summer_->last_joiner = last_joiner;
    }

   private:
    Summer* const summer_;
  };

  double Sum(double value, int event) {
    const at::Tensor tensor = torch::full({event % kLengths + 1}, value, at::kDouble);
    group_->all_reduce(tensor);
    return tensor[0].item<double>();
  }

  const std::shared_ptr<ProcessGroup> group_;
  Join* join_ = nullptr;
};

template <typename Error>
std::string ErrorOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  }
  return "no error of this type";
}

// `lengths`: the number of inputs of each rank. Checks every sum, and the active ranks.
void RunUneven(const std::shared_ptr<ProcessGroup>& group, const std::vector<int>& lengths,
               int last_joiner) {
  Summer summer(group);
  const int steps = lengths[group->rank()];
  Join join({&summer});
  for (int step = 0; step < steps; ++step) {
    std::vector<int> active;
    double expected = 0;
    for (int rank = 0; rank < group->size(); ++rank) {
      if (lengths[rank] <= step) continue;
      active.push_back(rank);
      expected += rank + 1;
    }
    EXPECT_EQ(summer.Step(group->rank() + 1, step % Join::kMaxEvents), expected);
    EXPECT_EQ(summer.round.active_ranks, active);
    EXPECT_EQ(summer.round.source(), active.back());
    EXPECT_EQ(summer.round.num_active(), active.size());
  }
  join.finish();
  join.finish();  // does nothing
  EXPECT_EQ(summer.shadowed, *std::max_element(lengths.begin(), lengths.end()) - steps);
  EXPECT_EQ(summer.joined, 1);
  EXPECT_EQ(summer.ended, 1);
  EXPECT_EQ(summer.last_joiner, last_joiner);
  EXPECT_EQ(summer.was_last, last_joiner == group->rank());
}

THREAD_RANK_TEST(JoinTest, ShadowsWhatOthersDo, 3) {
  RunUneven(group, {1, 5, 3}, /*last_joiner=*/1);
  RunUneven(group, {0, 2, 2}, /*last_joiner=*/2);  // rank 0 joins first, without any input
  RunUneven(group, {70, 0, 3}, /*last_joiner=*/0);
  RunUneven(group, {4, 4, 4}, /*last_joiner=*/2);
  RunUneven(group, {0, 0, 0}, /*last_joiner=*/0);
}

RANK_TEST(JoinTest, ShadowsSeveralJoinables, 3) {
  const auto group = init_process_group();
  Summer first(group), second(group);
  join({&first, &second}, {}, [&] {
    for (int step = 0; step <= 2 * group->rank(); ++step) {
      first.Step(1, 1);
      first.Step(1, 2);             // several events in one iteration
      if (step % 2 == 1) continue;  // no event in some iterations
      const double sum = second.Step(1, 63);
      EXPECT_EQ(sum, second.round.num_active());
    }
  });
  const int missed = 2 * (group->size() - 1 - group->rank());
  EXPECT_EQ(first.shadowed, 2 * missed);
  EXPECT_EQ(second.shadowed, missed / 2);
  EXPECT_EQ(second.last_joiner, group->size() - 1);
  EXPECT_EQ(first.last_joiner, group->size() - 1);
}

THREAD_RANK_TEST(JoinTest, ThrowsOnEarlyTermination, 3) {
  Summer summer(group);
  const JoinOptions options{.throw_on_early_termination = true};
  for (int repeat = 0; repeat < 2; ++repeat) {  // the group stays usable
    int done = 0;
    const std::string error = ErrorOf<ReductionError>([&] {
      join({&summer}, options, [&] {
        for (int step = 0; step < (group->rank() == 0 ? 1 : 3); ++step, ++done) summer.Step(1);
      });
    });
    EXPECT_EQ(done, 1);
    EXPECT_EQ(error, group->rank() == 0
                         ? "Rank 0 exhausted all inputs."
                         : "Detected at least one rank that exhausted inputs. Throwing across all "
                           "ranks. Without inputs: rank 0.");
    EXPECT_EQ(summer.ended, 0);
  }
  join({&summer}, options, [&] { summer.Step(1); });  // all ranks end at once, which is not early
  EXPECT_EQ(summer.ended, 1);
}

THREAD_RANK_TEST(JoinTest, NamesDisagreement, 3) {
  Summer first(group), second(group);
  const std::string error = ErrorOf<ReductionError>([&] {
    join({&first, &second}, {}, [&] {
      if (group->rank() == 0) first.Step(1, 5);
      if (group->rank() == 1) second.Step(1, 2);
    });
  });
  EXPECT_EQ(error,  // also on rank 2, which has joined
            "under a Join the ranks with inputs must do the same, but rank 0 came to event 5 of "
            "joinable 0, rank 1 came to event 2 of joinable 1");
  RunUneven(group, {1, 2, 3}, 2);
}

THREAD_RANK_TEST(JoinTest, DoesNothingWhenDisabled, 3) {
  Summer summer(group);
  Join join({&summer}, {.enable = false});
  EXPECT_EQ(summer.Step(1), group->size());
  join.finish();
  EXPECT_EQ(summer.hooks, 0);
  EXPECT_EQ(summer.ended, 0);
}

THREAD_RANK_TEST(JoinTest, DifferentOptionsAreNamed, 3) {
  const bool odd = group->rank() == 1;
  for (const auto& [mine, difference] : std::vector<std::pair<JoinOptions, std::string>>{
           {{.divide_by_initial_world_size = false}, "divide_by_initial_world_size=false"},
           {{.throw_on_early_termination = true}, "throw_on_early_termination=true"}}) {
    Summer summer(group);
    Join join({&summer}, odd ? mine : JoinOptions{});
    const auto step = [&] { group->rank() == 0 ? join.finish() : (void)summer.Step(1); };
    EXPECT_THAT(ErrorOf<ConfigurationError>(step),
                AllOf(HasSubstr("different Joins"), HasSubstr("rank 1 has"), HasSubstr(difference),
                      HasSubstr("ranks 0, 2 have divide_by_initial_world_size=true, "
                                "throw_on_early_termination=false and 1 joinables")));
  }
  Summer first(group);
  Summer second(group);
  Join join(odd ? std::vector<JoinableRef>{&first, &second} : std::vector<JoinableRef>{&first});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { first.Step(1); }),
              HasSubstr("rank 1 has divide_by_initial_world_size=true, "
                        "throw_on_early_termination=false and 2 joinables"));
  EXPECT_FALSE(group->failed());
}

THREAD_RANK_TEST(
    JoinTest, EnabledOnOneRankOnlyIsNamed, 3,
    /*not_on_device=*/"ranks in different collectives are named with shm and Gloo only") {
  Summer summer(group);
  Join join({&summer}, {.enable = group->rank() != 1});
  EXPECT_THAT(ErrorOf<CommunicationError>([&] { summer.Step(1); }),
              AllOf(HasSubstr("ranks 0, 2 are in collective 0, the exchange of a Join"),
                    HasSubstr("rank 1 is in collective 0, an all-reduce"),
                    HasSubstr("JoinOptions (enable among them)")));
}

THREAD_RANK_TEST(JoinTest, MisuseIsOneClearLine, 3) {
  Summer summer(group);
  EXPECT_EQ(ErrorOf<ConfigurationError>([] { Join join({}); }),
            "a Join needs at least one joinable");
  Summer alone(std::make_shared<ProcessGroup>(
      c10::make_intrusive<c10d::PrefixStore>(std::to_string(group->rank()), group->store()),
      ProcessGroup::Place{}));
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                Join join({&summer, &alone});
              }),
              HasSubstr("joinable 1 of a Join has another process group than joinable 0"));
  const std::string nested = "is under a Join already; finish() that one first";
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] {
                Join join({&summer, &summer});
              }),
              HasSubstr(nested));
  Join join({&summer});
  EXPECT_THAT(ErrorOf<ConfigurationError>([&] { Join inner({&summer}); }), HasSubstr(nested));
  join.finish();
  RunUneven(group, {1, 2, 1}, 1);
}

// Rank 1 fails while rank 0 is in the loop and rank 2 has joined.
THREAD_RANK_TEST(JoinTest, ExceptionInTheLoopReachesAll, 3) {
  Summer summer(group);
  for (const bool guard : {false, true}) {
    const auto loop = [&] {
      summer.Step(1);
      if (group->rank() == 2) return;
      if (group->rank() == 1) throw std::runtime_error("no such file: batch 1");
      summer.Step(1);
    };
    const auto run = [&] {
      if (!guard) return join({&summer}, {}, loop);
      Join join({&summer});
      loop();
      join.finish();
    };
    if (group->rank() == 1) {
      EXPECT_THROW(run(), std::runtime_error);
    } else {
      EXPECT_THAT(ErrorOf<PeerFailedError>(run),
                  HasSubstr(guard ? "an exception ended the loop under a Join on rank 1"
                                  : "in the loop under a Join: no such file: batch 1"));
    }
    EXPECT_EQ(summer.ended, 0);
    // The next Join starts again with all ranks.
    RunUneven(group, {2, 1, 3}, 2);
  }
}

THREAD_RANK_TEST(JoinTest, ForgottenFinishReachesAll, 3) {
  Summer summer(group);
  if (group->rank() == 0) {
    ::testing::internal::CaptureStderr();  // of the process: no other rank does
    { Join join({&summer}); }
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("without finish(): call it"));
    EXPECT_THAT(ErrorOf<ReductionError>([&] { Join next({&summer}); }),
                HasSubstr("rank 0 left the scope of a Join without finish()"));
  } else {
    EXPECT_THAT(ErrorOf<PeerFailedError>([&] { join({&summer}, {}, [&] { summer.Step(1); }); }),
                HasSubstr("rank 0 left the scope of a Join without finish()"));
  }
  RunUneven(group, {2, 1, 3}, 2);
}

// A loop that catches the exceptions of its steps gets the error from finish().
THREAD_RANK_TEST(JoinTest, FinishAfterAFailureThrows, 3) {
  Summer summer(group);
  const std::string ended = "finish() of a Join that an exception has ended";
  for (const std::string way : {"disagreement", "termination", "abandon"}) {
    Join join({&summer}, {.throw_on_early_termination = way == "termination"});
    const bool differs = group->rank() == 1;
    std::string reason = "under a Join the ranks with inputs must do the same";
    if (way == "disagreement") {
      EXPECT_THAT(ErrorOf<ReductionError>([&] { summer.Step(1, differs ? 2 : 5); }),
                  HasSubstr(reason));
    } else if (way == "termination") {
      reason = differs ? "Rank 1 exhausted all inputs" : "Without inputs: rank 1";
      EXPECT_THAT(ErrorOf<ReductionError>([&] {
                    if (differs) return join.finish();
                    summer.Step(1);
                  }),
                  HasSubstr(reason));
    } else if (differs) {
      reason = "the disk is full";
      summer.Step(1);  // all ranks are under the Join by now
      join.abandon(reason);
    } else {
      reason = "a rank failed";
      EXPECT_THAT(ErrorOf<PeerFailedError>([&] {
                    for (int step = 0; step < 2; ++step) summer.Step(1);
                  }),
                  HasSubstr("disk is full"));
      EXPECT_THAT(ErrorOf<ReductionError>([&] { join.finish(); }), HasSubstr("begin a new one"));
    }
    for (int repeat = 0; repeat < 2; ++repeat) {
      const std::string text = ErrorOf<ReductionError>([&] { join.finish(); });
      EXPECT_THAT(text, HasSubstr(ended));
      EXPECT_THAT(text, HasSubstr(reason));
    }
    EXPECT_EQ(summer.ended, 0);
  }
  RunUneven(group, {2, 1, 3}, 2);
}

// The Join of one rank has fewer joinables than those of the others.
THREAD_RANK_TEST(JoinTest, MissingJoinableIsNamed, 3) {
  Summer first(group), second(group);
  std::vector<JoinableRef> joinables = {&first};
  if (group->rank() != 0) joinables.emplace_back(&second);
  const std::string text = ErrorOf<c10::Error>([&] {
    join(joinables, {}, [&] {
      if (group->rank() == 0) return;
      second.Step(1, 7);
    });
  });
  EXPECT_THAT(text, HasSubstr("the ranks have different Joins: rank 0 has"));
  RunUneven(group, {2, 1, 3}, 2);
}

THREAD_RANK_TEST(JoinTest, FailingHookReachesAll, 3) {
  Summer summer(group);
  summer.on_shadow = [] { throw std::runtime_error("out of memory"); };
  const auto run = [&] {
    join({&summer}, {}, [&] {
      if (group->rank() != 0) summer.Step(1);
    });
  };
  if (group->rank() == 0) {
    EXPECT_THROW(run(), std::runtime_error);
  } else {
    EXPECT_THAT(ErrorOf<PeerFailedError>(run),
                HasSubstr("in the finish() of a Join: out of memory"));
  }
  RunUneven(group, {2, 1, 3}, 2);
}

// One process, so one log: the warning of rank 0 is the only one.
TEST(JoinTest, VeryUnevenInputsAreMentionedOnce) {
  ::testing::internal::CaptureStderr();
  RunThreadRanks({.world_size = 3}, [](const std::shared_ptr<ProcessGroup>& group) {
    Summer summer(group);
    join({&summer}, {}, [&] {
      for (int step = 0; step < (group->rank() == 0 ? 0 : 1100); ++step) summer.Step(1);
    });
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  const std::string warning = "has no inputs left and has taken part in 1000 rounds of ranks 1, 2";
  EXPECT_THAT(log, HasSubstr("rank 0 " + warning));
  EXPECT_EQ(log.find("no inputs left"), log.rfind("no inputs left"));
}

}  // namespace
}  // namespace ddp
