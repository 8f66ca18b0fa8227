#include "ddp/reducer/backward_watch.h"

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>

#include "ddp/common/error.h"
#include "ddp/reducer/engine_lock.h"
#include "ddp/reducer/pass/forward_record.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"

namespace ddp::internal {
namespace {

using ::ddp::testing::ErrorOf;
using ::testing::HasSubstr;
using Output = ForwardRecord::Output;

// Writes the events into a list, with the number of synchronized forwards at that time.
class BackwardWatchTest : public ::testing::Test, private BackwardWatch::Observer {
 protected:
  // A forward through `parameter_`.
  at::Tensor Forward() const { return at::mul(parameter_, 2); }

  // Watches `outputs` as those of one forward.
  ForwardPtr Watch(const std::vector<at::Tensor>& outputs, bool synchronized = true) {
    auto record = std::make_shared<ForwardRecord>(ForwardRecord{.synchronized = synchronized});
    seen_ = watch_->Watch(outputs, record);
    return record;
  }

  at::Tensor parameter_ = at::ones({2}).set_requires_grad(true);
  std::vector<std::string> events_;
  bool seen_ = false;
  bool throws_at_end_ = false;
  std::optional<BackwardWatch> watch_{std::in_place, static_cast<BackwardWatch::Observer*>(this),
                                      std::make_shared<EngineLock>()};

 private:
  void OnBackwardBegin() override { Note("begin"); }
  void OnBackwardEnd() override {
    Note("end");
    if (throws_at_end_) throw std::runtime_error("at the end");
  }
  void OnBackwardException() override { Note("exception"); }
  void Note(const std::string& event) {
    events_.push_back(event + " " + std::to_string(watch_->current().synchronized.size()));
  }
};

using Events = std::vector<std::string>;

TEST_F(BackwardWatchTest, ABackwardBeginsAndEndsOnce) {
  const std::vector<at::Tensor> outputs = {Forward(), Forward()};
  const ForwardPtr record = Watch(outputs);
  EXPECT_TRUE(seen_);
  EXPECT_EQ(watch_->current().task, -1);
  at::add(outputs[0], outputs[1]).sum().backward();
  EXPECT_EQ(events_, (Events{"begin 0", "end 1"}));
  EXPECT_EQ(watch_->current().task, -1);
  EXPECT_EQ(record->outputs, (std::vector<Output>{Output::kPassed, Output::kPassed}));
}

TEST_F(BackwardWatchTest, OnlyThePassedOutputsAreMarked) {
  const std::vector<at::Tensor> outputs = {Forward(), Forward()};
  const ForwardPtr record = Watch(outputs);
  outputs[1].sum().backward();
  EXPECT_EQ(record->outputs, (std::vector<Output>{Output::kFresh, Output::kPassed}));
}

TEST_F(BackwardWatchTest, SynchronizedForwardsAreCounted) {
  const at::Tensor first = Forward();
  const at::Tensor second = Forward();
  const at::Tensor local = Forward();
  Watch({first});
  Watch({second});
  Watch({local}, /*synchronized=*/false);
  at::add(at::add(first, second), local).sum().backward();
  EXPECT_EQ(events_, (Events{"begin 0", "end 2"}));
}

TEST_F(BackwardWatchTest, AnExceptionEndsTheBackward) {
  const at::Tensor hidden = Forward();
  hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("in the model"); });
  const at::Tensor output = at::mul(hidden, 3);
  Watch({output});
  EXPECT_THROW(output.sum().backward(), std::runtime_error);
  EXPECT_EQ(events_, (Events{"begin 0", "exception 1"}));
  EXPECT_EQ(watch_->current().task, -1);
}

TEST_F(BackwardWatchTest, AnExceptionOfTheObserverLeavesTheBackward) {
  const at::Tensor output = Forward();
  Watch({output});
  throws_at_end_ = true;
  EXPECT_THROW(output.sum().backward(), std::runtime_error);
  EXPECT_EQ(events_, (Events{"begin 0", "end 1"}));
}

TEST_F(BackwardWatchTest, ALeafThatRequiresAGradientIsNotSeen) {
  Watch({parameter_, Forward()});
  EXPECT_FALSE(seen_);
  Watch({at::ones({2}), Forward()});  // a constant has no backward
  EXPECT_TRUE(seen_);
}

TEST_F(BackwardWatchTest, OutputsMayOutliveTheWatch) {
  const at::Tensor unused = Forward();
  const at::Tensor reduced = Forward();
  const at::Tensor local = Forward();
  Watch({unused});
  Watch({reduced})->outputs = {Output::kReduced};
  Watch({local}, /*synchronized=*/false);
  watch_.reset();
  reduced.sum().backward();
  local.sum().backward();
  EXPECT_TRUE(events_.empty());
  EXPECT_TRUE(parameter_.grad().defined());
}

TEST_F(BackwardWatchTest, ABackwardAfterTheWatchIsRefused) {
  const at::Tensor output = Forward();
  Watch({output});
  watch_.reset();
  const auto refused = [&](std::optional<at::TensorList> inputs) {
    return ErrorOf<ReductionError>(
        [&] { output.sum().backward({}, /*retain_graph=*/true, /*create_graph=*/false, inputs); });
  };
  EXPECT_THAT(refused(std::nullopt), HasSubstr("was destroyed before its backward"));
  const std::vector<at::Tensor> inputs = {parameter_};
  EXPECT_THAT(refused(inputs), HasSubstr("was destroyed before its backward"));
  EXPECT_FALSE(parameter_.grad().defined());
}

TEST_F(BackwardWatchTest, AGradientThatIsOnlyReturnedMayBeComputedAfterTheWatch) {
  const at::Tensor output = Forward();
  Watch({output});
  watch_.reset();
  const auto gradients = torch::autograd::grad({output.sum()}, {parameter_});
  EXPECT_TRUE(at::equal(gradients.at(0), at::full({2}, 2.0F)));
  EXPECT_FALSE(parameter_.grad().defined());
}

}  // namespace
}  // namespace ddp::internal
