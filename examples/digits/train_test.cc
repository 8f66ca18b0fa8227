// A whole job, as a user runs it: the real ddprun, the real trainer, the real digits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"
#include "launcher/end_to_end/ddprun_driver.h"
#include "testing/network/loopback_client.h"

namespace ddp::examples {
namespace {

namespace fs = std::filesystem;
using launcher::DdprunDriver;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kTrain[] = "examples/digits/train";

std::string Read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<nlohmann::json> JsonLines(const fs::path& path) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(Read(path));
  for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

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

class DigitsTest : public ::testing::Test {
 protected:
  DigitsTest()
      : folder_(fs::path(::testing::TempDir()) /
                ::testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::create_directories(folder_);
  }

  fs::path Checkpoints(const std::string& name) const { return folder_ / name; }

  // Returns ddprun's arguments for two ranks that keep checkpoints in `name`.
  DdprunDriver::Options Job(const std::string& name, std::vector<std::string> flags) const {
    std::vector<std::string> arguments = {"--standalone",
                                          "--nproc-per-node=2",
                                          "--max-restarts=3",
                                          "--event-log-file=" + EventLog(name).string(),
                                          kTrain,
                                          "--checkpoint_dir=" + Checkpoints(name).string()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return {.arguments = arguments};
  }

  fs::path EventLog(const std::string& name) const { return folder_ / (name + ".events"); }

  pid_t PidOf(const std::string& name, uint64_t generation, size_t rank) const {
    for (const nlohmann::json& event : JsonLines(EventLog(name))) {
      if (event["event"] == "generation_started" && event["generation"] == generation) {
        return event["pids"][rank];
      }
    }
    return -1;
  }

  fs::path Newest(const std::string& name) const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(Checkpoints(name))) {
      if (entry.is_directory()) found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    return found.empty() ? fs::path() : found.back();
  }

  // Returns the .safetensors files of the newest checkpoint, by name.
  std::map<std::string, std::string> Tensors(const std::string& name) const {
    std::map<std::string, std::string> files;
    for (const auto& entry : fs::directory_iterator(Newest(name))) {
      if (entry.path().extension() == ".safetensors") {
        files[entry.path().filename()] = Read(entry.path());
      }
    }
    return files;
  }

  std::vector<int> Epochs(const std::string& name) const {
    std::vector<int> epochs;
    for (const nlohmann::json& line : JsonLines(Checkpoints(name) / "metrics.jsonl")) {
      epochs.push_back(line["epoch"]);
    }
    return epochs;
  }

