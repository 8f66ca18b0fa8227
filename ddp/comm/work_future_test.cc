#include "ddp/comm/work_future.h"

#include <chrono>
#include <stdexcept>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::HasSubstr;

// A work without a future. Its wait() returns `result`.
class WorkWithoutFuture : public c10d::Work {
 public:
  explicit WorkWithoutFuture(bool result) : result_(result) {}
  bool wait(std::chrono::milliseconds) override { return result_; }

 private:
  const bool result_;
};

class BrokenWork : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { throw std::runtime_error("broken pipe"); }
};

// Blocks until `future` is complete. Returns its error, or an empty text.
std::string ErrorOf(const WorkFuture& future) {
  try {
    future->waitAndThrow();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(WorkFutureTest, AWorkWithoutAFutureGetsOne) {
  const at::Tensor tensor = at::ones({2});
  const WorkFuture future = FutureOfWork(c10::make_intrusive<WorkWithoutFuture>(true), {tensor});
  EXPECT_EQ(ErrorOf(future), "");
  EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(tensor));
}

TEST(WorkFutureTest, AnAbortedWorkIsAnError) {
  const WorkFuture future = FutureOfWork(c10::make_intrusive<WorkWithoutFuture>(false), {});
  EXPECT_THAT(ErrorOf(future), HasSubstr("the backend has aborted it"));
}

// The last step runs without gradients, whatever the thread that completes the future.
TEST(WorkFutureTest, TheLastStepRunsBeforeTheFutureIsComplete) {
  const at::Tensor parameter = at::ones({1}).requires_grad_();
  const at::Tensor result = at::ones({1});
  bool gradients = true;
  const WorkFuture future =
      Then(CompleteFuture({}), [&] { gradients = (parameter * 2).requires_grad(); }, {result});
  ASSERT_TRUE(future->completed());
  EXPECT_FALSE(gradients);
  EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(result));
}

TEST(WorkFutureTest, AnErrorSkipsTheLastStep) {
  bool ran = false;
  const WorkFuture broken = FutureOfWork(c10::make_intrusive<BrokenWork>(), {});
  const WorkFuture after = Then(broken, [&] { ran = true; }, {});
  EXPECT_THAT(ErrorOf(after), HasSubstr("broken pipe"));
  EXPECT_FALSE(ran);
  const WorkFuture own =
      Then(CompleteFuture({}), [] { throw std::runtime_error("cannot divide"); }, {});
  EXPECT_THAT(ErrorOf(own), HasSubstr("cannot divide"));
}

}  // namespace
}  // namespace ddp::internal
