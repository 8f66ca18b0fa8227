#ifndef DDP_LAUNCHER_END_TO_END_EXAMPLE_CASE_H_
#define DDP_LAUNCHER_END_TO_END_EXAMPLE_CASE_H_

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "launcher/end_to_end/ddprun_driver.h"

namespace ddp::launcher {

// Returns the last line of `text` that is not empty.
inline std::string LastLine(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  return text.substr(text.rfind('\n', end) + 1);
}

// The fixture of a test that runs an example under the real ddprun, with event logs and checkpoints
// in a folder of its own.
class ExampleCase : public ::testing::Test {
 protected:
  ExampleCase()
      : folder_(std::filesystem::path(::testing::TempDir()) /
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  // Returns the program. The BUILD file sets the path, so that a copy of an example's folder tests
  // the copy.
  static std::string Trainer() { return std::getenv("TRAINER"); }

  // Returns the path for --event-log-file of the job `name`.
  std::string EventLog(const std::string& name) const { return folder_ / (name + ".events"); }

  // Returns the process of a rank in a generation of the job `name`; -1: it has not started.
  pid_t PidOf(const std::string& name, uint64_t generation, size_t rank) const {
    std::ifstream log(EventLog(name));
    for (std::string line; std::getline(log, line);) {
      const nlohmann::json event = nlohmann::json::parse(line);
      if (event["event"] == "generation_started" && event["generation"] == generation) {
        return event["pids"][rank];
      }
    }
    return -1;
  }

  // Runs job("peaceful"), and job("killed") with `rank` killed in epoch 20. Both must end with the
  // same line, and the restarted generation must not start from the first epoch.
  void ExpectTheSameAfterAKill(
      const std::function<DdprunDriver::Options(const std::string& name)>& job,
      size_t rank = 1) const {
    DdprunDriver peaceful(job("peaceful"));
    ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();
    DdprunDriver run(job("killed"));
    run.AwaitStdout("epoch 20 ");
    ASSERT_EQ(::kill(PidOf("killed", 1, rank), SIGKILL), 0);
    EXPECT_EQ(run.Wait(), 0) << run.err();
    EXPECT_GE(Count(run.err(), "restart 1 of 3"), 1) << run.err();
    EXPECT_EQ(Count(run.out(), "epoch 0 "), 1);
    EXPECT_EQ(LastLine(run.out()), LastLine(peaceful.out()));
  }

  const std::filesystem::path folder_;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_END_TO_END_EXAMPLE_CASE_H_