  const fs::path folder_;
};

TEST_F(DigitsTest, LearnsTheDigits) {
  DdprunDriver run(Job("job", {"--epochs=12"}));
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_THAT(run.out(),
              ::testing::ContainsRegex("epoch 11 loss 0\\.[0-9]{4} test_accuracy 0\\.[0-9]{4} "
                                       "samples_per_second [0-9]+\n"));
  const nlohmann::json last = JsonLines(Checkpoints("job") / "metrics.jsonl").back();
  EXPECT_GE(last["test_accuracy"].get<double>(), 0.95);
  EXPECT_EQ(Newest("job").filename(), "step-000000000540.g0001");
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
  EXPECT_THAT(run.err(), HasSubstr("goes on from "));

  EXPECT_TRUE(Tensors("killed") == Tensors("peaceful"));
  EXPECT_EQ(Tensors("killed").size(), 4u);  // model, optimizer, two ranks' generators
  EXPECT_THAT(Epochs("killed"), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST_F(DigitsTest, AJobThatIsToldToLeaveSavesItsLastStep) {
  const std::vector<std::string> flags = {"--epochs=4", "--checkpoint_every=0"};
  DdprunDriver peaceful(Job("peaceful", flags));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();

  // SIGTERM, as a scheduler sends it before it takes the machine away.
  DdprunDriver run(Job("preempted", flags));
  run.AwaitStdout("epoch 0 ");
  ASSERT_EQ(::kill(run.pid(), SIGTERM), 0);
  EXPECT_EQ(run.Wait(), 1) << run.err();
  EXPECT_THAT(Newest("preempted").filename().string(), ::testing::StartsWith("step-"));

  DdprunDriver resumed(Job("preempted", {"--epochs=4", "--checkpoint_every=0", "--resume=any"}));
  EXPECT_EQ(resumed.Wait(), 0) << resumed.err();
  EXPECT_THAT(resumed.err(), HasSubstr("goes on from "));
  EXPECT_TRUE(Tensors("preempted") == Tensors("peaceful"));
}

TEST_F(DigitsTest, ANewJobResumesOnlyWhenToldTo) {
  ASSERT_EQ(DdprunDriver(Job("job", {"--epochs=1"})).Wait(), 0);
  const auto before = Tensors("job");

  DdprunDriver careless(Job("job", {"--epochs=2"}));
  EXPECT_EQ(careless.Wait(), 1);
  EXPECT_THAT(careless.err(), HasSubstr("holds checkpoints already: resume from them, or "
                                        "name another checkpoint folder"));
  EXPECT_TRUE(Tensors("job") == before);

  DdprunDriver resumed(Job("job", {"--epochs=2", "--resume=any"}));
  EXPECT_EQ(resumed.Wait(), 0) << resumed.err();
  EXPECT_THAT(resumed.out(), Not(HasSubstr("epoch 0 ")));
  EXPECT_THAT(Epochs("job"), ElementsAre(0, 1));

  DdprunDriver in_one_go(Job("other", {"--epochs=2"}));
  ASSERT_EQ(in_one_go.Wait(), 0);
  EXPECT_TRUE(Tensors("job") == Tensors("other"));
}

// With port 0 each job has a server of its own, which counts the jobs of an id from 1.
TEST_F(DigitsTest, ANewJobUnderAnOldIdContinuesUnlessToldNotTo) {
  const auto job = [this](const std::vector<std::string>& flags) {
    DdprunDriver::Options options = Job("job", flags);
    options.arguments[0] = "--rdzv-endpoint=localhost:0";  // in place of --standalone
    options.arguments.insert(options.arguments.begin(), "--rdzv-id=again");
    return options;
  };
  ASSERT_EQ(DdprunDriver(job({"--epochs=1"})).Wait(), 0);
  const auto before = Tensors("job");

  DdprunDriver careless(job({"--epochs=2", "--resume=never"}));
  EXPECT_EQ(careless.Wait(), 1);
  EXPECT_THAT(careless.err(), HasSubstr("restart 1 of 3"));
  EXPECT_THAT(careless.err(), HasSubstr("holds checkpoints already: resume from them, or "
                                        "name another checkpoint folder"));
  EXPECT_THAT(careless.err(), Not(HasSubstr("goes on from ")));
  EXPECT_TRUE(Tensors("job") == before);

  DdprunDriver resumed(job({"--epochs=2"}));
  EXPECT_EQ(resumed.Wait(), 0) << resumed.err();
  EXPECT_THAT(resumed.err(), HasSubstr("goes on from "));
}

// A write beyond 16 KiB of a file fails in the workers, as on a full disk: no checkpoint fits.
TEST_F(DigitsTest, AFullDiskCostsCheckpointsAndNotTheJob) {
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
  EXPECT_EQ(Newest("full"), fs::path());
}

TEST_F(DigitsTest, AFailedSaveIsSeenInMetricsAndStatus) {
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
        const UniqueFd fd = testing::DialLoopback(port);
        if (!fd.valid()) return std::string();
        testing::SendText(fd, "GET /metrics HTTP/1.1\r\n\r\n");
        return testing::ReceiveText(fd);
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
      {"--epochs=0", "--epochs=0 must be at least 1"},
      {"--lr=-1", "must be above 0"}};
  for (const auto& [flag, text] : cases) {
    DdprunDriver run({.arguments = {"--nproc-per-node=2", kTrain, flag}});
    EXPECT_EQ(run.Wait(), 1) << flag;
    EXPECT_THAT(run.err(), HasSubstr(text)) << flag;
  }
}

}  // namespace
}  // namespace ddp::examples
