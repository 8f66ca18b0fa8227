#include "launcher/launch_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr HostResources kHost = {.cpus = 8, .gpus = 2};

// What gflags holds when the user gives nothing.
FlagValues Defaults() {
  FlagValues values;
  values.nnodes = "1:1";
  values.nproc_per_node = "1";
  values.role = "default";
  values.master_addr = "127.0.0.1";
  values.master_port = "0";
  values.rdzv_backend = "redis";
  values.lease_ms = "3000";
  values.max_restarts = "0";
  values.fault_grace_ms = "200";
  values.shutdown_timeout = "30";
  values.redirects = "0";
  values.tee = "0";
  return values;
}

std::string Error(const FlagValues& values, const HostResources& host = kHost) {
  const auto options = ParseLaunchOptions(values, {}, host);
  return options.ok() ? "no error" : std::string(options.status().message());
}

TEST(LaunchOptionsTest, Defaults) {
  const auto options = ParseLaunchOptions(Defaults(), {}, kHost);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->nproc_per_node, 1);
  EXPECT_EQ(options->lease, absl::Seconds(3));
  EXPECT_EQ(options->fault_grace, absl::Milliseconds(200));
  EXPECT_EQ(options->shutdown_timeout, absl::Seconds(30));
  EXPECT_EQ(options->program_kind, ProgramKind::kByName);
  EXPECT_TRUE(options->run_id.empty());
  EXPECT_TRUE(options->tee.empty());
}

TEST(LaunchOptionsTest, ProcessesPerNode) {
  const auto count = [](const std::string& text, const HostResources& host) {
    FlagValues values = Defaults();
    values.nproc_per_node = text;
    const auto options = ParseLaunchOptions(values, {}, host);
    return options.ok() ? options->nproc_per_node : -1;
  };
  EXPECT_EQ(count("3", kHost), 3);
  EXPECT_EQ(count("cpu", kHost), 8);
  EXPECT_EQ(count("gpu", kHost), 2);
  EXPECT_EQ(count("auto", kHost), 2);
  EXPECT_EQ(count("auto", {.cpus = 8, .gpus = 0}), 8);
  EXPECT_EQ(count("gpu", {.cpus = 8, .gpus = 0}), -1);
  for (const char* bad : {"0", "-1", "", "two", "2x", " 2", "+2", "2.0", "99999999999", "xpu"}) {
    EXPECT_EQ(count(bad, kHost), -1) << bad;
  }
}

TEST(LaunchOptionsTest, OnlyOneNodeInThisVersion) {
  FlagValues values = Defaults();
  for (const char* good : {"1", "1:1"}) {
    values.nnodes = good;
    EXPECT_EQ(Error(values), "no error") << good;
  }
  for (const char* bad : {"2", "1:2", "0", "", "a", "1:1:1", "2:1", ":", "1:"}) {
    values.nnodes = bad;
    EXPECT_THAT(Error(values), HasSubstr(std::string("--nnodes=") + bad + ": ")) << bad;
  }
}

TEST(LaunchOptionsTest, MistakesNameFlagValueAndWhatIsAllowed) {
  FlagValues values = Defaults();
  values.nproc_per_node = "lots";
  EXPECT_THAT(Error(values),
              AllOf(HasSubstr("--nproc-per-node=lots"), HasSubstr("cpu, gpu or auto")));
  values = Defaults();
  values.master_port = "65536";
  EXPECT_THAT(Error(values), AllOf(HasSubstr("--master-port=65536"), HasSubstr("0 to 65535")));
  values = Defaults();
  values.max_restarts = "-1";
  EXPECT_THAT(Error(values), HasSubstr("--max-restarts=-1: expected a whole number"));
  values = Defaults();
  values.shutdown_timeout = "nan";
  EXPECT_THAT(Error(values), HasSubstr("--shutdown-timeout=nan: expected seconds"));
  values = Defaults();
  values.rdzv_backend = "etcd";
  EXPECT_THAT(Error(values), HasSubstr("--rdzv-backend=etcd"));
  values = Defaults();
  values.role = "a\nb";
  EXPECT_THAT(Error(values), HasSubstr("--role="));
  values = Defaults();
  values.tee = "4";
  EXPECT_THAT(Error(values), HasSubstr("--tee=4: expected 0 (nothing)"));
}

TEST(LaunchOptionsTest, TheUsersOwnSpellingIsNamed) {
  FlagValues values = Defaults();
  values.nproc_per_node = "lots";
  const auto options =
      ParseLaunchOptions(values, {{"nproc_per_node", "PET_NPROC_PER_NODE"}}, kHost);
  EXPECT_THAT(std::string(options.status().message()), HasSubstr("PET_NPROC_PER_NODE=lots: "));
}

TEST(LaunchOptionsTest, ContradictionsAreRefused) {
  FlagValues values = Defaults();
  values.no_python = values.module = true;
  EXPECT_THAT(Error(values), HasSubstr("--no-python and --module contradict"));
  values = Defaults();
  values.run_path = values.module = true;
  EXPECT_THAT(Error(values), HasSubstr("--run-path and --module contradict"));
}

TEST(LaunchOptionsTest, StandaloneIgnoresTheEndpoint) {
  FlagValues values = Defaults();
  values.standalone = true;
  values.rdzv_endpoint = "elsewhere:1";
  EXPECT_EQ(ParseLaunchOptions(values, {}, kHost)->rdzv_endpoint, "");
}

TEST(StreamMapTest, OneValueForAll) {
  const auto map = ParseStreamMap("3");
  ASSERT_TRUE(map.ok());
  EXPECT_EQ(map->Get(0), kBothStreams);
  EXPECT_EQ(map->Get(11), kBothStreams);
  EXPECT_TRUE(ParseStreamMap("0")->empty());
}

TEST(StreamMapTest, ByLocalRankWithAnyNumberOfDigits) {
  const auto map = ParseStreamMap("0:1,11:2,103:3,5:0");
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->Get(0), kStdout);
  EXPECT_EQ(map->Get(11), kStderr);
  EXPECT_EQ(map->Get(103), kBothStreams);
  EXPECT_EQ(map->Get(1), kNoStream);
  EXPECT_FALSE(map->empty());
}

TEST(StreamMapTest, MistakesAreRefused) {
  for (const char* bad : {"", "4", "-1", "0:4", "0:", ":1", "0:1,", "0:1,0:2", "a:1", "0:1;1:2",
                          "0:11", "-1:1", "99999999999:1"}) {
    EXPECT_FALSE(ParseStreamMap(bad).ok()) << bad;
  }
}

TEST(HostResourcesTest, VisibleGpusFollowCudasRule) {
  EXPECT_EQ(CountVisibleGpus(4, std::nullopt), 4);
  EXPECT_EQ(CountVisibleGpus(4, "0,2"), 2);
  EXPECT_EQ(CountVisibleGpus(4, ""), 0);
  EXPECT_EQ(CountVisibleGpus(4, "-1"), 0);
  EXPECT_EQ(CountVisibleGpus(4, "0,7,1"), 1);
  EXPECT_EQ(CountVisibleGpus(4, "GPU-abc, MIG-def"), 2);
  EXPECT_EQ(CountVisibleGpus(0, "0,1"), 0);
}

TEST(HostResourcesTest, ThisHostHasACpu) { EXPECT_GE(ReadHostResources().cpus, 1); }

}  // namespace
}  // namespace ddp::launcher
