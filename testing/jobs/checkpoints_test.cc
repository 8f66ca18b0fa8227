// A job under the real ddprun saves checkpoints, and another job continues from them or refuses to.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "testing/jobs/checkpoint_files.h"
#include "testing/network/loopback_client.h"

namespace ddp::testing {
namespace {

namespace fs = std::filesystem;
using launcher::DdprunDriver;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kTrain[] = "testing/jobs/logging_trainer";

// Repeats `look` until a part of its result matches `pattern`, and returns the result.
std::string Await(const std::function<std::string()>& look, const std::string& pattern) {
  const MonotonicClock clock;
  const absl::Time deadline = clock.Now() + DdprunDriver::kDeadline;
  const std::regex expected(pattern);
  std::string text;
  while (clock.Now() < deadline) {
    text = look();
    if (std::regex_search(text, expected)) return text;
    ::poll(nullptr, 0, 20);  // no event says when the agent has checked its workers
  }
  ADD_FAILURE() << "no " << pattern << " in:\n" << text;
  return text;
}

class CheckpointsTest : public ::testing::Test {
 protected:
  CheckpointsTest()
      : folder_(fs::path(::testing::TempDir()) /
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::create_directories(folder_);
  }

  fs::path Checkpoints(const std::string& name) const { return folder_ / name; }

