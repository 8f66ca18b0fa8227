// Tests what a process holds while models with groups of their own come and go, and under limits of
// resources. DDP_TEST_GROUPS=1000 and --gtest_filter='*Soak' give a long run.
#include <torch/torch.h>

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/environment.h"
#include "ddp/comm/arena/arena.h"
#include "ddp/distributed_data_parallel.h"
#include "ddp/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/ranks/rank_test.h"

namespace ddp {
namespace {

NOT_ON_DEVICE("the subject is shared memory");

using ::ddp::testing::NewStoreUrl;
using ::ddp::testing::RanksSucceed;
using ::ddp::testing::RankStore;
using ::ddp::testing::RankTestOptions;
using ::testing::HasSubstr;
using ::testing::Not;
using torch::Tensor;

// The subject is what shared memory does, whatever DDP_BACKEND says of other tests.
RankTestOptions InSharedMemory(RankTestOptions options) {
  options.environment["DDP_BACKEND"] = "shm";
  return options;
}

int Groups(int fewest) {
  const auto wanted = EnvironmentVariable("DDP_TEST_GROUPS");
  return wanted.has_value() ? std::max(fewest, std::atoi(wanted->c_str())) : fewest;
}

// The mappings, descriptors and threads of this process at the moment.
struct Held {
  Held() {
    arena = internal::Arena::OfProcess().statistics();
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line); ++mappings) {
      size_t end = 0;
      const size_t begin = std::stoull(line, &end, 16);
      const size_t bytes = std::stoull(line.substr(end + 1), nullptr, 16) - begin;
      if (line.find("ddp-arena") != std::string::npos) arenas_mib += bytes >> 20;
      if (line.find("ddp-group") != std::string::npos) ++segments;
    }
    const auto count = [](const char* folder) {
      return std::distance(std::filesystem::directory_iterator(folder), {});
    };
    descriptors = count("/proc/self/fd");
    threads = count("/proc/self/task");
  }

  int64_t mappings = 0, segments = 0, descriptors = 0, threads = 0;
  size_t arenas_mib = 0;
  internal::Arena::Statistics arena;
};

std::ostream& operator<<(std::ostream& out, const Held& held) {
  return out << held.mappings << " mappings, " << held.segments << " segments, " << held.arenas_mib
             << " MiB of addresses of arenas, " << held.descriptors << " descriptors, "
             << held.threads << " threads, arena: " << held.arena.bytes_in_use << " in use, "
             << held.arena.bytes_touched << " touched, " << held.arena.capacity << " capacity, "
             << held.arena.outliving << " outliving, " << held.arena.refusals << " refusals";
}

// The arena of this process, and one mapping of each rank's.
void ExpectArenasAreMappedOnce(const Held& now, int ranks) {
  EXPECT_LE(now.arenas_mib, (ranks + 1) * (internal::Arena::OfProcess().reservation() >> 20));
}

void ExpectNoMore(const Held& now, const Held& before, int ranks) {
  SCOPED_TRACE(::testing::Message() << "before: " << before << "\nnow:    " << now);
  ExpectArenasAreMappedOnce(now, ranks);
  // A slower rank may still read the block of the last group. LibTorch's threads come and go.
  EXPECT_LE(now.segments, before.segments + 2);
  EXPECT_LE(now.mappings, before.mappings + 40);
  EXPECT_LE(now.descriptors, before.descriptors + 8);
  EXPECT_LE(now.threads, before.threads + 4);
  EXPECT_LE(now.arena.bytes_touched, before.arena.bytes_touched + (size_t{1} << 20));
  EXPECT_LE(now.arena.capacity, before.arena.capacity + (size_t{1} << 20));
}

// A model with a weight of 16 KiB, which is reduced where it lies, and a bias, which is not.
struct GroupModel {
  explicit GroupModel(const std::shared_ptr<ProcessGroup>& given)
      : group(given), linear(64, 64), model(linear, given) {}

  void Step() {
    linear->zero_grad();
    model.forward(torch::full({1, 64}, 1.0 + group->rank())).sum().backward();
    const double average = (1.0 + group->size()) / 2;
    ASSERT_TRUE(torch::equal(linear->weight.grad(), torch::full({64, 64}, average)))
        << linear->weight.grad().min() << " to " << linear->weight.grad().max();
    ASSERT_TRUE(torch::equal(linear->bias.grad(), torch::ones({64})));
  }
  std::string strategy() const { return model.logging_data().reduction_strategy; }

  std::shared_ptr<ProcessGroup> group;
  torch::nn::Linear linear;
  DistributedDataParallel<torch::nn::LinearImpl> model;
};

// Nobody waits for the others before a group ends.
void ModelsComeAndGo(int count, const std::function<std::shared_ptr<ProcessGroup>()>& make) {
  std::unique_ptr<Held> before;
  int ranks = 0;
  for (int i = 0; i < count && !::testing::Test::HasFatalFailure(); ++i) {
    if (i == count / 2) before = std::make_unique<Held>();
    GroupModel one(make());
    ranks = one.group->size();
    for (int step = 0; step < 3; ++step) one.Step();
    const bool in_place = one.group->size() > 1 && one.group->backend() == "shm";
    if (in_place) {
      ASSERT_THAT(one.strategy(), HasSubstr("in place: 1 gradients")) << "model " << i;
    }
  }
  if (before == nullptr) return;
  const Held now;
  ExpectNoMore(now, *before, ranks);
  std::cout << count << " groups: " << now << std::endl;
}

