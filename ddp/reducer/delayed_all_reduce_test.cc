// Tests the delayed average in a group of one. There a sum is its own input, so the divisor shows
// when the average ran.
#include "ddp/reducer/delayed_all_reduce.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "ddp/common/error.h"
#include "ddp/reducer/buckets/parameter_uses.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/backend/groups.h"
#include "testing/error_of.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::ddp::testing::GroupOfOne;
using ::ddp::testing::ModelGroupOf;
using ::testing::AllOf;
using ::testing::HasSubstr;
using When = DelayedAllReduce::When;

constexpr int kDivisor = 4;

// Two parameters whose gradients are delayed, and the parameter that starts the average.
class DelayedAllReduceTest : public ::testing::Test {
 protected:
  std::unique_ptr<DelayedAllReduce> Make(When start) {
    auto delayed = std::make_unique<DelayedAllReduce>(
        std::vector<std::pair<std::string, at::Tensor>>{{"a", a_}, {"b", b_}}, trigger_,
        ModelGroupOf(GroupOfOne()), start);
    delayed->set_announce([] { return kDivisor; });
    return delayed;
  }

  // Gives the parameters the gradients 8 and 16. The trigger is used first, so its gradient is the
  // last.
  void Backward() {
    const at::Tensor eight = trigger_ * 8;
    const at::Tensor sum = a_ + 2 * b_;
    (eight * sum).sum().backward();
  }

  float A() const { return a_.grad()[0].item<float>(); }
  float B() const { return b_.grad()[0][0].item<float>(); }

  at::Tensor a_ = at::ones({2}).requires_grad_();
  at::Tensor b_ = at::ones({1, 2}).requires_grad_();
  at::Tensor trigger_ = at::ones({1}).requires_grad_();
};

TEST_F(DelayedAllReduceTest, GradientsArePartsOfOneTensor) {
  const auto delayed = Make(When::kAtTrigger);
  EXPECT_TRUE(a_.grad().is_alias_of(b_.grad()));
  EXPECT_EQ(b_.grad().sizes(), b_.sizes());
  EXPECT_EQ(A(), 0);
}

TEST_F(DelayedAllReduceTest, AveragesWhenTheTriggerGetsItsGradient) {
  const auto delayed = Make(When::kAtTrigger);
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  delayed->Complete(/*divisor=*/100);  // only waits
  EXPECT_EQ(A(), 8.0F / kDivisor);
  EXPECT_EQ(B(), 16.0F / kDivisor);
}

// The other model reads the gradient, and writes its own average, while the all-reduce is in
// progress.
TEST_F(DelayedAllReduceTest, AGradientThatAnotherModelReducesTooChangesAtTheEnd) {
  const auto delayed = Make(When::kAtTrigger);
  for (const bool shared : {false, true}) {
    const ParameterUses other_model(shared ? std::vector<const void*>{b_.unsafeGetTensorImpl()}
                                           : std::vector<const void*>{});
    delayed->EndForward(/*synchronize=*/true);
    Backward();
    EXPECT_EQ(A(), shared ? 8 : 8.0F / kDivisor);
    delayed->Complete(/*divisor=*/100);
    EXPECT_EQ(A(), 8.0F / kDivisor);
    EXPECT_EQ(B(), 16.0F / kDivisor);
  }
}

TEST_F(DelayedAllReduceTest, AveragesAfterTheBuckets) {
  const auto delayed = Make(When::kAfterBuckets);
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  EXPECT_EQ(A(), 8);
  delayed->Complete(/*divisor=*/2);
  EXPECT_EQ(A(), 4);
  EXPECT_EQ(B(), 8);
}

TEST_F(DelayedAllReduceTest, WithoutBucketsTheBackwardItselfWaits) {
  const auto delayed = Make(When::kAtTriggerAlone);
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  EXPECT_EQ(A(), 8.0F / kDivisor);
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  EXPECT_EQ(A(), 8.0F / kDivisor);
}

TEST_F(DelayedAllReduceTest, WithoutAnAnnouncementTheDivisorIsTheSizeOfTheGroup) {
  const auto delayed = Make(When::kAtTriggerAlone);
  delayed->set_announce({});
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  EXPECT_EQ(A(), 8);
}

TEST_F(DelayedAllReduceTest, BackwardsThatAreNotSynchronizedAccumulate) {
  const auto delayed = Make(When::kAtTriggerAlone);
  delayed->EndForward(/*synchronize=*/false);
  Backward();
  EXPECT_EQ(A(), 8);
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  EXPECT_EQ(A(), 16.0F / kDivisor);
}

TEST_F(DelayedAllReduceTest, TheForwardAfterAnAverageStartsAtZeroInNewMemory) {
  const auto delayed = Make(When::kAfterBuckets);
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  delayed->Complete(2);
  const at::Tensor kept = a_.grad();
  delayed->EndForward(/*synchronize=*/true);
  EXPECT_EQ(A(), 0);
  EXPECT_EQ(kept[0].item<float>(), 4);
}

