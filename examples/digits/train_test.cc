// Runs the example under the real ddprun, on the digits of this repository.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"
#include "testing/jobs/checkpoint_files.h"

namespace ddp::examples {
namespace {

namespace fs = std::filesystem;
using launcher::DdprunDriver;
using ::testing::HasSubstr;
using testing::NewestCheckpoint;
using testing::NewestTensors;

class DigitsTest : public launcher::ExampleCase {
 protected:
  // Returns ddprun's options for two ranks with checkpoints in the folder `name`.
  DdprunDriver::Options Job(const std::string& name, const std::vector<std::string>& flags) const {
    std::vector<std::string> arguments = {
        "--standalone",     "--nproc-per-node=2",
        "--max-restarts=3", "--event-log-file=" + EventLog(name),
        Trainer(),          "--checkpoint_dir=" + (folder_ / name).string()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return {.arguments = arguments};
  }
};

TEST_F(DigitsTest, LearnsTheDigitsAndResumes) {
  DdprunDriver run(Job("job", {"--epochs=12"}));
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(launcher::LastLine(run.out()),
              ::testing::ContainsRegex("epoch 11 loss 0\\.[0-9]{4} test_accuracy 0\\.9[5-9]"));
  EXPECT_EQ(NewestCheckpoint(folder_ / "job").filename(), "step-000000000540.g0001");

  DdprunDriver resumed(Job("job", {"--epochs=13", "--resume"}));
  EXPECT_EQ(resumed.Wait(), 0) << resumed.err();
  EXPECT_THAT(resumed.err(), HasSubstr("continues from "));
  EXPECT_EQ(launcher::Count(resumed.out(), "epoch "), 1) << resumed.out();
}

TEST_F(DigitsTest, AKilledRankCostsNoBitOfTheResult) {
  const std::vector<std::string> flags = {"--epochs=6", "--checkpoint_every=20"};
  DdprunDriver peaceful(Job("peaceful", flags));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();

  DdprunDriver run(Job("killed", flags));
  run.AwaitStdout("epoch 1 ");
  ASSERT_EQ(::kill(PidOf("killed", 1, 1), SIGKILL), 0);
  run.AwaitStdout("epoch 3 ");
  ASSERT_EQ(::kill(PidOf("killed", 2, 0), SIGKILL), 0);
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.err(), HasSubstr("restart 1 of 3: generation 2: rank 1 was killed by SIGKILL\n"));
  EXPECT_THAT(run.err(), HasSubstr("restart 2 of 3: generation 3: rank 0 was killed by SIGKILL\n"));
  EXPECT_THAT(run.err(), HasSubstr("continues from "));

  EXPECT_TRUE(NewestTensors(folder_ / "killed") == NewestTensors(folder_ / "peaceful"));
  // The model, the optimizer, and two ranks' generators.
  EXPECT_EQ(NewestTensors(folder_ / "killed").size(), 4u);
}

TEST_F(DigitsTest, BadDataAndFlagsAreOneClearLine) {
  const fs::path data = folder_ / "data";
  fs::create_directories(data);
  for (const auto& entry : fs::directory_iterator("examples/digits/data")) {
    fs::copy_file(entry.path(), data / entry.path().filename());
  }
  fs::resize_file(data / "train-images-idx3-ubyte", 5000);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--data_dir=" + data.string(), "train-images-idx3-ubyte is not usable: the header promises"},
      {"--data_dir=/nonexistent", "cannot read /nonexistent/train-images-idx3-ubyte: No such file"},
      {"--checkpoint_dir=" + (data / "t10k-labels-idx1-ubyte").string(), "t10k-labels-idx1-ubyte"},
      {"--checkpoint_dir=" + (data / "t10k-labels-idx1-ubyte" / "x").string(),
       "t10k-labels-idx1-ubyte/x"},
      {"--epochs=0", "epochs is 0: it must be above 0"},
      {"--lr=-1", "Invalid learning rate: -1"}};
  for (const auto& [flag, text] : cases) {
    DdprunDriver run({.arguments = {"--nproc-per-node=2", Trainer(), flag}});
    EXPECT_EQ(run.Wait(), 1) << flag;
    EXPECT_THAT(run.err(), HasSubstr(text)) << flag;
  }
}

}  // namespace
}  // namespace ddp::examples
