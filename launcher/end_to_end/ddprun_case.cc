#include "launcher/end_to_end/ddprun_case.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <sstream>

#include "absl/strings/str_split.h"

namespace ddp::launcher {

std::vector<std::string> Shell(std::vector<std::string> flags, const std::string& script) {
  flags.insert(flags.end(), {"sh", "-c", script});
  return flags;
}

std::vector<std::string> Lines(const std::string& text) {
  return absl::StrSplit(text, '\n', absl::SkipEmpty());
}

std::string Slurp(const std::filesystem::path& path) {
  std::stringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::filesystem::path RunFolder(const std::string& log_dir) {
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(log_dir)) found.push_back(entry);
  EXPECT_EQ(found.size(), 1U);
  return found.empty() ? std::filesystem::path() : found[0];
}

Folder::Folder() : path_("/tmp/ddprun_case_XXXXXX") { EXPECT_NE(::mkdtemp(path_.data()), nullptr); }

Folder::~Folder() { std::filesystem::remove_all(path_); }

}  // namespace ddp::launcher
