// Defines tests whose ranks are real processes on this host. This library has main().
//
//   RANK_TEST(ReducerTest, Averages, 2) {  // runs in each of two processes
//     EXPECT_EQ(...);                      // a failed check fails the rank, and so the test case
//   }
//
// The block is the gtest case ReducerTest.Averages. The case starts two ranks of this binary, and
// each rank runs the block. The case fails when a rank fails, and then shows the output of every
// rank. The ranks of a case meet in an empty store of their own.
//
// A list of world sizes gives a case for each size. Other options are given by name:
//
//   RANK_TEST(ReducerTest, Averages, {2, 3}) {...}   // AveragesOn2, AveragesOn3
//   RANK_TEST(ReducerTest, Averages, .world_size = 2, .environment = {{"DDP_X", "1"}}) {...}
//
// For a case that starts its ranks itself, write an ordinary TEST and give its RankJob the name of
// a body. The body of a RANK_TEST has the name "ReducerTest.Averages".
//
//   RANK_BODY(Hang) { pause(); }
//
//   TEST(ReducerTest, EndsAtItsDeadline) {
//     const RankRun run = RunRanks({.body = "Hang", .store_url = NewStoreUrl(), ...});
//   }
//
// testing/ranks/rank_harness.h describes RankJob and a rank's environment. A rank has
// OMP_NUM_THREADS=1, so LibTorch computes with one thread in a rank.
//
// With DDP_TEST_DEVICE=sim (tools/test --device=sim), tensors and groups of the ranks are on the
// simulated device, and only RANK_TESTs run. A case that has no sense there says why:
//
//   RANK_TEST(ReducerTest, ReducesInPlace, .world_size = 2, .not_on_device = "memory of the host")
//
// NOT_ON_DEVICE("memory of the host"); before the first test says it for a whole file.
#ifndef DDP_TESTING_RANKS_RANK_TEST_H_
#define DDP_TESTING_RANKS_RANK_TEST_H_

#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "testing/ranks/rank_harness.h"

namespace ddp::testing {

// The store in which the ranks of a case meet.
enum class RankStore {
  kRedis,     // DDP_STORE names a store in the Redis server of this binary, as under ddprun
  kTcpStore,  // no DDP_STORE: rank 0 serves LibTorch's TCPStore at MASTER_PORT, as under torchrun
};

// One world size, or several. Implicit, so that `2` and `{2, 3}` are world sizes.
struct WorldSizes {
  WorldSizes(int size) : values{size} {}                            // NOLINT
  WorldSizes(std::initializer_list<int> sizes) : values(sizes) {}   // NOLINT
  WorldSizes(std::vector<int> sizes) : values(std::move(sizes)) {}  // NOLINT
  std::vector<int> values;
};

// A list with several values gives a case for each value, with a suffix: On2, On3; InRedis,
// OnTcpStore. Two such lists give a case for each pair: AveragesOn2InRedis.
struct RankTestOptions {
  WorldSizes world_size = 1;
  std::vector<RankStore> stores = {RankStore::kRedis};
  // See RankJob::environment.
  std::map<std::string, std::string> environment = {};
  // The rank that the body kills with SIGKILL. That rank must end by SIGKILL; all others must
  // succeed.
  int killed_rank = -1;
  // Why the case is skipped on the simulated device; empty: it runs there.
  std::string not_on_device = "";
};

// Returns the DDP_STORE of a new, empty store. The store is in the one Redis server of this binary.
// The first call starts the server; main() ends the server after the tests. Thread: the main
// thread, while tests run.
std::string NewStoreUrl();

// Returns whether the ranks are on the simulated device.
bool OnDevice();

namespace internal {

// These functions return true: variables are initialized with the result. A second body of one name
// is a CHECK failure.
bool RegisterNotOnDevice(const std::string& reason);
// Lets ranks on the simulated device call `prepare` before their body.
bool RegisterDevice(void (*prepare)());
bool RegisterRankBody(const std::string& name, void (*body)());
bool RegisterRankTest(const char* suite, const char* name, const char* file, int line,
                      const RankTestOptions& options, void (*body)());

}  // namespace internal
}  // namespace ddp::testing

// Defines a gtest case, or several, of ranks that run the following block. The arguments after
// suite and name are world sizes, or fields of RankTestOptions. A suite may also have ordinary
// TESTs.
#define RANK_TEST(suite, name, ...)                                                            \
  static void suite##_##name##_RankBody();                                                     \
  [[maybe_unused]] static const bool suite##_##name##_registered =                             \
      ::ddp::testing::internal::RegisterRankTest(#suite, #name, __FILE__, __LINE__,            \
                                                 ::ddp::testing::RankTestOptions{__VA_ARGS__}, \
                                                 suite##_##name##_RankBody);                   \
  static void suite##_##name##_RankBody()

#define NOT_ON_DEVICE(reason)                        \
  [[maybe_unused]] static const bool not_on_device = \
      ::ddp::testing::internal::RegisterNotOnDevice(reason)

// Defines a body for RankJob::body, without a case.
#define RANK_BODY(name)                                                   \
  static void name##_RankBody();                                          \
  [[maybe_unused]] static const bool name##_registered =                  \
      ::ddp::testing::internal::RegisterRankBody(#name, name##_RankBody); \
  static void name##_RankBody()

#endif  // DDP_TESTING_RANKS_RANK_TEST_H_
