#include "base/process/cpu_quota.h"

#include <sched.h>

#include "gtest/gtest.h"
#include "testing/file_tree.h"

namespace ddp {
namespace {

class CpuQuotaTest : public ::testing::Test {
 protected:
  void UseVersion1() {
    tree_.Write("proc/self/cgroup", "3:cpu,cpuacct:/pod/job\n0::/\n");
    tree_.Write("proc/self/mountinfo", "31 25 0:28 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
  }
  void UseVersion2() {
    tree_.Write("proc/self/cgroup", "0::/pod/job\n");
    tree_.Write("proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n");
  }
  double Quota() const { return CpuQuota(tree_.root()); }

  ::ddp::testing::FileTree tree_;
};

TEST_F(CpuQuotaTest, Version2) {
  UseVersion2();
  tree_.Write("cg/pod/job/cpu.max", "150000 100000\n");
  EXPECT_EQ(Quota(), 1.5);
}

TEST_F(CpuQuotaTest, Version2WithoutAQuota) {
  UseVersion2();
  tree_.Write("cg/pod/job/cpu.max", "max 100000\n");
  EXPECT_GT(Quota(), 1e9);
}

TEST_F(CpuQuotaTest, Version1) {
  UseVersion1();
  tree_.Write("cg/cpu/pod/job/cpu.cfs_quota_us", "200000\n");
  tree_.Write("cg/cpu/pod/job/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(Quota(), 4);
}

TEST_F(CpuQuotaTest, Version1WithoutAQuota) {
  UseVersion1();
  tree_.Write("cg/cpu/pod/job/cpu.cfs_quota_us", "-1\n");
  tree_.Write("cg/cpu/pod/job/cpu.cfs_period_us", "100000\n");
  EXPECT_GT(Quota(), 1e9);
}

TEST_F(CpuQuotaTest, TheSmallestOfNestedGroupsCounts) {
  UseVersion2();
  tree_.Write("cg/pod/job/cpu.max", "max 100000\n");
  tree_.Write("cg/pod/cpu.max", "300000 100000\n");
  EXPECT_EQ(Quota(), 3);
  tree_.Write("cg/pod/job/cpu.max", "200000 100000\n");
  EXPECT_EQ(Quota(), 2);
  tree_.Write("cg/pod/cpu.max", "100000 100000\n");
  EXPECT_EQ(Quota(), 1);
}

TEST_F(CpuQuotaTest, FilesThatCannotBeReadAreNoQuota) {
  EXPECT_GT(Quota(), 1e9);
  UseVersion2();
  EXPECT_GT(Quota(), 1e9);
  tree_.Write("cg/pod/job/cpu.max", "");
  EXPECT_GT(Quota(), 1e9);
  UseVersion1();
  tree_.Write("cg/cpu/pod/job/cpu.cfs_quota_us", "200000\n");
  EXPECT_GT(Quota(), 1e9);
  tree_.Write("cg/cpu/pod/job/cpu.cfs_period_us", "0\n");
  EXPECT_GT(Quota(), 1e9);
}

TEST_F(CpuQuotaTest, ThisProcessHasSome) { EXPECT_GT(CpuQuota(), 0); }

TEST_F(CpuQuotaTest, UsableCoresAreWholeAndOneAtLeast) {
  UseVersion2();
  tree_.Write("cg/pod/job/cpu.max", "50000 100000\n");
  EXPECT_EQ(UsableCores(tree_.root()), 1);
  tree_.Write("cg/pod/job/cpu.max", "199000 100000\n");
  EXPECT_EQ(UsableCores(tree_.root()), 1);
}

TEST_F(CpuQuotaTest, UsableCoresAreThoseOfTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int core = 0; CPU_COUNT(&one) == 0; ++core) {
    if (CPU_ISSET(core, &before)) CPU_SET(core, &one);
  }
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(UsableCores(), 1);
  ASSERT_EQ(::sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_LE(UsableCores(), CPU_COUNT(&before));
}

}  // namespace
}  // namespace ddp
