#include "testing/backend/test_threads.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "base/mutex.h"

namespace ddp::testing {
namespace {

TEST(TestThreadsTest, RunsEveryRankAndTheConductor) {
  Mutex mutex;
  std::set<int> ranks;
  const auto add = [&](int rank) {
    MutexLock lock(mutex);
    ranks.insert(rank);
  };
  RunThreads(3, add, [&] { add(100); });
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 100}));
  RunThreads(1, add);
}

void ThrowOnRank1(int rank) {
  if (rank == 1) throw std::runtime_error("no such file");
}

TEST(TestThreadsTest, AnExceptionIsAFailureOfTheCase) {
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(RunThreads(2, ThrowOnRank1),
                                         "an exception ended rank 1: no such file");
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(RunThreads(
                                             1, [](int) {}, [] { ThrowOnRank1(1); }),
                                         "an exception ended the conductor: no such file");
}

TEST(TestThreadsTest, AFailedCheckNamesItsRank) {
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(RunThreads(3, [](int rank) { EXPECT_LT(rank, 2); }),
                                         "rank 2");
}

const bool registered =
    internal::RegisterSizedTest("TestThreadsTest", "HasACase", __FILE__, __LINE__, {2, 5},
                                [](int size) { EXPECT_TRUE(size == 2 || size == 5); });

TEST(TestThreadsTest, ASizeIsPartOfTheName) {
  EXPECT_TRUE(registered);
  std::set<std::string> names;
  const ::testing::TestSuite* const suite =
      ::testing::UnitTest::GetInstance()->current_test_suite();
  for (int i = 0; i < suite->total_test_count(); ++i) names.insert(suite->GetTestInfo(i)->name());
  EXPECT_EQ(names.count("HasACaseOn2"), 1u);
  EXPECT_EQ(names.count("HasACaseOn5"), 1u);
  EXPECT_EQ(names.count("HasACase"), 0u);
}

}  // namespace
}  // namespace ddp::testing
