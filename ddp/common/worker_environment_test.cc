#include "ddp/common/worker_environment.h"

#include <map>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::internal {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<WorkerEnvironment> Parse(const std::map<std::string, std::string>& variables) {
  return WorkerEnvironment::Parse([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  });
}

TEST(WorkerEnvironmentTest, ReadsWhatTheLauncherSays) {
  const auto env = Parse({{"RANK", "3"},
                          {"WORLD_SIZE", "8"},
                          {"LOCAL_RANK", "1"},
                          {"LOCAL_WORLD_SIZE", "2"},
                          {"DDP_STORE", "unix:///tmp/s?prefix=p"},
                          {"DDP_GENERATION", "4"},
                          {"TORCHELASTIC_RESTART_COUNT", "3"},
                          {"TORCHELASTIC_MAX_RESTARTS", "5"},
                          {"DDP_HEALTH_FD", "7"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_EQ(env->rank, 3);
  EXPECT_EQ(env->world_size, 8);
  EXPECT_EQ(env->local_rank, 1);
  EXPECT_EQ(env->local_world_size, 2);
  EXPECT_EQ(env->generation, 4u);
  EXPECT_EQ(env->restart_count, 3);
  EXPECT_EQ(env->max_restarts, 5);
  EXPECT_EQ(env->health_fd, 7);
}

TEST(WorkerEnvironmentTest, ThePlaceOnTheHostIsNotAssumed) {
  const auto env = Parse(
      {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "2950"}});
  ASSERT_TRUE(env.ok()) << env.status();
  EXPECT_EQ(env->local_rank, 1);
  EXPECT_FALSE(env->has_local_rank);
  EXPECT_EQ(env->local_world_size, 0);
  EXPECT_EQ(env->master_port, 2950);
  EXPECT_EQ(env->health_fd, -1);
}

TEST(WorkerEnvironmentTest, NamesEveryProblemAtOnce) {
  const auto env = Parse({{"RANK", "two"}, {"MASTER_PORT", "99999"}});
  ASSERT_FALSE(env.ok());
  EXPECT_EQ(env.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(env.status().message()),
      AllOf(HasSubstr("WORLD_SIZE is not set"), HasSubstr("RANK=\"two\" is not a whole number"),
            HasSubstr("MASTER_PORT=99999 must be in 1..65535"),
            HasSubstr("neither DDP_STORE nor MASTER_ADDR is set"), HasSubstr("ddprun")));
}

TEST(WorkerEnvironmentTest, RankMustBeBelowWorldSize) {
  const auto env = Parse({{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"DDP_STORE", "x"}});
  ASSERT_FALSE(env.ok());
  EXPECT_THAT(std::string(env.status().message()), HasSubstr("RANK=2 must be below WORLD_SIZE=2"));
}

}  // namespace
}  // namespace ddp::internal
