#include "base/process/numa_node.h"

#include <filesystem>
#include <initializer_list>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "testing/temporary_folder.h"

namespace ddp {
namespace {

cpu_set_t Cores(std::initializer_list<int> cores) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  return set;
}

TEST(NumaNodeTest, ProcessOnOneNodeHasThatNode) {
  const testing::TemporaryFolder folder;
  for (const int core : {0, 1, 2, 3}) {
    std::filesystem::create_directories(
        absl::StrCat(folder.path(), "/sys/devices/system/node/node", core / 2, "/cpu", core));
  }
  std::filesystem::create_directories(
      absl::StrCat(folder.path(), "/sys/devices/system/node/power"));
  EXPECT_EQ(NumaNodeOf(Cores({0, 1}), folder.path()), 0);
  EXPECT_EQ(NumaNodeOf(Cores({3}), folder.path()), 1);
  EXPECT_EQ(NumaNodeOf(Cores({1, 2}), folder.path()), -1);
  EXPECT_EQ(NumaNodeOf(Cores({}), folder.path()), -1);
  EXPECT_EQ(NumaNodeOf(Cores({0}), absl::StrCat(folder.path(), "/none")), -1);
}

}  // namespace
}  // namespace ddp
