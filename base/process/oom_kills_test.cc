#include "base/process/oom_kills.h"

#include <string>

#include "gtest/gtest.h"
#include "testing/file_tree.h"

namespace ddp {
namespace {

class OomKillsTest : public ::testing::Test {
 protected:
  void UseVersion1() {
    tree_.Write("proc/self/cgroup", "4:memory:/pod/job\n0::/\n");
    tree_.Write("proc/self/mountinfo", "35 25 0:32 / /cg rw - cgroup cgroup rw,memory\n");
  }
  void UseVersion2() {
    tree_.Write("proc/self/cgroup", "0::/pod/job\n");
    tree_.Write("proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw\n");
  }
  void Kill(int kills) {
    tree_.Write("cg/pod/job/memory.events",
                "low 0\nhigh 0\nmax 7\noom 1\noom_kill " + std::to_string(kills) + "\n");
    tree_.Write("cg/pod/job/memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill " + std::to_string(kills) + "\n");
  }
  void KillOnHost(int kills) {
    tree_.Write("proc/vmstat", "nr_free_pages 1\noom_kill " + std::to_string(kills) + "\n");
  }
  // The explanation, without the root of the fake tree.
  std::string Explain(OomKills& kills) const {
    std::string text = kills.Explain();
    const size_t at = text.find(tree_.root());
    return at == std::string::npos ? text : text.erase(at, tree_.root().size());
  }

  ::ddp::testing::FileTree tree_;
};

TEST_F(OomKillsTest, Version2NamesLimitAndPeak) {
  UseVersion2();
  Kill(3);
  tree_.Write("cg/pod/job/memory.max", "268435456\n");
  tree_.Write("cg/pod/job/memory.peak", "268435456\n");
  OomKills kills(tree_.root());
  EXPECT_EQ(Explain(kills), "") << "kills before";
  Kill(4);
  EXPECT_EQ(Explain(kills),
            "out of memory: the limit of its cgroup /cg/pod/job is 256 MiB, its peak was 256 MiB");
  EXPECT_EQ(Explain(kills), "") << "one kill explains one end";
  Kill(6);
  EXPECT_NE(Explain(kills), "");
  EXPECT_NE(Explain(kills), "");
  EXPECT_EQ(Explain(kills), "");
}

TEST_F(OomKillsTest, Version1NamesLimitAndPeak) {
  UseVersion1();
  Kill(0);
  tree_.Write("cg/pod/job/memory.limit_in_bytes", "1610612736\n");
  tree_.Write("cg/pod/job/memory.max_usage_in_bytes", "1610612736\n");
  OomKills kills(tree_.root());
  Kill(1);
  EXPECT_EQ(
      Explain(kills),
      "out of memory: the limit of its cgroup /cg/pod/job is 1536 MiB, its peak was 1536 MiB");
}

TEST_F(OomKillsTest, TheGroupThatWasFullIsNamed) {
  UseVersion2();
  Kill(0);
  tree_.Write("cg/pod/job/memory.max", "268435456\n");
  tree_.Write("cg/pod/job/memory.peak", "134217728\n");
  tree_.Write("cg/pod/memory.max", "536870912\n");
  tree_.Write("cg/pod/memory.peak", "536870912\n");
  OomKills kills(tree_.root());
  Kill(1);
  EXPECT_EQ(Explain(kills),
            "out of memory: the limit of its cgroup /cg/pod is 512 MiB, its peak was 512 MiB");
}

TEST_F(OomKillsTest, AnOldKernelTellsNoPeak) {
  UseVersion2();
  Kill(0);
  tree_.Write("cg/pod/job/memory.max", "268435456\n");
  OomKills kills(tree_.root());
  Kill(1);
  EXPECT_EQ(Explain(kills), "out of memory: the limit of its cgroup /cg/pod/job is 256 MiB");
}

TEST_F(OomKillsTest, AGroupFarFromItsLimitIsNotBlamed) {
  UseVersion2();
  Kill(0);
  tree_.Write("cg/pod/job/memory.max", "268435456\n");
  tree_.Write("cg/pod/job/memory.peak", "134217728\n");
  OomKills kills(tree_.root());
  Kill(1);
  EXPECT_EQ(Explain(kills), "out of memory: that of this host (no cgroup was at its limit)");
}

TEST_F(OomKillsTest, WithoutALimitItIsTheHosts) {
  UseVersion1();
  Kill(0);
  KillOnHost(5);
  tree_.Write("cg/pod/job/memory.limit_in_bytes", "9223372036854771712\n");
  tree_.Write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree: 3 kB\n");
  OomKills kills(tree_.root());
  KillOnHost(6);
  EXPECT_EQ(Explain(kills), "") << "another group's";
  Kill(1);
  EXPECT_EQ(Explain(kills),
            "out of memory: that of this host, which has 16384 MiB (no cgroup was at its limit)");
}

TEST_F(OomKillsTest, WithoutAControllerTheHostsCounterCounts) {
  UseVersion2();
  KillOnHost(5);
  OomKills kills(tree_.root());
  KillOnHost(6);
  EXPECT_EQ(Explain(kills), "out of memory: that of this host (no cgroup was at its limit)");
}

TEST_F(OomKillsTest, KillsOfAnEarlierGenerationAreForgotten) {
  UseVersion2();
  Kill(0);
  OomKills kills(tree_.root());
  Kill(1);
  kills.Forget();
  EXPECT_EQ(Explain(kills), "");
}

TEST_F(OomKillsTest, FilesThatCannotBeReadExplainNothing) {
  OomKills kills(tree_.root());
  KillOnHost(6);
  EXPECT_EQ(Explain(kills), "");
  EXPECT_EQ(OomKills().Explain(), "");
}

}  // namespace
}  // namespace ddp
