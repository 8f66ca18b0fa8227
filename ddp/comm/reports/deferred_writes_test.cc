#include "ddp/comm/reports/deferred_writes.h"

#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::ElementsAre;

// Calls a function in its destructor.
class AtExit {
 public:
  explicit AtExit(std::function<void()> action) : action_(std::move(action)) {}
  ~AtExit() { action_(); }

 private:
  const std::function<void()> action_;
};

void UnwindThrough(const std::function<void()>& action) {
  try {
    const AtExit at_exit(action);
    throw std::runtime_error("unwinds");
  } catch (const std::runtime_error&) {
  }
}

TEST(DeferredWritesTest, RunsAtOnceOnTheCallersThread) {
  DeferredWrites writes;
  std::thread::id ran_on;
  writes.Run([&] { ran_on = std::this_thread::get_id(); });
  EXPECT_EQ(ran_on, std::this_thread::get_id());
}

TEST(DeferredWritesTest, AnUnwindingThreadHandsItsWritesOver) {
  DeferredWrites writes;
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  const auto write = [&](int number) {
    order.push_back(number);
    threads.push_back(std::this_thread::get_id());
  };
  UnwindThrough([&] {
    writes.Run([&] { write(1); });
    writes.Run([&] { write(2); });
  });
  writes.Run([&] { write(3); });  // after the others, though no exception unwinds
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
  EXPECT_NE(threads[0], std::this_thread::get_id());
  EXPECT_EQ(threads[1], threads[0]);
  EXPECT_EQ(threads[2], std::this_thread::get_id());
}

TEST(DeferredWritesTest, AWriteForLaterRunsOnTheOtherThread) {
  DeferredWrites writes;
  std::thread::id ran_on;
  writes.RunLater([&] { ran_on = std::this_thread::get_id(); });
  writes.Flush();
  EXPECT_NE(ran_on, std::thread::id());
  EXPECT_NE(ran_on, std::this_thread::get_id());
}

TEST(DeferredWritesTest, FlushAndTheDestructorAwaitTheWrites) {
  bool flushed = false;
  bool at_the_end = false;
  {
    DeferredWrites writes;
    writes.Flush();
    UnwindThrough([&] { writes.Run([&] { flushed = true; }); });
    writes.Flush();
    EXPECT_TRUE(flushed);
    UnwindThrough([&] { writes.Run([&] { at_the_end = true; }); });
  }
  EXPECT_TRUE(at_the_end);
}

}  // namespace
}  // namespace ddp::internal
