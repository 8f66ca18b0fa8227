#include "launcher/output/log_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "testing/temporary_folder.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(LogLayoutTest, AsTorchrunsLayout) {
  const std::string log_dir = ::testing::TempDir() + "/a/b";
  auto layout = LogLayout::Create(log_dir, "run");
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_THAT(layout->root(), StartsWith(log_dir + "/run_"));
  const auto files = layout->MakeWorkerFolder(2, 5, 11);
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_EQ(files->stdout_log, layout->root() + "/attempt_2/11/stdout.log");
  EXPECT_EQ(files->stderr_log, layout->root() + "/attempt_2/11/stderr.log");
  EXPECT_EQ(files->error_file, layout->root() + "/attempt_2/11/error.json");
  EXPECT_EQ(files->filtered_stdout, layout->root() + "/attempt_2/filtered_stdout.log");
  EXPECT_EQ(files->filtered_stderr, layout->root() + "/attempt_2/filtered_stderr.log");
  EXPECT_TRUE(std::filesystem::is_directory(files->folder));
}

TEST(LogLayoutTest, AChangeOfMembersLeavesTheFilesOfItsAttemptAlone) {
  auto layout = LogLayout::Create(::testing::TempDir(), "run");
  ASSERT_TRUE(layout.ok()) << layout.status();
  const auto folder = [&](int attempt, uint64_t generation, int local_rank) {
    const auto files = layout->MakeWorkerFolder(attempt, generation, local_rank);
    EXPECT_TRUE(files.ok()) << files.status();
    return files.ok() ? files->folder.substr(layout->root().size()) : "";
  };
  EXPECT_EQ(folder(0, 2, 0), "/attempt_0/0");
  EXPECT_EQ(folder(0, 2, 1), "/attempt_0/1");
  EXPECT_EQ(folder(0, 3, 0), "/attempt_0.g3/0");
  EXPECT_EQ(folder(0, 3, 1), "/attempt_0.g3/1");
  EXPECT_EQ(folder(1, 4, 0), "/attempt_1/0");
  EXPECT_EQ(folder(1, 7, 0), "/attempt_1.g7/0");
}

TEST(LogLayoutTest, TwoRunsOfOneIdDoNotMeet) {
  const auto first = LogLayout::Create(::testing::TempDir(), "same");
  const auto second = LogLayout::Create(::testing::TempDir(), "same");
  EXPECT_NE(first->root(), second->root());
}

TEST(LogLayoutTest, ARunIdCannotLeaveTheFolder) {
  for (const char* id : {"../../x", "..", "/etc", "a\tb", ".hidden"}) {
    const auto layout = LogLayout::Create(::testing::TempDir(), id);
    ASSERT_TRUE(layout.ok()) << layout.status();
    const std::filesystem::path root(layout->root());
    EXPECT_TRUE(std::filesystem::equivalent(root.parent_path(), ::testing::TempDir())) << id;
    EXPECT_NE(root.filename().string()[0], '.');
  }
  EXPECT_TRUE(LogLayout::Create(::testing::TempDir(), std::string(1000, 'x')).ok());
}

TEST(LogLayoutTest, ALongRunIdIsCutBetweenCharacters) {
  std::string id = "a";
  for (int i = 0; i < 128; ++i) id += "\U0001F916";
  const auto layout = LogLayout::Create(::testing::TempDir(), id);
  ASSERT_TRUE(layout.ok()) << layout.status();
  const std::string name = std::filesystem::path(layout->root()).filename();
  EXPECT_EQ(name.substr(0, 198), id.substr(0, 197) + "_");
}

TEST(LogLayoutTest, DevNullMeansNoFiles) {
  auto layout = LogLayout::Create("/dev/null", "run");
  ASSERT_TRUE(layout.ok());
  EXPECT_EQ(layout->root(), "");
  EXPECT_EQ(layout->MakeWorkerFolder(0, 1, 0)->error_file, "");
}

TEST(LogLayoutTest, AFolderThatCannotBeMadeIsNamed) {
  const auto layout = LogLayout::Create("/proc/nowhere", "run");
  EXPECT_TRUE(absl::IsInvalidArgument(layout.status()));
  EXPECT_THAT(std::string(layout.status().message()), HasSubstr("/proc/nowhere"));
}

