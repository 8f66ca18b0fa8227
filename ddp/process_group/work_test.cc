#include "ddp/work.h"

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue_inl.h>

#include "ddp/common/error.h"
#include "ddp/process_group/work_state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/error_of.h"

namespace ddp {
namespace {

using ::ddp::testing::ErrorOf;

TensorFuture NewFuture() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

// Returns an operation of a group that no longer exists.
std::shared_ptr<Work::State> StateOf(TensorFuture future) {
  auto state = std::make_shared<Work::State>();
  state->rank = 2;
  state->pending.what = "all-reduce";
  state->future = std::move(future);
  state->tensors = {at::ones({2})};
  return state;
}

TEST(WorkTest, ADefaultWorkIsCompleteAndHasNoTensors) {
  Work work;
  work.wait();
  EXPECT_TRUE(work.completed());
  EXPECT_TRUE(work.future()->value().toTensorVector().empty());
}

TEST(WorkTest, AnOperationWithoutAFutureWasCompleteFromTheStart) {
  const std::shared_ptr<Work::State> state = StateOf(nullptr);
  Work work(state);
  EXPECT_TRUE(work.completed());
  work.wait();
  EXPECT_TRUE(work.future()->value().toTensorVector().at(0).is_same(state->tensors[0]));
}

TEST(WorkTest, ACompleteOperationOutlivesItsGroup) {
  const TensorFuture future = NewFuture();
  Work work(StateOf(future));
  EXPECT_FALSE(work.completed());
  future->markCompleted(std::vector<at::Tensor>());
  EXPECT_TRUE(work.completed());
  work.wait();
}

TEST(WorkTest, AnIncompleteOperationOfALostGroupIsAnErrorEachTime) {
  Work work(StateOf(NewFuture()));
  const Work copy = work;
  const std::string text =
      "rank 2: all-reduce was started before the process group was renewed, or destroyed";
  EXPECT_EQ(ErrorOf<CommunicationError>([&] { work.wait(); }), text);
  EXPECT_TRUE(copy.completed());  // ended, with an error
  EXPECT_EQ(ErrorOf<CommunicationError>([&] { work->wait(); }), text);
  EXPECT_EQ(ErrorOf<CommunicationError>([&] { Work(copy).wait(); }), text);
}

TEST(WorkTest, AFailedOperationOfALostGroupIsAnError) {
  const TensorFuture future = NewFuture();
  Work work(StateOf(future));
  future->setError(std::make_exception_ptr(std::runtime_error("broken pipe")));
  EXPECT_TRUE(work.completed());
  EXPECT_NE(ErrorOf<CommunicationError>([&] { work.wait(); }), "no error");
}

// The backend's own value may be other tensors than the program's.
TEST(WorkTest, TheValueOfTheFutureIsTheProgramsTensors) {
  const TensorFuture backend = NewFuture();
  const std::shared_ptr<Work::State> state = StateOf(backend);
  const Work work(state);
  const TensorFuture future = work;
  EXPECT_FALSE(future->completed());
  backend->markCompleted(std::vector<at::Tensor>{at::zeros({9})});
  EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(state->tensors[0]));

  state->value_is_tensors = true;
  EXPECT_EQ(work.future().get(), backend.get());
}

TEST(WorkTest, ThenPassesTheValueOn) {
  const TensorFuture backend = NewFuture();
  const Work work(StateOf(backend));
  const TensorFuture doubled = work.then([](c10::ivalue::Future& done) {
    return c10::IValue(done.value().toTensorVector().at(0) * 2);
  });
  EXPECT_FALSE(doubled->completed());
  backend->markCompleted(std::vector<at::Tensor>());
  EXPECT_EQ(doubled->value().toTensor().sum().item<float>(), 4);
}

}  // namespace
}  // namespace ddp
