#include "testing/ranks/rank_test.h"

#include <glog/logging.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "store/redis/redis_endpoint.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::testing {
namespace {

// The bodies of this binary. Static like gtest's own list of tests: definitions add to it before
// main().
std::map<std::string, std::function<int()>>& Bodies() {
  static auto& bodies = *new std::map<std::string, std::function<int()>>;
  return bodies;
}

// The Redis server of this binary; null until a case needs it, and again after the tests.
std::unique_ptr<RedisFixture>& Server() {
  static auto& server = *new std::unique_ptr<RedisFixture>;
  return server;
}

// What the ranks need on the simulated device.
struct Device {
  void (*prepare)() = nullptr;
  std::string not_for_this_file;  // the reason
  std::string cases;              // a filter of gtest's: the RANK_TESTs
};

Device& TheDevice() {
  static auto& device = *new Device;
  return device;
}

struct RankCase {
  const char* file = "";
  int line = 0;
  RankJob job;
  RankStore store = RankStore::kRedis;
  int killed_rank = -1;
  std::string not_on_device = "";
};

// Starts the ranks of one case and checks how they end.
class RankCaseTest : public ::testing::Test {
 public:
  explicit RankCaseTest(RankCase rank_case) : case_(std::move(rank_case)) {}

 private:
  void TestBody() override {
    if (OnDevice() && !case_.not_on_device.empty()) GTEST_SKIP() << case_.not_on_device;
    RankJob job = case_.job;
    if (case_.store == RankStore::kRedis) job.store_url = NewStoreUrl();
    const RankRun run = RunRanks(job);
    const bool as_expected =
        std::all_of(run.ranks.begin(), run.ranks.end(), [this](const RankResult& rank) {
          // A rank that is killed, or calls _exit(0), does not report its failed checks.
          if (absl::StrContains(rank.output, ": Failure\n")) return false;
          if (rank.rank != case_.killed_rank) return rank.succeeded();
          return rank.signal == SIGKILL && !rank.timed_out;
        });
    if (!as_expected) ADD_FAILURE_AT(case_.file, case_.line) << "\n" << run.Describe();
  }

  const RankCase case_;
};

}  // namespace

std::string NewStoreUrl() {
  static int count = 0;
  if (Server() == nullptr) Server() = RedisFixture::Start();
  return store::FormatStoreAddress(Server()->Address(absl::StrCat("store-", ++count)));
}

bool OnDevice() { return getenv("DDP_TEST_DEVICE") != nullptr; }

namespace internal {

bool RegisterNotOnDevice(const std::string& reason) {
  TheDevice().not_for_this_file = reason;
  return true;
}

bool RegisterDevice(void (*prepare)()) {
  TheDevice().prepare = prepare;
  return true;
}

bool RegisterRankBody(const std::string& name, void (*body)()) {
  const bool added = Bodies()
                         .emplace(name,
                                  [body] {
                                    if (OnDevice()) TheDevice().prepare();
                                    body();
                                    return 0;
                                  })
                         .second;
  CHECK(added) << "two rank bodies have the name " << name;
  return true;
}

bool RegisterRankTest(const char* suite, const char* name, const char* file, int line,
                      const RankTestOptions& options, void (*body)()) {
  CHECK(!options.world_size.values.empty() && !options.stores.empty()) << name << " has no case";
  const std::string body_name = absl::StrCat(suite, ".", name);
  RegisterRankBody(body_name, body);
  for (const int size : options.world_size.values) {
    CHECK_GE(size, 1) << name;
    CHECK_LT(options.killed_rank, size) << name << " kills a rank that does not exist";
    for (const RankStore store : options.stores) {
      std::string case_name = name;
      if (options.world_size.values.size() > 1) absl::StrAppend(&case_name, "On", size);
      if (options.stores.size() > 1) {
        absl::StrAppend(&case_name, store == RankStore::kRedis ? "InRedis" : "OnTcpStore");
      }
      const RankCase rank_case = {
          .file = file,
          .line = line,
          .job = {.world_size = size, .body = body_name, .environment = options.environment},
          .store = store,
          .killed_rank = options.killed_rank,
          .not_on_device = options.not_on_device.empty() ? TheDevice().not_for_this_file
                                                         : options.not_on_device};
      absl::StrAppend(&TheDevice().cases, suite, ".", case_name, ":");
      // The type of the fixture is that of TEST, so that a suite can have both.
      ::testing::RegisterTest(
          suite, case_name.c_str(), nullptr, nullptr, file, line,
          [rank_case]() -> ::testing::Test* { return new RankCaseTest(rank_case); });
    }
  }
  return true;
}

}  // namespace internal
}  // namespace ddp::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (const auto exit_code = ddp::testing::RunRankBody(ddp::testing::Bodies())) return *exit_code;
  if (ddp::testing::OnDevice()) {
    const auto& device = ddp::testing::TheDevice();
    CHECK(device.prepare != nullptr) << "DDP_TEST_DEVICE is set: this test has no device";
    if (GTEST_FLAG_GET(filter) == "*") GTEST_FLAG_SET(filter, device.cases);
  }
  const int result = RUN_ALL_TESTS();
  ddp::testing::Server().reset();
  return result;
}