// The folder is world-writable, like --log-dir=/tmp.
TEST(LogLayoutTest, AWorldWritableFolderGetsARootThatNobodyElseCanWrite) {
  const testing::TemporaryFolder folder;
  const std::string log_dir = folder.path() + "/tmp";
  const mode_t before = ::umask(0);
  ASSERT_EQ(::mkdir(log_dir.c_str(), 0777), 0);
  ASSERT_EQ(::chmod(log_dir.c_str(), 01777), 0);
  auto layout = LogLayout::Create(log_dir, "run");
  ASSERT_TRUE(layout.ok()) << layout.status();
  const auto files = layout->MakeWorkerFolder(0, 1, 0);
  ASSERT_TRUE(files.ok()) << files.status();
  EXPECT_TRUE(layout->OpenFile(files->stdout_log).ok());
  ::umask(before);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(log_dir)) {
    struct stat info {};
    ASSERT_EQ(::lstat(entry.path().c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07022, 0U) << entry.path();
  }
  std::filesystem::create_symlink("/dev/null", files->stderr_log);
  EXPECT_TRUE(absl::IsFailedPrecondition(layout->OpenFile(files->stderr_log).status()));
  ASSERT_EQ(::mkdir((layout->root() + "/attempt_1").c_str(), 0700), 0);
  ASSERT_EQ(::chmod((layout->root() + "/attempt_1").c_str(), 0777), 0);
  const auto refused = layout->MakeWorkerFolder(1, 2, 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("/attempt_1: other users"));
}

// As `rm -rf` or a cleaner of /tmp does.
TEST(LogLayoutTest, FoldersThatAreRemovedWhileTheJobRunsAreMadeAgain) {
  const testing::TemporaryFolder folder;
  const std::string log_dir = folder.path() + "/above/logs";
  auto layout = LogLayout::Create(log_dir, "run");
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_TRUE(layout->MakeWorkerFolder(0, 1, 0).ok());
  for (const std::string& removed : {layout->root(), log_dir, folder.path() + "/above"}) {
    std::filesystem::remove_all(removed);
    const auto files = layout->MakeWorkerFolder(1, 2, 0);
    ASSERT_TRUE(files.ok()) << removed << ": " << files.status();
    EXPECT_TRUE(layout->OpenFile(files->stdout_log).ok());
  }
}

TEST(LogLayoutTest, AFolderThatWasPrivateIsMadePrivateAgain) {
  const testing::TemporaryFolder folder;
  const std::string log_dir = folder.path() + "/private";
  ASSERT_EQ(::mkdir(log_dir.c_str(), 0700), 0);
  auto layout = LogLayout::Create(log_dir, "run");
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::filesystem::remove_all(log_dir);
  ASSERT_TRUE(layout->MakeWorkerFolder(0, 1, 0).ok());
  for (const std::string& path : {log_dir, layout->root()}) {
    struct stat info {};
    ASSERT_EQ(::lstat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 07777, 0700U) << path;
  }
}

TEST(LogLayoutTest, ALinkInPlaceOfARemovedFolderIsNotFollowed) {
  const testing::TemporaryFolder folder;
  auto layout = LogLayout::Create(folder.path(), "run");
  ASSERT_TRUE(layout.ok()) << layout.status();
  std::filesystem::remove_all(layout->root());
  const std::string elsewhere = folder.path() + "/elsewhere";
  std::filesystem::create_directory(elsewhere);
  std::filesystem::create_directory_symlink(elsewhere, layout->root());
  EXPECT_TRUE(absl::IsFailedPrecondition(layout->MakeWorkerFolder(0, 1, 0).status()));
  EXPECT_TRUE(std::filesystem::is_empty(elsewhere));
  // The link leads nowhere.
  std::filesystem::remove_all(elsewhere);
  EXPECT_TRUE(absl::IsFailedPrecondition(layout->MakeWorkerFolder(0, 1, 0).status()));
  EXPECT_FALSE(std::filesystem::exists(elsewhere));
}

}  // namespace
}  // namespace ddp::launcher
