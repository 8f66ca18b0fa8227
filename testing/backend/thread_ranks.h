// Runs ranks as threads of the test's process, on a FakeNetwork: for tests of decisions, which need
// neither processes nor a real network.
//
//   THREAD_RANK_TEST(JoinTest, NamesDisagreement, 3) {  // runs in each of three threads
//     Summer summer(group);                             // `group` is the rank's process group
//     EXPECT_EQ(...);                                   // a failed check fails the test case
//   }
//
// The ranks of a case meet in an empty store of their own. Several world sizes give a case for
// each: THREAD_RANK_TEST(ReducerTest, Averages, 2, 3) gives AveragesOn2 and AveragesOn3. A suite
// may also have ordinary TESTs and RANK_TESTs.
//
// A body must not use state that all threads of a process share: the default random generator, the
// environment. Standard error may be captured on one rank only, and has the lines of all. A rank
// that ends its process needs a RANK_TEST.
//
// On the simulated device (see testing/ranks/rank_test.h) the ranks are processes, as those of a
// RANK_TEST. The last argument may be the reason why a case is skipped there.
//
// A test that scripts the network calls RunThreadRanks() in an ordinary TEST.
#ifndef DDP_TESTING_BACKEND_THREAD_RANKS_H_
#define DDP_TESTING_BACKEND_THREAD_RANKS_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "ddp/process_group.h"
#include "testing/backend/fake_backend.h"
#include "testing/backend/test_threads.h"
#include "testing/ranks/rank_test.h"

namespace ddp::testing {

struct ThreadRankOptions {
  int world_size = 1;
  FakeNetwork::Options network = {};
  ProcessGroupOptions group = {};  // without a backend
  // Steers the network while the ranks run, on the thread of the test.
  std::function<void(FakeNetwork&)> conduct = nullptr;
};

// Runs `body` in each rank, as RunThreads() does. The body owns its group. The peers get a failure
// report when an exception leaves the body.
inline void RunThreadRanks(const ThreadRankOptions& options,
                           const std::function<void(std::shared_ptr<ProcessGroup>)>& body) {
  FakeNetwork network(options.network);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int size = options.world_size;
  const auto run_rank = [&](int rank) {
    const ProcessGroup::Place place{
        .rank = rank, .size = size, .local_rank = rank, .local_size = size};
    ProcessGroupOptions group = options.group;
    group.make_backend = network.maker();
    body(std::make_shared<ProcessGroup>(store, place, group));
  };
  RunThreads(size, run_rank, [&] {
    if (options.conduct) options.conduct(network);
  });
}

namespace internal {

// The arguments of a THREAD_RANK_TEST.
struct ThreadRankCases {
  template <typename... Arguments>
  ThreadRankCases(Arguments... arguments) {  // NOLINT
    (Add(arguments), ...);
  }
  void Add(int size) { sizes.push_back(size); }
  void Add(const char* reason) { not_on_device = reason; }

  std::vector<int> sizes;
  std::string not_on_device;
};

inline bool RegisterThreadRankTest(const char* suite, const char* name, const char* file, int line,
                                   const ThreadRankCases& cases,
                                   void (*thread)(std::shared_ptr<ProcessGroup>),
                                   void (*process)()) {
  const auto& [sizes, not_on_device] = cases;
  if (OnDevice()) {
    return RegisterRankTest(suite, name, file, line,
                            {.world_size = sizes, .not_on_device = not_on_device}, process);
  }
  return RegisterSizedTest(suite, name, file, line, sizes,
                           [thread](int size) { RunThreadRanks({.world_size = size}, thread); });
}

}  // namespace internal
}  // namespace ddp::testing

// Defines a gtest case, or several, of ranks that run the following block. The arguments after
// suite and name are world sizes. The block may reset `group`: the rank then leaves the group.
#define THREAD_RANK_TEST(suite, name, ...)                                         \
  static void suite##_##name##_Body(std::shared_ptr<::ddp::ProcessGroup> group);   \
  [[maybe_unused]] static const bool suite##_##name##_registered =                 \
      ::ddp::testing::internal::RegisterThreadRankTest(                            \
          #suite, #name, __FILE__, __LINE__, {__VA_ARGS__}, suite##_##name##_Body, \
          [] { suite##_##name##_Body(::ddp::init_process_group()); });             \
  static void suite##_##name##_Body(std::shared_ptr<::ddp::ProcessGroup> group)

#endif  // DDP_TESTING_BACKEND_THREAD_RANKS_H_
