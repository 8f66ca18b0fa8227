#include "ddp/join/optimizer_joinable.h"

#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "ddp/join.h"
#include "ddp/process_group.h"
#include "gtest/gtest.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

using ::ddp::testing::RankStore;

// A joinable whose events have no collectives. They tell which rank had inputs longest.
class Counter : public Joinable {
 public:
  explicit Counter(std::shared_ptr<ProcessGroup> group) : group_(std::move(group)) {}
  std::unique_ptr<JoinHook> join_hook(const JoinOptions&) override {
    return std::make_unique<JoinHook>();
  }
  std::shared_ptr<ProcessGroup> join_process_group() override { return group_; }
  void enter_join(Join*) override {}
  void leave_join() override {}

 private:
  const std::shared_ptr<ProcessGroup> group_;
};

// wrapper_test.cc has a model beside the optimizer. Rank `longest` takes three steps, and every
// other rank takes one. All gradients are those of the rank. Returns the parameter after one more
// step from 0 with the gradient 1, which shows the optimizer's state.
template <typename Optimizer, typename Options>
at::Tensor StepAfterAJoin(const std::shared_ptr<ProcessGroup>& group, int longest,
                          const Options& options) {
  const at::TensorOptions there(group->device());
  at::Tensor parameter = at::zeros({2}, there).requires_grad_();
  Optimizer optimizer({parameter}, options);
  Counter counter(group);
  const std::shared_ptr<Joinable> joinable = internal::MakeOptimizerJoinable(&optimizer);
  Join join({&counter, joinable.get()});
  for (int step = 0; step < (group->rank() == longest ? 3 : 1); ++step) {
    join.notify(counter, 0);
    parameter.mutable_grad() = at::full({2}, 10.0F * (group->rank() + 1), there);
    optimizer.step();
  }
  join.finish();
  parameter.data().zero_();
  parameter.mutable_grad() = at::ones({2}, there);
  optimizer.step();
  return parameter.detach();
}

template <typename Optimizer, typename Options>
void ExpectTheLastJoinersState(const std::shared_ptr<ProcessGroup>& group, const Options& options) {
  for (int longest = 0; longest < group->size(); ++longest) {
    const at::Tensor mine = StepAfterAJoin<Optimizer>(group, longest, options);
    const at::Tensor all = at::zeros({group->size(), 2}, mine.options());
    group->all_gather(all, mine);
    for (int rank = 0; rank < group->size(); ++rank) {
      EXPECT_TRUE(at::equal(all[rank], all[longest]))
          << rank << " after a Join that " << longest << " left last: " << all;
    }
  }
}

RANK_TEST(OptimizerJoinableTest, EveryRankGetsTheStateOfTheLastJoiner, .world_size = 3,
          .stores = {RankStore::kTcpStore}) {
  const auto group = init_process_group();
  ExpectTheLastJoinersState<torch::optim::SGD>(group, torch::optim::SGDOptions(0.1).momentum(0.9));
  ExpectTheLastJoinersState<torch::optim::AdamW>(group, torch::optim::AdamWOptions(0.01));
}

RANK_TEST(OptimizerJoinableTest, ARankAloneKeepsItsState, .world_size = 1,
          .stores = {RankStore::kTcpStore}) {
  const auto group = init_process_group();
  const at::Tensor stepped =
      StepAfterAJoin<torch::optim::SGD>(group, 0, torch::optim::SGDOptions(1).momentum(0.5));
  // Momentum: 10, 15, 17.5, and then 17.5 / 2 + 1.
  EXPECT_FLOAT_EQ(stepped[0].item<float>(), -9.75F);
}

}  // namespace
}  // namespace ddp