std::vector<int> AllRanks(const ProcessGroup& world) {
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

RANK_TEST(ManyGroupsTest, NewGroupsComeAndGo, InSharedMemory({{1, 2, 3, 4}})) {
  const auto world = init_process_group();
  ModelsComeAndGo(Groups(16), [&] { return world->new_group(AllRanks(*world)); });
}

RANK_TEST(ManyGroupsTest, NewGroupsComeAndGoOverGloo, .world_size = 3,
          .environment = {{"DDP_BACKEND", "gloo"}}) {
  const auto world = init_process_group();
  ModelsComeAndGo(Groups(8), [&] { return world->new_group(AllRanks(*world)); });
}

RANK_TEST(ManyGroupsTest, InitializedGroupsComeAndGo,
          InSharedMemory({.world_size = 3, .stores = {RankStore::kRedis, RankStore::kTcpStore}})) {
  ModelsComeAndGo(Groups(16), [] { return init_process_group(); });
}

RANK_TEST(ManyGroupsTest, ManyLiveAtOnce, InSharedMemory({{1, 2, 3}})) {
  const auto world = init_process_group();
  std::vector<std::unique_ptr<GroupModel>> models;
  for (int i = 0; i < std::min(Groups(12), 200); ++i) {
    models.push_back(std::make_unique<GroupModel>(world->new_group(AllRanks(*world))));
  }
  for (const auto& one : models) {
    one->Step();
    if (world->size() > 1) {
      ASSERT_THAT(one->strategy(), HasSubstr("in place: 1 gradients"));
    }
  }
  const Held now;
  std::cout << models.size() << " live: " << now << std::endl;
  ExpectArenasAreMappedOnce(now, world->size());
}

// The gradients of models that have gone take no room from those that live.
RANK_TEST(ManyGroupsTest, GradientsOutliveTheirModels, InSharedMemory({3})) {
  const auto world = init_process_group();
  std::vector<Tensor> kept;
  for (int i = 0; i < 24; ++i) {
    GroupModel one(world->new_group(AllRanks(*world)));
    for (int step = 0; step < 2; ++step) one.Step();
    ASSERT_THAT(one.strategy(), HasSubstr("in place: 1 gradients")) << "model " << i;
    ASSERT_THAT(one.strategy(), Not(HasSubstr("room"))) << "model " << i;
    kept.push_back(one.linear->weight.grad());
  }
  for (const Tensor& gradient : kept) EXPECT_EQ(gradient.min().item<float>(), 2);
}

TEST(ManyGroupsTest, Soak) {
  const int count = Groups(0);
  if (count == 0) GTEST_SKIP() << "DDP_TEST_GROUPS says how many groups";
  for (const char* const body :
       {"NewGroupsComeAndGo", "InitializedGroupsComeAndGo", "ManyLiveAtOnce"}) {
    EXPECT_TRUE(RanksSucceed({.world_size = 3,
                              .body = absl::StrCat("ManyGroupsTest.", body),
                              .store_url = NewStoreUrl(),
                              .environment = {{"DDP_BACKEND", "shm"}},
                              .deadline = absl::Minutes(2) + count * absl::Seconds(2)}));
  }
}

// ---- Limits of resources.

void Limit(__rlimit_resource resource, rlim_t bytes) {
  const rlimit limit = {.rlim_cur = bytes, .rlim_max = bytes};
  ASSERT_EQ(::setrlimit(resource, &limit), 0);
}

// `ulimit -f 1024`: no SIGXFSZ. `backend` is empty, so that the group may fall back to Gloo.
RANK_TEST(LimitsTest, ALimitOfFileSizesGivesFlatBuckets, .world_size = 2,
          .environment = {{"DDP_BACKEND", ""}}) {
  Limit(RLIMIT_FSIZE, 1 << 20);
  GroupModel one(init_process_group());
  for (int step = 0; step < 3; ++step) one.Step();
  EXPECT_EQ(one.group->backend(), "gloo");
  EXPECT_THAT(one.strategy(), Not(HasSubstr("in place")));
}

// `ulimit -v`: each of eight ranks maps the arenas of all.
RANK_TEST(LimitsTest, ALimitOfAddressesServesEightRanks, InSharedMemory({8})) {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  Limit(RLIMIT_AS, pages * 4096 + (size_t{4} << 30));
  GroupModel one(init_process_group());
  for (int step = 0; step < 3; ++step) one.Step();
  EXPECT_THAT(one.strategy(), HasSubstr("in place: 1 gradients"));
}

// The ranks of one host that nobody has told so.
RANK_TEST(LimitsTest, RanksFindOutThatTheyStandOnOneHost, .world_size = 3,
          .stores = {RankStore::kRedis, RankStore::kTcpStore},
          .environment = {{"DDP_BACKEND", ""}, {"LOCAL_WORLD_SIZE", ""}, {"LOCAL_RANK", ""}}) {
  GroupModel one(init_process_group());
  for (int step = 0; step < 3; ++step) one.Step();
  EXPECT_EQ(one.group->backend(), "shm");
}

}  // namespace
}  // namespace ddp