TEST_F(DelayedAllReduceTest, AGradientThatZeroGradTookAwayComesBack) {
  const auto delayed = Make(When::kAtTriggerAlone);
  a_.mutable_grad().reset();
  delayed->EndForward(/*synchronize=*/true);
  EXPECT_TRUE(a_.grad().is_alias_of(b_.grad()));
  Backward();
  EXPECT_EQ(A(), 8.0F / kDivisor);
}

// `optimizer.zero_grad()` may stand between forward and backward.
TEST_F(DelayedAllReduceTest, AGradientThatIsTakenAwayAfterTheForwardIsAveraged) {
  for (const When start : {When::kAtTrigger, When::kAfterBuckets}) {
    const auto delayed = Make(start);
    delayed->EndForward(/*synchronize=*/true);
    a_.mutable_grad().reset();
    b_.mutable_grad() = at::full({1, 2}, 4.0F);
    Backward();
    delayed->Complete(kDivisor);
    EXPECT_EQ(A(), 8.0F / kDivisor);
    EXPECT_EQ(B(), 20.0F / kDivisor);
    EXPECT_TRUE(a_.grad().is_alias_of(b_.grad()));
  }
}

TEST_F(DelayedAllReduceTest, AGradientThatIsReplacedKeepsItsValue) {
  const auto delayed = Make(When::kAtTriggerAlone);
  b_.mutable_grad() = at::full({1, 2}, 4.0F);
  delayed->EndForward(/*synchronize=*/true);
  EXPECT_TRUE(a_.grad().is_alias_of(b_.grad()));
  Backward();
  EXPECT_EQ(A(), 8.0F / kDivisor);
  EXPECT_EQ(B(), 20.0F / kDivisor);
}

TEST_F(DelayedAllReduceTest, ASecondBackwardIsRefused) {
  const auto delayed = Make(When::kAtTrigger);
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  EXPECT_THAT(ErrorOf<c10::Error>([this] { Backward(); }),
              HasSubstr(" got a second gradient in one backward, when the delayed gradients were "
                        "being averaged already"));
}

// The gradient of the trigger comes first, and starts the all-reduce.
TEST_F(DelayedAllReduceTest, ADelayedGradientAfterThatOfTheTriggerIsRefused) {
  for (const When start : {When::kAtTrigger, When::kAtTriggerAlone}) {
    const auto delayed = Make(start);
    delayed->EndForward(/*synchronize=*/true);
    const at::Tensor sum = a_ + 2 * b_;
    const at::Tensor eight = trigger_ * 8;
    EXPECT_THAT(
        ErrorOf<ReductionError>([&] { (eight * sum).sum().backward(); }),
        AllOf(HasSubstr("rank 0: the gradient of "), HasSubstr("came after the gradient of"),
              HasSubstr("choose a parameter whose gradient comes last")));
    EXPECT_EQ(A(), 0);
  }
}

TEST_F(DelayedAllReduceTest, TheOrderOfGradientsDoesNotMatterAfterTheBuckets) {
  const auto delayed = Make(When::kAfterBuckets);
  delayed->EndForward(/*synchronize=*/true);
  const at::Tensor sum = a_ + 2 * b_;
  const at::Tensor eight = trigger_ * 8;
  (eight * sum).sum().backward();
  delayed->Complete(/*divisor=*/2);
  EXPECT_EQ(A(), 4);
}

TEST_F(DelayedAllReduceTest, ResetForgetsAnAbandonedAverage) {
  const auto delayed = Make(When::kAtTrigger);
  delayed->EndForward(/*synchronize=*/true);
  Backward();
  delayed->Reset(ModelGroupOf(GroupOfOne()));
  EXPECT_EQ(A(), 0);
  Backward();  // no second gradient
  delayed->Complete(1);
  EXPECT_EQ(A(), 8.0F / kDivisor);
}

TEST_F(DelayedAllReduceTest, TheTriggerIsFreeAfterTheEnd) {
  Make(When::kAtTriggerAlone)->EndForward(/*synchronize=*/true);
  Backward();
  EXPECT_EQ(A(), 8);
}

TEST_F(DelayedAllReduceTest, RefusesParametersThatDoNotGoTogether) {
  const auto refused = [this](const at::Tensor& second) {
    return ErrorOf<ConfigurationError>([&] {
      DelayedAllReduce({{"a", a_}, {"second", second}}, trigger_, ModelGroupOf(GroupOfOne()),
                       When::kAtTrigger);
    });
  };
  EXPECT_EQ(refused(at::Tensor()),
            "delay_all_reduce_named_params: second is not a parameter that requires a gradient");
  EXPECT_THAT(refused(at::ones({2})), HasSubstr("not a parameter that requires a gradient"));
  EXPECT_EQ(refused(at::ones({2}, at::kDouble).requires_grad_()),
            "delay_all_reduce_named_params: second and a differ in type or device");
}

}  // namespace
}  // namespace ddp::internal
