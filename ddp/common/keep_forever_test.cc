#include "ddp/common/keep_forever.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

TEST(KeepForeverTest, KeepsWhatAllThreadsGive) {
  constexpr int kThreads = 4;
  constexpr int kValues = 1000;
  static std::atomic<int> destroyed = 0;
  std::vector<std::weak_ptr<int>> given(kThreads * kValues);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([thread, &given] {
      for (int i = 0; i < kValues; ++i) {
        std::shared_ptr<int> value(new int(i), [](const int* gone) {
          ++destroyed;
          delete gone;
        });
        given[thread * kValues + i] = value;
        KeepForever(std::move(value));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& value : given) EXPECT_FALSE(value.expired());
  EXPECT_EQ(destroyed, 0);
}

}  // namespace
}  // namespace ddp::internal
