#include "base/cpu_quota.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "testing/temporary_folder.h"

namespace ddp {
namespace {

class CpuQuotaTest : public ::testing::Test {
 protected:
  void Write(const std::string& file, const std::string& text) {
    const std::filesystem::path path = std::filesystem::path(folder_.path()) / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  double Quota() const { return CpuQuota(folder_.path()); }

  ::ddp::testing::TemporaryFolder folder_;
};

TEST_F(CpuQuotaTest, Version2) {
  Write("cpu.max", "150000 100000\n");
  EXPECT_EQ(Quota(), 1.5);
}

TEST_F(CpuQuotaTest, Version2WithoutAQuota) {
  Write("cpu.max", "max 100000\n");
  EXPECT_GT(Quota(), 1e9);
}

TEST_F(CpuQuotaTest, Version1) {
  Write("cpu/cpu.cfs_quota_us", "200000\n");
  Write("cpu/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(Quota(), 4);
}

TEST_F(CpuQuotaTest, Version1WithoutAQuota) {
  Write("cpu/cpu.cfs_quota_us", "-1\n");
  Write("cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_GT(Quota(), 1e9);
}

TEST_F(CpuQuotaTest, FilesThatCannotBeReadAreNoQuota) {
  EXPECT_GT(Quota(), 1e9);
  Write("cpu.max", "");
  EXPECT_GT(Quota(), 1e9);
  Write("cpu/cpu.cfs_quota_us", "200000\n");
  EXPECT_GT(Quota(), 1e9);
  Write("cpu/cpu.cfs_period_us", "0\n");
  EXPECT_GT(Quota(), 1e9);
}

TEST_F(CpuQuotaTest, ThisProcessHasSome) { EXPECT_GT(CpuQuota(), 0); }

}  // namespace
}  // namespace ddp
