// Runs the example under the real ddprun: two trainers and a server, one process, and the loss of
// each role.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <regex>
#include <string>
#include <vector>

#include "launcher/end_to_end/ddprun_driver.h"
#include "launcher/end_to_end/example_case.h"
#include "testing/redis/redis_fixture.h"

namespace ddp::examples {
namespace {

using launcher::DdprunDriver;
using launcher::LastLine;

class HybridTest : public launcher::ExampleCase {
 protected:
  // Returns ddprun's options for a job with checkpoints in the folder `name`.
  DdprunDriver::Options Job(const std::string& name, std::vector<std::string> flags,
                            int processes = 3) const {
    std::vector<std::string> arguments = {"--nproc-per-node=" + std::to_string(processes),
                                          "--max-restarts=3", "--event-log-file=" + EventLog(name),
                                          Trainer(),
                                          "--checkpoint_dir=" + (folder_ / name).string()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return {.arguments = arguments};
  }
};

double LossAt(const std::string& out, int step) {
  std::smatch found;
  const std::regex line("step " + std::to_string(step) + " loss ([0-9.e+-]+)");
  if (!std::regex_search(out, found, line)) return -1;
  return std::stod(found[1]);
}

// Returns the sums in the last line.
std::pair<double, double> Sums(const std::string& out) {
  std::smatch found;
  const std::string line = launcher::LastLine(out);
  if (!std::regex_search(line, found, std::regex("table ([-0-9.e+]+) net ([-0-9.e+]+)"))) {
    ADD_FAILURE() << "no sums in " << line;
    return {};
  }
  return {std::stod(found[1]), std::stod(found[2])};
}

// The trainers share the batches that one process trains alone, and the loss falls alike. Steps of
// SGD add up to the step of one process; those of Adagrad would not.
TEST_F(HybridTest, LearnsAsOneProcessDoes) {
  for (const char* sparse : {"--sparse=false", "--sparse=true"}) {
    SCOPED_TRACE(sparse);
    const std::vector<std::string> flags = {"--steps=60", "--table_optimizer=sgd", "--table_lr=0.5",
                                            sparse};
    DdprunDriver three(Job(std::string("three") + sparse, flags));
    ASSERT_EQ(three.Wait(), 0) << three.err();
    DdprunDriver one(Job(std::string("one") + sparse, flags, 1));
    ASSERT_EQ(one.Wait(), 0) << one.err();
    const auto [table, net] = Sums(three.out());
    const auto [table_of_one, net_of_one] = Sums(one.out());
    EXPECT_NEAR(table / table_of_one, 1, 1e-6);
    EXPECT_NEAR(net / net_of_one, 1, 1e-6);
    const double first = LossAt(three.out(), 10);
    EXPECT_GT(first, 0);
    EXPECT_LT(LossAt(three.out(), 60), first);
    for (const int step : {10, 60}) {
      EXPECT_NEAR(LossAt(three.out(), step), LossAt(one.out(), step), 1e-4) << step;
    }
  }
}

TEST_F(HybridTest, ContinuesBitByBitAfterTheLossOfAnyRole) {
  const std::vector<std::string> flags = {"--steps=240", "--checkpoint_every=20"};  // Adagrad
  DdprunDriver peaceful(Job("peaceful", flags));
  ASSERT_EQ(peaceful.Wait(), 0) << peaceful.err();
  ASSERT_THAT(LastLine(peaceful.out()), ::testing::StartsWith("table "));
  ASSERT_THAT(LastLine(peaceful.out()), ::testing::HasSubstr(" state 480 "));  // two in each step

  // A trainer, then the server, then the other trainer, each in a generation of its own.
  DdprunDriver run(Job("killed", flags));
  const std::vector<int> victims = {1, 2, 0};
  for (size_t i = 0; i < victims.size(); ++i) {
    run.AwaitStdout("step " + std::to_string(50 * (i + 1)) + " ");
    ASSERT_EQ(::kill(PidOf("killed", i + 1, victims[i]), SIGKILL), 0);
    run.AwaitStderr("restart " + std::to_string(i + 1) + " of 3");
  }
  EXPECT_EQ(run.Wait(), 0) << run.err();
  EXPECT_EQ(launcher::Count(run.out(), "step 10 "), 1);  // nobody began at the first step again
  EXPECT_EQ(LastLine(run.out()), LastLine(peaceful.out()));
}

// One node per role, in either order of the ranks.
TEST_F(HybridTest, RolesComeFromTheNodes) {
  const auto redis = ::ddp::testing::RedisFixture::StartTcp();
  for (const int server_rank : {0, 1}) {
    SCOPED_TRACE(server_rank);
    const std::string name = "roles" + std::to_string(server_rank);
    const auto node = [&](const std::string& role, int rank, int processes) {
      DdprunDriver::Options options = Job(name, {"--steps=20"}, processes);
      options.arguments.insert(
          options.arguments.begin(),
          {"--nnodes=2", "--rdzv-id=" + name, "--role=" + role,
           "--node-rank=" + std::to_string(rank),
           "--rdzv-endpoint=127.0.0.1:" + std::to_string(redis->endpoint().port)});
      std::erase(options.arguments, "--event-log-file=" + EventLog(name));
      return options;
    };
    DdprunDriver server(node("server", server_rank, 1));
    DdprunDriver trainers(node("trainer", 1 - server_rank, 2));
    EXPECT_EQ(server.Wait(), 0) << server.err();
    EXPECT_EQ(trainers.Wait(), 0) << trainers.err();
    EXPECT_THAT(trainers.out(), ::testing::HasSubstr("step 20 loss "));
    EXPECT_EQ(server.out(), "");
  }
}

}  // namespace
}  // namespace ddp::examples