  // Returns ddprun's arguments for two ranks that keep checkpoints in `name`.
  DdprunDriver::Options Job(const std::string& name, std::vector<std::string> flags) const {
    std::vector<std::string> arguments = {"--standalone", "--nproc-per-node=2", "--max-restarts=3",
                                          kTrain, "--checkpoint_dir=" + Checkpoints(name).string()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return {.arguments = arguments};
  }

  const fs::path folder_;
};

TEST_F(CheckpointsTest, AJobThatIsToldToLeaveSavesItsLastStep) {
  const std::vector<std::string> flags = {"--epochs=30", "--checkpoint_every=0"};
  DdprunDriver peaceful(Job("peaceful", flags));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();

  // SIGTERM, as a scheduler sends it before it takes the machine away.
  DdprunDriver run(Job("preempted", flags));
  run.AwaitStdout("epoch 0 ");
  ASSERT_EQ(::kill(run.pid(), SIGTERM), 0);
  EXPECT_EQ(run.Wait(), 1) << run.err();
  EXPECT_THAT(NewestCheckpoint(Checkpoints("preempted")).filename().string(),
              ::testing::StartsWith("step-"));

  DdprunDriver resumed(Job("preempted", {"--epochs=30", "--checkpoint_every=0", "--resume=any"}));
  EXPECT_EQ(resumed.Wait(), 0) << resumed.err();
  EXPECT_THAT(resumed.err(), HasSubstr("continues from "));
  EXPECT_TRUE(NewestTensors(Checkpoints("preempted")) == NewestTensors(Checkpoints("peaceful")));
}

TEST_F(CheckpointsTest, ANewJobResumesOnlyWhenToldTo) {
  ASSERT_EQ(DdprunDriver(Job("job", {"--epochs=1"})).Wait(), 0);
  const auto before = NewestTensors(Checkpoints("job"));

  DdprunDriver careless(Job("job", {"--epochs=2"}));
  EXPECT_EQ(careless.Wait(), 1);
  EXPECT_THAT(careless.err(), HasSubstr("holds checkpoints already: resume from them, or "
                                        "name another checkpoint folder"));
  EXPECT_TRUE(NewestTensors(Checkpoints("job")) == before);

  DdprunDriver resumed(Job("job", {"--epochs=2", "--resume=any"}));
  EXPECT_EQ(resumed.Wait(), 0) << resumed.err();
  EXPECT_THAT(resumed.out(), Not(HasSubstr("epoch 0 ")));

  DdprunDriver in_one_go(Job("other", {"--epochs=2"}));
  ASSERT_EQ(in_one_go.Wait(), 0);
  EXPECT_TRUE(NewestTensors(Checkpoints("job")) == NewestTensors(Checkpoints("other")));
}

// With port 0 each job has a server of its own, which counts the jobs of an id from 1.
TEST_F(CheckpointsTest, ANewJobUnderAnOldIdContinuesUnlessToldNotTo) {
  const auto job = [this](const std::vector<std::string>& flags) {
    DdprunDriver::Options options = Job("job", flags);
    options.arguments[0] = "--rdzv-endpoint=localhost:0";  // in place of --standalone
    options.arguments.insert(options.arguments.begin(), "--rdzv-id=again");
    return options;
  };
  ASSERT_EQ(DdprunDriver(job({"--epochs=1"})).Wait(), 0);
  const auto before = NewestTensors(Checkpoints("job"));

  DdprunDriver careless(job({"--epochs=2", "--resume=never"}));
  EXPECT_EQ(careless.Wait(), 1);
  EXPECT_THAT(careless.err(), HasSubstr("restart 1 of 3"));
  EXPECT_THAT(careless.err(), HasSubstr("holds checkpoints already: resume from them, or "
                                        "name another checkpoint folder"));
  EXPECT_THAT(careless.err(), Not(HasSubstr("continues from ")));
  EXPECT_TRUE(NewestTensors(Checkpoints("job")) == before);

  DdprunDriver resumed(job({"--epochs=2"}));
  EXPECT_EQ(resumed.Wait(), 0) << resumed.err();
  EXPECT_THAT(resumed.err(), HasSubstr("continues from "));
}

// A write beyond 16 KiB of a file fails in the workers, as on a full disk: no checkpoint fits.
TEST_F(CheckpointsTest, AFullDiskCostsCheckpointsAndNotTheJob) {
  const std::string flags =
      "--epochs=2 --checkpoint_every=20 --checkpoint_dir=" + Checkpoints("full").string();
  const std::string command = std::string("ulimit -f 32; exec ") + kTrain + " " + flags;
  DdprunDriver run({.arguments = {"--standalone", "--nproc-per-node=2", "--max-restarts=3",
                                  "/bin/sh", "-c", command}});
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(), HasSubstr("epoch 1 loss "));
  EXPECT_THAT(run.err(), HasSubstr("the checkpoint of step 20 was not saved; training goes on"));
  EXPECT_THAT(run.err(), HasSubstr("no checkpoint was saved, and "));
  EXPECT_THAT(run.err(), Not(HasSubstr("restart 1 of 3")));
  EXPECT_EQ(NewestCheckpoint(Checkpoints("full")), fs::path());
}

TEST_F(CheckpointsTest, AFailedSaveIsSeenInMetricsAndStatus) {
  const std::string command =
      std::string("trap '' XFSZ; ulimit -f 32; exec ") + kTrain +
      " --epochs=100000 --checkpoint_every=5 --checkpoint_dir=" + Checkpoints("full").string();
  DdprunDriver run({.arguments = {"--standalone", "--nproc-per-node=2", "--metrics-port=0",
                                  "/bin/sh", "-c", command}});
  run.AwaitStderr("was not saved; training goes on");
  const std::string announced = "metrics are served on port ";
  run.AwaitStderr(announced);
  const int port =
      std::atoi(run.err().substr(run.err().find(announced) + announced.size()).c_str());
  const std::string in_metrics = Await(
      [port] {
        const UniqueFd fd = DialLoopback(port);
        if (!fd.valid()) return std::string();
        SendText(fd, "GET /metrics HTTP/1.1\r\n\r\n");
        return ReceiveText(fd);
      },
      "\nddp_failed_saves_total [1-9]");
  EXPECT_THAT(in_metrics, HasSubstr("\nddp_failed_saves_in_a_row "));

  std::vector<std::unique_ptr<DdprunDriver>> looks;  // a driver's destructor ends all jobs
  const auto status = [&run, &looks] {
    const std::map<std::string, std::string> environment = {{"TMPDIR", run.temporary_folder()}};
    looks.push_back(std::make_unique<DdprunDriver>(
        DdprunDriver::Options{.arguments = {"status"}, .environment = environment}));
    return looks.back()->Wait() == 0 ? looks.back()->out() : std::string();
  };
  const std::string in_status = Await(status, "saves     [1-9][0-9]* failed; the newest: ");
  EXPECT_THAT(in_status, HasSubstr("WARNING   no checkpoint is being saved: "));
  EXPECT_THAT(in_status, HasSubstr(": File too large"));
  ASSERT_EQ(::kill(run.pid(), SIGTERM), 0);
  EXPECT_EQ(run.Wait(), 1) << run.err();
}

}  // namespace
}  // namespace ddp::testing
