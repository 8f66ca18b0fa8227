#ifndef DDP_ELASTIC_WORKER_ERROR_FILE_FIXTURE_H_
#define DDP_ELASTIC_WORKER_ERROR_FILE_FIXTURE_H_

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace ddp::elastic {

struct Bug : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs a test's body in a child process with its own error file. A test needs its own process
// because a process writes only its first error, and std::terminate ends the process.
class ErrorFileFixture : public ::testing::Test {
 protected:
  struct Result {
    int wait_status = 0;
    std::string standard_error;
    std::string file;  // empty: none was written
  };

  Result RunChild(const std::function<int()>& body) {
    const std::string folder = ::testing::TempDir();
    const std::string path = absl::StrCat(folder, "/error.json");
    const std::string console = absl::StrCat(folder, "/stderr");
    unlink(path.c_str());
    const pid_t pid = fork();
    if (pid == 0) {
      setenv("TORCHELASTIC_ERROR_FILE", path_override_.value_or(path).c_str(), 1);
      const int fd = open(console.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(fd, STDERR_FILENO);
      _exit(body());
    }
    Result result;
    EXPECT_EQ(waitpid(pid, &result.wait_status, 0), pid);
    result.standard_error = Contents(console);
    result.file = Contents(path);
    return result;
  }

  static std::string Contents(const std::string& path) {
    std::ifstream stream(path);
    std::ostringstream text;
    text << stream.rdbuf();
    return text.str();
  }

  static std::string Message(const Result& result) {
    const nlohmann::json json = nlohmann::json::parse(result.file, nullptr, false);
    EXPECT_FALSE(json.is_discarded()) << result.file;
    if (json.is_discarded()) return "";
    int64_t seconds = 0;
    EXPECT_TRUE(
        absl::SimpleAtoi(json["message"]["extraInfo"]["timestamp"].get<std::string>(), &seconds));
    EXPECT_GT(seconds, 1'700'000'000);
    return json["message"]["message"];
  }

  std::optional<std::string> path_override_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_ERROR_FILE_FIXTURE_H_
