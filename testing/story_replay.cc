#include "testing/story_replay.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ddp::testing {
namespace {

// Returns the text of the file with the present results in place of the expected ones.
std::string Replay(const std::string& path, StoryPlayer& player) {
  std::ifstream file(path);
  EXPECT_TRUE(file.is_open()) << path;
  std::ostringstream out;
  bool before_first_event = true;
  for (std::string line; std::getline(file, line);) {
    const bool is_event = line.rfind("> ", 0) == 0;
    if (is_event) before_first_event = false;
    // The expected results are replaced.
    if (!is_event && !before_first_event && !line.empty() && line[0] != '#') continue;
    out << line << "\n";
    const std::vector<std::string> words =
        absl::StrSplit(is_event ? line.substr(2) : line, ' ', absl::SkipEmpty());
    if (!is_event) {
      if (!words.empty() && words[0] == "options") player.SetOptions(words);
      continue;
    }
    SCOPED_TRACE(line);
    for (const std::string& followed : player.Play(words)) out << followed << "\n";
  }
  return out.str();
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> StoryFiles(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".txt") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  EXPECT_FALSE(files.empty()) << folder;
  return files;
}

class StoryTest : public ::testing::Test {
 public:
  StoryTest(const StorySuite& suite, std::string path, bool rewrite)
      : suite_(suite), path_(std::move(path)), rewrite_(rewrite) {}

  void TestBody() override {
    const std::string replayed = Replay(path_, *suite_.make_player());
    if (rewrite_) {
      std::ofstream(path_) << replayed;
      return;
    }
    EXPECT_EQ(replayed, ReadFile(path_))
        << "if this is meant: bazel run " << suite_.target << " -- --rewrite";
  }

 private:
  const StorySuite& suite_;
  const std::string path_;
  const bool rewrite_;
};

}  // namespace

int RunStories(int argc, char** argv, const StorySuite& suite) {
  ::testing::InitGoogleTest(&argc, argv);
  const bool rewrite = std::any_of(argv + 1, argv + argc, [](const char* argument) {
    return std::string(argument) == "--rewrite";
  });
  // `bazel run` gives the folder of the sources; a test runs in its runfiles.
  const char* sources = getenv("BUILD_WORKSPACE_DIRECTORY");
  const std::string folder =
      rewrite && sources != nullptr ? absl::StrCat(sources, "/", suite.folder) : suite.folder;
  for (const std::string& file : StoryFiles(folder)) {
    const std::string name = std::filesystem::path(file).stem().string();
    ::testing::RegisterTest(
        suite.name.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
        [&suite, file, rewrite]() -> StoryTest* { return new StoryTest(suite, file, rewrite); });
  }
  return RUN_ALL_TESTS();
}

}  // namespace ddp::testing
