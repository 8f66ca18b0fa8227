#include "base/process/path_search.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "testing/temporary_folder.h"

namespace ddp {
namespace {

class PathSearchTest : public ::testing::Test {
 protected:
  PathSearchTest() {
    std::filesystem::create_directory(first_);
    std::filesystem::create_directory(second_);
  }

  static std::string MakeFile(const std::string& folder, const std::string& name, mode_t mode) {
    const std::string path = absl::StrCat(folder, "/", name);
    std::ofstream(path) << "#!/bin/sh\n";
    chmod(path.c_str(), mode);
    return path;
  }

  const testing::TemporaryFolder root_;
  const std::string first_ = absl::StrCat(root_.path(), "/first");
  const std::string second_ = absl::StrCat(root_.path(), "/second");
  const std::string both_ = absl::StrCat(first_, ":", second_);
};

TEST_F(PathSearchTest, FirstFolderWins) {
  const std::string later = MakeFile(second_, "tool", 0755);
  EXPECT_EQ(SearchPath("tool", both_), later);
  const std::string earlier = MakeFile(first_, "tool", 0755);
  EXPECT_EQ(SearchPath("tool", both_), earlier);
  EXPECT_EQ(SearchPath("another", both_), std::nullopt);
}

TEST_F(PathSearchTest, FileThatIsNotExecutableIsPassedOver) {
  MakeFile(first_, "tool", 0644);
  const std::string later = MakeFile(second_, "tool", 0755);
  EXPECT_EQ(SearchPath("tool", both_), later);
}

TEST_F(PathSearchTest, FolderOfThatNameIsPassedOver) {
  std::filesystem::create_directory(absl::StrCat(first_, "/tool"));
  const std::string later = MakeFile(second_, "tool", 0755);
  EXPECT_EQ(SearchPath("tool", both_), later);
}

TEST_F(PathSearchTest, EmptyFolderIsTheCurrentOne) {
  MakeFile(first_, "tool", 0755);
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(first_);
  EXPECT_EQ(SearchPath("tool", absl::StrCat(second_, ":")), "./tool");
  EXPECT_EQ(SearchPath("tool", ""), "./tool");
  EXPECT_EQ(SearchPath("tool", second_), std::nullopt);
  std::filesystem::current_path(before);
}

TEST_F(PathSearchTest, KindsOfFiles) {
  const std::string program = MakeFile(first_, "program", 0755);
  const std::string text = MakeFile(first_, "text", 0644);
  const std::string link = absl::StrCat(first_, "/link");
  std::filesystem::create_symlink(program, link);
  EXPECT_TRUE(IsExecutableFile(program));
  EXPECT_TRUE(IsExecutableFile(link));
  EXPECT_TRUE(IsRegularFile(text));
  EXPECT_FALSE(IsExecutableFile(text));
  EXPECT_FALSE(IsRegularFile(first_));
  EXPECT_FALSE(IsExecutableFile(first_));
  EXPECT_FALSE(IsRegularFile(absl::StrCat(first_, "/absent")));
}

}  // namespace
}  // namespace ddp
