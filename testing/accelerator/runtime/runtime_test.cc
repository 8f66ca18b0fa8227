#include "testing/accelerator/runtime/runtime.h"

#include <cmath>
#include <future>
#include <stdexcept>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr StreamPlace kDefault{};
constexpr StreamPlace kSide{.stream = 1};

float& FloatAt(Runtime& runtime, void* pointer) {
  return *static_cast<float*>(runtime.KernelView(pointer));
}

TEST(RuntimeTest, KernelsSeeDeviceMemory) {
  Runtime runtime({});
  void* pointer = runtime.Allocate({.device = 1}, 4);
  EXPECT_EQ(runtime.DeviceOf(pointer), 1);
  EXPECT_FALSE(runtime.IsPinned(pointer));
  runtime.Launch({.device = 1}, "fill", [&] { FloatAt(runtime, pointer) = 3; });
  float result = 0;
  runtime.Launch({.device = 1}, "copy", [&] { result = FloatAt(runtime, pointer); });
  runtime.Synchronize(StreamPlace{.device = 1});
  EXPECT_EQ(result, 3);
  float on_host = 5;
  EXPECT_EQ(runtime.KernelView(&on_host), &on_host);
  EXPECT_EQ(runtime.DeviceOf(&on_host), std::nullopt);
}

TEST(RuntimeTest, FreedMemoryIsNaNAndTheSameStreamsNext) {
  Runtime runtime({});
  void* pointer = runtime.Allocate(kDefault, 1000);
  runtime.Launch(kDefault, "fill", [&] { FloatAt(runtime, pointer) = 3; });
  runtime.Free(pointer);
  EXPECT_EQ(runtime.Allocate(kDefault, 1000), pointer);
  float result = 0;
  runtime.Launch(kDefault, "read", [&] { result = FloatAt(runtime, pointer); });
  runtime.Synchronize(kDefault);
  EXPECT_TRUE(std::isnan(result));
}

TEST(RuntimeTest, AFreedBlockRestsWhileARecordedStreamUsesIt) {
  Runtime runtime({});
  std::promise<void> released;
  void* pointer = runtime.Allocate(kDefault, 4);
  runtime.Launch(kDefault, "fill", [&] { FloatAt(runtime, pointer) = 3; });
  runtime.Synchronize(kDefault);
  float result = 0;
  runtime.Launch(kSide, "read", [&] {
    released.get_future().wait();
    result = FloatAt(runtime, pointer);
  });
  runtime.RecordUse(pointer, kSide);
  runtime.Free(pointer);
  EXPECT_NE(runtime.Allocate(kDefault, 4), pointer);
  released.set_value();
  runtime.Synchronize(kSide);
  EXPECT_EQ(result, 3);
  EXPECT_EQ(runtime.Allocate(kDefault, 4), pointer);
}

TEST(RuntimeTest, PinnedMemoryRestsWhileAStreamUsesIt) {
  Runtime runtime({});
  std::promise<void> released;
  auto* pointer = static_cast<float*>(runtime.AllocatePinned(4));
  EXPECT_TRUE(runtime.IsPinned(pointer));
  EXPECT_TRUE(std::isnan(*pointer));
  *pointer = 3;
  float result = 0;
  runtime.Launch(kDefault, "read", [&] {
    released.get_future().wait();
    result = *pointer;
  });
  runtime.RecordUse(pointer, kDefault);
  runtime.Free(pointer);
  EXPECT_NE(runtime.AllocatePinned(4), pointer);
  released.set_value();
  runtime.Synchronize(kDefault);
  EXPECT_EQ(result, 3);
  EXPECT_EQ(runtime.AllocatePinned(4), pointer);
  EXPECT_TRUE(std::isnan(*pointer));
}

