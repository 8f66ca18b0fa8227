#include "elastic/agent/worker_environment_builder.h"

#include <signal.h>

#include <map>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::Contains;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;
using Environment = std::map<std::string, std::string>;

LaunchConfig Config(int nproc) {
  LaunchConfig config;
  config.job.run_id = "digits";
  config.job.role = "trainer";
  config.nproc_per_node = nproc;
  config.job.limits.max_restarts = 5;
  return config;
}

// This node is the second of three; the first has another role.
Round ThreeNodes() {
  Round round;
  round.generation = {.number = 4, .nonce = "00c0ffee00c0ffee"};
  round.restarts = 2;
  round.placement = {.group_rank = 1,
                     .group_world_size = 3,
                     .local_world_size = 2,
                     .first_rank = 1,
                     .world_size = 6,
                     .first_role_rank = 0,
                     .role_world_size = 5,
                     .master_addr = "10.0.0.1",
                     .master_port = 21'000};
  round.store_url = "redis://10.0.0.9:6379?prefix=p";
  return round;
}

TEST(WorkerEnvironmentBuilderTest, TellsAWorkerEverything) {
  const Environment environment =
      BuildWorkerEnvironment(Config(2), ThreeNodes(), /*local_rank=*/1, /*health_fd=*/17, {});
  const Environment expected = {
      {"LOCAL_RANK", "1"},
      {"RANK", "2"},
      {"GROUP_RANK", "1"},
      {"ROLE_RANK", "1"},
      {"ROLE_NAME", "trainer"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"WORLD_SIZE", "6"},
      {"GROUP_WORLD_SIZE", "3"},
      {"ROLE_WORLD_SIZE", "5"},
      {"MASTER_ADDR", "10.0.0.1"},
      {"MASTER_PORT", "21000"},
      {"TORCHELASTIC_RESTART_COUNT", "2"},
      {"TORCHELASTIC_MAX_RESTARTS", "5"},
      {"TORCHELASTIC_RUN_ID", "digits"},
      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
      {"TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"OMP_NUM_THREADS", "1"},
      {"DDP_STORE", "redis://10.0.0.9:6379?prefix=p"},
      {"DDP_GENERATION", "4"},
      {"DDP_GENERATION_NONCE", "00c0ffee00c0ffee"},
      {"DDP_HEALTH_FD", "17"},
  };
  EXPECT_EQ(environment, expected);
}

TEST(WorkerEnvironmentBuilderTest, KeepsTheUsersNumberOfThreads) {
  const Environment inherited = {{"OMP_NUM_THREADS", "8"}};
  EXPECT_THAT(BuildWorkerEnvironment(Config(2), ThreeNodes(), 0, 3, inherited),
              Not(Contains(Key("OMP_NUM_THREADS"))));
  EXPECT_FALSE(SetsOmpNumThreads(Config(2), inherited));
  EXPECT_TRUE(SetsOmpNumThreads(Config(2), {}));
}

TEST(WorkerEnvironmentBuilderTest, OneWorkerMayUseTheWholeMachine) {
  EXPECT_FALSE(SetsOmpNumThreads(Config(1), {}));
}

TEST(WorkerEnvironmentBuilderTest, PassesErrorHandlingThrough) {
  EXPECT_THAT(BuildWorkerEnvironment(Config(2), ThreeNodes(), 0, 3,
                                     {{"TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"}}),
              Contains(Pair("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")));
}

TEST(WorkerEnvironmentBuilderTest, NamesTheSignalsToHandle) {
  LaunchConfig config = Config(2);
  config.signals_to_handle = {SIGTERM, SIGUSR1};
  EXPECT_THAT(BuildWorkerEnvironment(config, ThreeNodes(), 0, 3, {}),
              Contains(Pair("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1")));
}

TEST(WorkerEnvironmentBuilderTest, AVirtualLocalRankSeesItsOwnDeviceAsTheFirst) {
  LaunchConfig config = Config(2);
  config.virtual_local_rank = true;
  const Environment all = BuildWorkerEnvironment(config, ThreeNodes(), 1, 3, {});
  EXPECT_THAT(all, Contains(Pair("LOCAL_RANK", "0")));
  EXPECT_THAT(all, Contains(Pair("RANK", "2")));
  EXPECT_THAT(all, Contains(Pair("CUDA_VISIBLE_DEVICES", "1")));
  const Environment some =
      BuildWorkerEnvironment(config, ThreeNodes(), 1, 3, {{"CUDA_VISIBLE_DEVICES", "4, GPU-ab"}});
  EXPECT_THAT(some, Contains(Pair("CUDA_VISIBLE_DEVICES", "GPU-ab")));
  const Environment none =
      BuildWorkerEnvironment(config, ThreeNodes(), 1, 3, {{"CUDA_VISIBLE_DEVICES", "4"}});
  EXPECT_THAT(none, Contains(Pair("CUDA_VISIBLE_DEVICES", "")));
  EXPECT_THAT(BuildWorkerEnvironment(Config(2), ThreeNodes(), 1, 3, {}),
              Not(Contains(Key("CUDA_VISIBLE_DEVICES"))));
}

TEST(WorkerEnvironmentBuilderTest, TellsGlooTheInterfaceUnlessTheUserDid) {
  LaunchConfig config = Config(1);
  config.socket_interface = "eth1";
  EXPECT_THAT(BuildWorkerEnvironment(config, ThreeNodes(), 0, 3, {}),
              Contains(Pair("GLOO_SOCKET_IFNAME", "eth1")));
  EXPECT_THAT(BuildWorkerEnvironment(config, ThreeNodes(), 0, 3, {{"GLOO_SOCKET_IFNAME", "ib0"}}),
              Contains(Pair("GLOO_SOCKET_IFNAME", "ib0")));
  EXPECT_THAT(BuildWorkerEnvironment(Config(1), ThreeNodes(), 0, 3, {}),
              Not(Contains(Key("GLOO_SOCKET_IFNAME"))));
}

TEST(WorkerEnvironmentBuilderTest, SubstitutesTheLocalRankWhereverItStands) {
  EXPECT_EQ(SubstituteLocalRank("--log=${local_rank}/${local_rank}.txt", 12), "--log=12/12.txt");
  EXPECT_EQ(SubstituteLocalRank("$local_rank ${rank}", 1), "$local_rank ${rank}");
}

}  // namespace
}  // namespace ddp::elastic
