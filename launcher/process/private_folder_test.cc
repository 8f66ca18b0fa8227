#include "launcher/process/private_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace ddp::launcher {
namespace {

using ::testing::StartsWith;

TEST(PrivateFolderTest, IsOursAloneAndGoesWithAllThatIsInIt) {
  const auto folder = MakePrivateFolder("ddprun_");
  ASSERT_TRUE(folder.ok()) << folder.status();
  struct stat info {};
  ASSERT_EQ(::stat(folder->c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700U);
  const std::string outside = ::testing::TempDir() + "/outside";
  std::filesystem::create_directories(outside);
  std::filesystem::create_directories(*folder + "/deep/er");
  std::filesystem::create_directory_symlink(outside, *folder + "/deep/link");
  EXPECT_TRUE(RemoveFolder(*folder).ok());
  EXPECT_FALSE(std::filesystem::exists(*folder));
  EXPECT_TRUE(std::filesystem::exists(outside));
  EXPECT_TRUE(RemoveFolder(*folder).ok());
  EXPECT_TRUE(RemoveFolder("").ok());
}

TEST(PrivateFolderTest, HoldsDataOnceAFileBelowItIsNotEmpty) {
  const auto folder = MakePrivateFolder("ddprun_");
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_FALSE(HoldsData(*folder + "/missing"));
  EXPECT_FALSE(HoldsData(""));
  std::filesystem::create_directories(*folder + "/deep/er");
  std::filesystem::create_symlink("/etc/passwd", *folder + "/deep/link");
  std::filesystem::create_directory_symlink("/etc", *folder + "/deep/folder");
  std::ofstream(*folder + "/deep/er/file") << "";
  EXPECT_FALSE(HoldsData(*folder));
  std::ofstream(*folder + "/deep/er/file") << "x";
  EXPECT_TRUE(HoldsData(*folder));
  EXPECT_TRUE(RemoveFolder(*folder).ok());
}

TEST(PrivateFolderTest, IsShortEnoughForASocketWhereverTmpdirIs) {
  const std::string before = ::getenv("TMPDIR") == nullptr ? "/tmp" : ::getenv("TMPDIR");
  ::setenv("TMPDIR", (::testing::TempDir() + std::string(100, 'x')).c_str(), 1);
  const auto folder = MakePrivateFolder("ddprun_");
  ::setenv("TMPDIR", before.c_str(), 1);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_THAT(*folder, StartsWith("/tmp/ddprun_"));
  EXPECT_TRUE(RemoveFolder(*folder).ok());
}

}  // namespace
}  // namespace ddp::launcher
