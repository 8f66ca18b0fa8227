#include "launcher/flags/host_resources.h"

#include <sched.h>

#include <optional>

#include "gtest/gtest.h"
#include "testing/file_tree.h"

namespace ddp::launcher {
namespace {

TEST(HostResourcesTest, VisibleGpusFollowCudasRule) {
  EXPECT_EQ(CountVisibleGpus(4, std::nullopt), 4);
  EXPECT_EQ(CountVisibleGpus(4, "0,2"), 2);
  EXPECT_EQ(CountVisibleGpus(4, ""), 0);
  EXPECT_EQ(CountVisibleGpus(4, "-1"), 0);
  EXPECT_EQ(CountVisibleGpus(4, "0,7,1"), 1);
  EXPECT_EQ(CountVisibleGpus(4, "GPU-abc, MIG-def"), 2);
  EXPECT_EQ(CountVisibleGpus(0, "0,1"), 0);
}

TEST(HostResourcesTest, ACpuQuotaIsRoundedDownToAtLeastOne) {
  ::ddp::testing::FileTree tree;
  tree.Write("proc/self/cgroup", "3:cpu:/job\n");
  tree.Write("proc/self/mountinfo", "31 25 0:28 / /cpu rw - cgroup cgroup rw,cpu\n");
  tree.Write("cpu/job/cpu.cfs_period_us", "100000\n");
  for (const char* quota : {"20000", "100000", "150000"}) {
    tree.Write("cpu/job/cpu.cfs_quota_us", quota);
    EXPECT_EQ(ReadHostResources(tree.root()).cpus, 1) << quota;
  }
  tree.Write("cpu/job/cpu.cfs_quota_us", "-1\n");
  cpu_set_t set;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
  EXPECT_EQ(ReadHostResources(tree.root()).cpus, CPU_COUNT(&set));
}

TEST(HostResourcesTest, ThisHostHasACpu) { EXPECT_GE(ReadHostResources().cpus, 1); }

}  // namespace
}  // namespace ddp::launcher
