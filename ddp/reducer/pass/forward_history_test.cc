#include "ddp/reducer/pass/forward_history.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ddp/reducer/pass/forward_record.h"

namespace ddp::internal {
namespace {

using Origin = ForwardHistory::Origin;
using Output = ForwardRecord::Output;

ForwardPtr Forward(bool synchronized, std::vector<Output> outputs = {Output::kPassed}) {
  auto forward = std::make_shared<ForwardRecord>();
  forward->synchronized = synchronized;
  forward->outputs = std::move(outputs);
  return forward;
}

Origin OriginOf(ForwardHistory& history, int task, bool watched,
                const std::vector<ForwardPtr>& forwards) {
  const std::vector<int> unreached;
  return history.FindOrigin(
      {.task = task, .watched = watched, .forwards = forwards, .unreached = unreached});
}

TEST(ForwardHistoryTest, FindsTheForwardThatCreatedANodeAndForgetsOldOnes) {
  ForwardHistory history(false);
  std::vector<ForwardPtr> forwards;
  for (uint64_t i = 0; i < 33; ++i) {
    forwards.push_back(Forward(true));
    *forwards.back() = {.thread = 7, .first_node = 10 * i, .end_node = 10 * i + 5};
    history.Add(forwards.back(), true);
  }
  EXPECT_EQ(*history.Find(7, 320), forwards[32]);
  EXPECT_EQ(*history.Find(7, 14), forwards[1]);
  EXPECT_EQ(history.Find(7, 15), nullptr) << "between two forwards";
  EXPECT_EQ(history.Find(8, 14), nullptr) << "on another thread";
  EXPECT_EQ(history.Find(7, 0), nullptr) << "more than 32 forwards ago";
}

TEST(ForwardHistoryTest, FindsTheForwardWhoseGradientsCreatedANode) {
  ForwardHistory history(false);
  const ForwardPtr forward = Forward(true);
  *forward = {.thread = 7, .first_node = 10, .end_node = 12, .of_gradients = {{7, 20, 22}}};
  history.Add(forward, true);
  EXPECT_EQ(*history.Find(7, 21), forward);
  EXPECT_EQ(history.Find(7, 15), nullptr) << "between the forward and the backward";
  EXPECT_EQ(history.Find(7, 22), nullptr);
  EXPECT_EQ(history.Find(8, 21), nullptr);
}

TEST(ForwardHistoryTest, AWatchedBackwardIsLocalReducedOrToBeReduced) {
  ForwardHistory history(false);
  const ForwardPtr forward = Forward(true);
  EXPECT_EQ(OriginOf(history, 1, true, {}), Origin::kLocal);
  EXPECT_EQ(OriginOf(history, 1, true, {forward}), Origin::kReduce);
  history.AddToPass({forward});
  history.FinishPass();
  EXPECT_EQ(OriginOf(history, 2, true, {forward}), Origin::kReduced);
  EXPECT_EQ(OriginOf(history, 2, true, {forward, Forward(true)}), Origin::kReduce);
}

TEST(ForwardHistoryTest, OnlyTheFirstGradientOfABareBackwardIsBare) {
  ForwardHistory history(false);
  EXPECT_EQ(OriginOf(history, 1, false, {}), Origin::kBare);
  EXPECT_EQ(OriginOf(history, 1, false, {}), Origin::kLocal);
  EXPECT_EQ(OriginOf(history, 2, false, {}), Origin::kBare);
  EXPECT_EQ(OriginOf(history, 3, false, {Forward(false)}), Origin::kLocal) << "under no_sync";
}

TEST(ForwardHistoryTest, ABackwardOfNoKnownForwardBelongsToTheUnseenOne) {
  ForwardHistory history(false);
  const ForwardPtr unseen = Forward(true);
  history.Add(unseen, /*seen=*/false);
  EXPECT_EQ(OriginOf(history, 1, false, {}), Origin::kReduce);
  EXPECT_EQ(history.awaiting(), std::vector<ForwardPtr>{unseen});
  history.AddToPass(history.awaiting());
  history.FinishPass();
  EXPECT_EQ(OriginOf(history, 2, false, {}), Origin::kBare);
}

TEST(ForwardHistoryTest, EachOutputHasAReductionOfItsOwnWhereThatIsAskedFor) {
  ForwardHistory by_forward(false);
  ForwardHistory by_output(true);
  const ForwardPtr forward = Forward(true, {Output::kPassed, Output::kFresh});
  by_output.AddToPass({forward});
  by_output.FinishPass();
  forward->outputs[1] = Output::kPassed;
  EXPECT_TRUE(by_output.AwaitsReduction(*forward));
  EXPECT_FALSE(by_forward.AwaitsReduction(*forward));
}

TEST(ForwardHistoryTest, ForwardsBeforeTheNewestReducedOneAreNotOutstanding) {
  ForwardHistory history(true);
  const ForwardPtr skipped = Forward(true);
  const ForwardPtr reduced = Forward(true);
  history.Keep(skipped);
  history.Keep(reduced);
  EXPECT_TRUE(history.HasOutstanding());
  history.AddToPass({reduced});
  history.FinishPass();
  EXPECT_FALSE(history.HasOutstanding());
}

}  // namespace
}  // namespace ddp::internal
