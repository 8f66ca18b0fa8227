#include "base/process/control_group.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/file_tree.h"

namespace ddp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ControlGroupTest : public ::testing::Test {
 protected:
  void Lives(const std::string& groups, const std::string& mounts) {
    tree_.Write("proc/self/cgroup", groups);
    tree_.Write("proc/self/mountinfo", mounts);
  }
  // The folders below the root, for a controller.
  std::vector<std::string> Folders(const std::string& controller) const {
    std::vector<std::string> folders = FindControlGroup(controller, tree_.root()).folders;
    for (std::string& folder : folders) folder.erase(0, tree_.root().size());
    return folders;
  }
  int Version(const std::string& controller) const {
    return FindControlGroup(controller, tree_.root()).version;
  }

  ::ddp::testing::FileTree tree_;
};

TEST_F(ControlGroupTest, Version2) {
  Lives("0::/pod/c\n", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  EXPECT_EQ(Version("cpu"), 2);
  EXPECT_THAT(Folders("cpu"),
              ElementsAre("/sys/fs/cgroup/pod/c", "/sys/fs/cgroup/pod", "/sys/fs/cgroup"));
}

TEST_F(ControlGroupTest, BothVersionsAreMounted) {
  Lives("4:memory:/jobs\n3:cpu,cpuacct:/a\n1:name=systemd:/x\n0::/u\n",
        "31 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "35 25 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 25 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  EXPECT_EQ(Version("cpu"), 1);
  EXPECT_THAT(Folders("cpu"),
              ElementsAre("/sys/fs/cgroup/cpu,cpuacct/a", "/sys/fs/cgroup/cpu,cpuacct"));
  EXPECT_THAT(Folders("memory"),
              ElementsAre("/sys/fs/cgroup/memory/jobs", "/sys/fs/cgroup/memory"));
  EXPECT_EQ(Version("pids"), 2);
  EXPECT_THAT(Folders("pids"), ElementsAre("/sys/fs/cgroup/unified/u", "/sys/fs/cgroup/unified"));
}

TEST_F(ControlGroupTest, AContainerSeesItsGroupAsTheTop) {
  const std::string mount = "35 25 0:32 /docker/ab /sys/fs/cgroup/memory ro - cgroup c rw,memory\n";
  Lives("4:memory:/docker/ab\n", mount);
  EXPECT_THAT(Folders("memory"), ElementsAre("/sys/fs/cgroup/memory"));
  Lives("4:memory:/docker/ab/job\n", mount);
  EXPECT_THAT(Folders("memory"), ElementsAre("/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"));
  Lives("4:memory:/docker/abc\n", mount);
  EXPECT_THAT(Folders("memory"), ElementsAre("/sys/fs/cgroup/memory"));
  Lives("0::/../other\n", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  EXPECT_THAT(Folders("memory"), ElementsAre("/sys/fs/cgroup"));
}

TEST_F(ControlGroupTest, WhatCannotBeReadIsNoGroup) {
  EXPECT_THAT(Folders("cpu"), IsEmpty());
  Lives("nonsense\n4:cpu\n", "1 2 3 - cgroup2\n - \n30 - cgroup2 cgroup2 rw\n");
  EXPECT_THAT(Folders("cpu"), IsEmpty());
  Lives("0::/a\n", "");
  EXPECT_THAT(Folders("cpu"), IsEmpty());
}

}  // namespace
}  // namespace ddp
