#include "launcher/output/log_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "testing/temporary_folder.h"

namespace ddp::launcher {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

mode_t ModeOf(const std::string& path) {
  struct stat info {};
  EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

std::string ContentsOf(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

void Append(const UniqueFd& file, const std::string& text) {
  EXPECT_EQ(::write(file.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
}

class LogFilesTest : public ::testing::Test {
 protected:
  LogFilesTest() : umask_(::umask(0)) {}
  ~LogFilesTest() override { ::umask(umask_); }

  // Returns a root with attempt_0/1 in it.
  LogRoot MakeRoot() const {
    auto root = MakeLogRoot(folder_, "run");
    EXPECT_TRUE(root.ok()) << root.status();
    EXPECT_TRUE(MakeLogFolder(*root, "attempt_0/1").ok());
    return *root;
  }

  const testing::TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path();

 private:
  const mode_t umask_;
};

TEST_F(LogFilesTest, NobodyElseCanWriteWhatIsMadeWhateverTheParentAndTheUmask) {
  const std::string shared = folder_ + "/shared";
  ASSERT_EQ(::mkdir(shared.c_str(), 0777), 0);
  ASSERT_EQ(::chmod(shared.c_str(), 01777), 0);
  ASSERT_TRUE(MakeFolders(shared + "/a/b").ok());
  EXPECT_EQ(ModeOf(shared + "/a"), 0755U);
  EXPECT_EQ(ModeOf(shared + "/a/b"), 0755U);
  const auto root = MakeLogRoot(shared, "run");
  ASSERT_TRUE(root.ok()) << root.status();
  EXPECT_THAT(root->path, StartsWith(shared + "/run_"));
  EXPECT_EQ(ModeOf(root->path), 0755U);
  ASSERT_TRUE(MakeLogFolder(*root, "attempt_0/1").ok());
  EXPECT_EQ(ModeOf(root->path + "/attempt_0"), 0755U);
  EXPECT_EQ(ModeOf(root->path + "/attempt_0/1"), 0755U);
  const std::string file = root->path + "/attempt_0/1/stdout.log";
  EXPECT_TRUE(OpenLogFile(*root, file).ok());
  EXPECT_EQ(ModeOf(file), 0644U);
}

TEST_F(LogFilesTest, AParentThatOthersCannotReadAndTheUmaskKeepTheRootFromOthers) {
  ASSERT_EQ(::chmod(folder_.c_str(), 0750), 0);
  EXPECT_EQ(ModeOf(MakeRoot().path), 0750U);
  ::umask(077);
  EXPECT_EQ(ModeOf(MakeRoot().path), 0700U);
}

TEST_F(LogFilesTest, AFileIsAppendedToWhereItIsOursAlready) {
  const LogRoot root = MakeRoot();
  const std::string path = root.path + "/attempt_0/filtered_stdout.log";
  const auto one = OpenLogFile(root, path);
  const auto two = OpenLogFile(root, path);
  ASSERT_TRUE(one.ok() && two.ok()) << one.status() << two.status();
  Append(*one, "a");
  Append(*two, "b");
  Append(*one, "c");
  EXPECT_EQ(ContentsOf(path), "abc");
}

// Puts another object in a file's place; OpenLogFile() must refuse it and leave it as it is.
TEST_F(LogFilesTest, AFileThatIsNotOursIsRefusedInOneLine) {
  const std::string outside = folder_ + "/outside";
  const auto refused = [&](const std::string& why,
                           const std::function<void(const std::string&)>& put) {
    const LogRoot root = MakeRoot();
    const std::string path = root.path + "/attempt_0/1/stdout.log";
    std::ofstream(outside) << "theirs";
    put(path);
    const auto file = OpenLogFile(root, path);
    EXPECT_TRUE(absl::IsFailedPrecondition(file.status())) << why << ": " << file.status();
    const std::string message(file.status().message());
    EXPECT_THAT(message, HasSubstr(path));
    EXPECT_THAT(message, HasSubstr(why));
    EXPECT_EQ(message.find('\n'), std::string::npos);
    EXPECT_EQ(ContentsOf(outside), "theirs");
    std::filesystem::remove(outside);
  };
  refused("link", [&](const std::string& path) { std::filesystem::create_symlink(outside, path); });
  refused("another name",
          [&](const std::string& path) { std::filesystem::create_hard_link(outside, path); });
  refused("can write", [&](const std::string& path) {
    std::ofstream(path) << "x";
    ASSERT_EQ(::chmod(path.c_str(), 0666), 0);
  });
  refused("another file is in its place",
          [&](const std::string& path) { ASSERT_EQ(::mkdir(path.c_str(), 0700), 0); });
  refused("another file is in its place",
          [&](const std::string& path) { ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0); });
}

TEST_F(LogFilesTest, AFolderThatIsNotOursIsRefusedInOneLine) {
  for (const char* name : {"", "/attempt_0", "/attempt_0/1"}) {
    const LogRoot root = MakeRoot();
    const std::string path = root.path + name;
    const auto refused = [&](const LogRoot& with, const std::string& why) {
      for (const absl::Status& status :
           {MakeLogFolder(with, "attempt_0/1"),
            OpenLogFile(with, root.path + "/attempt_0/1/stdout.log").status()}) {
        EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
        const std::string message(status.message());
        EXPECT_THAT(message, HasSubstr(why));
        EXPECT_THAT(message, HasSubstr(path));
        EXPECT_EQ(message.find('\n'), std::string::npos);
      }
    };
    const mode_t mode = ModeOf(path);
    for (const mode_t bit : {0002, 0020}) {
      ASSERT_EQ(::chmod(path.c_str(), mode | bit), 0);
      refused(root, "other users can write it");
    }
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    std::filesystem::rename(path, folder_ + "/moved");
    std::filesystem::create_directory_symlink(folder_ + "/moved", path);
    refused(root, "a link");
    EXPECT_FALSE(std::filesystem::exists(folder_ + "/moved/stdout.log"));
    std::filesystem::remove_all(folder_ + "/moved");
  }
  // Only the superuser can make a folder of another user.
  LogRoot of_another = MakeRoot();
  ++of_another.owner;
  const absl::Status status = MakeLogFolder(of_another, "attempt_0/1");
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("belongs to another user"));
}

}  // namespace
}  // namespace ddp::launcher