TEST(RuntimeTest, TheMemoryLimitCountsWhatRestsButGetsItBack) {
  Runtime runtime({.memory_limit = 4096});
  void* first = runtime.Allocate(kDefault, 4096);
  EXPECT_THAT([&] { runtime.Allocate(kDefault, 8); },
              ThrowsMessage<DeviceError>(HasSubstr("out of memory on device 0: 8 bytes wanted, "
                                                   "4096 allocated, limit 4096")));
  runtime.Launch(kSide, "use", [] {});
  runtime.RecordUse(first, kSide);
  runtime.Free(first);
  EXPECT_NE(runtime.Allocate(kDefault, 8), nullptr);
  EXPECT_NE(runtime.Allocate({.device = 1}, 4096), nullptr);
}

TEST(RuntimeTest, EachRecordMakesAnEventAnotherPoint) {
  Runtime runtime({});
  std::promise<void> released;
  Event event(/*timed=*/true);
  EXPECT_TRUE(runtime.Query(event));
  runtime.Record(event, kDefault);
  runtime.Synchronize(event);
  runtime.Block(event, kSide);
  runtime.Launch(kDefault, "block", [&] { released.get_future().wait(); });
  runtime.Record(event, kDefault);
  EXPECT_FALSE(runtime.Query(event));
  runtime.Synchronize(kSide);  // the wait is for the first point
  released.set_value();
  Event end(/*timed=*/true);
  runtime.Record(end, kDefault);
  runtime.Synchronize(end);
  EXPECT_GE(runtime.ElapsedMs(event, end), 0);
  EXPECT_THROW(runtime.ElapsedMs(event, Event()), DeviceError);
}

TEST(RuntimeTest, AFailedKernelBreaksItsDevice) {
  Runtime runtime({.fail_kernel = 2});
  bool ran = false;
  runtime.Launch(kDefault, "add", [] {});
  runtime.Launch(kDefault, "mul", [] {});
  const auto later_call = [&] {
    runtime.Launch(kDefault, "sub", [&] { ran = true; });
    runtime.Synchronize(kDefault);
  };
  const auto message = "kernel 2 (mul) failed: it fails by DDP_SIM_FAIL_KERNEL";
  EXPECT_THAT(later_call, ThrowsMessage<DeviceError>(message));
  EXPECT_THAT(later_call, ThrowsMessage<DeviceError>(message));
  EXPECT_FALSE(ran);
  EXPECT_NO_THROW(runtime.SynchronizeDevice(1));
}

TEST(RuntimeTest, LaunchBlockingThrowsAtTheLaunch) {
  Runtime runtime({.launch_blocking = true});
  EXPECT_THROW(runtime.Launch(kDefault, "k", [] { throw std::runtime_error("no"); }), DeviceError);
}

TEST(RuntimeTest, SynchronizationsBeyondTheBudgetThrow) {
  Runtime runtime({.sync_budget = 2});
  for (int i = 0; i < 5; ++i) runtime.Synchronize(kDefault);
  runtime.BeginStep();
  runtime.Synchronize(kDefault);
  runtime.Synchronize(Event());
  EXPECT_EQ(runtime.step_syncs(), 2);
  EXPECT_THAT([&] { runtime.SynchronizeDevice(0); },
              ThrowsMessage<DeviceError>(
                  HasSubstr("host synchronization 3 of a step; DDP_SIM_SYNC_BUDGET allows 2")));
  runtime.BeginStep();
  runtime.Synchronize(kDefault);
}

TEST(RuntimeTest, StreamsOfThePoolComeInTurnAndNewOnesAreApart) {
  Runtime runtime({});
  const int64_t first = runtime.PoolStream(0);
  EXPECT_NE(runtime.PoolStream(0), first);
  EXPECT_GT(runtime.NewStream(0), Runtime::kPoolStreams);
  EXPECT_NE(runtime.NewStream(0), runtime.NewStream(0));
  runtime.Launch({.stream = first}, "work", [] {});
  runtime.SynchronizeDevice(0);
  EXPECT_TRUE(runtime.Query(StreamPlace{.stream = first}));
}

}  // namespace
}  // namespace ddp::testing
