// Tests of the worker library under the real ddprun: faults of a rank that ddprun distinguishes
// only by the health page and the error file.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/under_sanitizer.h"
#include "launcher/end_to_end/ddprun_driver.h"

namespace ddp::testing {
namespace {

using launcher::DdprunDriver;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

DdprunDriver::Options Job(const std::string& fault, std::vector<std::string> flags) {
  flags.insert(flags.end(),
               {"--standalone", "--nproc-per-node=2", "testing/faulty_trainer", fault});
  return {.arguments = flags};
}

TEST(WorkerUnderDdprunTest, ARankThatHangsIsFoundWithItsPhaseAndReplaced) {
  DdprunDriver run(Job("hang", {"--hang-timeout=1", "--max-restarts=1"}));
  EXPECT_EQ(run.Wait(), 0) << run.err();
  // Rank 0 has made no step for as long, but waits for a peer, so it is not named.
  EXPECT_THAT(run.err(),
              ContainsRegex("restart 1 of 1: generation 2: rank 1 made no step for [0-9.]+m?s, in "
                            "forward; the longest step took "));
}

TEST(WorkerUnderDdprunTest, TheReportTellsWhereARankCrashed) {
  if (kUnderSanitizer) {
    GTEST_SKIP() << "the sanitizer has handlers and a report of its own for these signals";
  }
  DdprunDriver run(Job("segv", {}));
  EXPECT_EQ(run.Wait(), 1) << run.err();
  EXPECT_THAT(run.err(), ContainsRegex("Signal 11 \\(SIGSEGV\\) received by PID [0-9]+: no memory "
                                       "at address 0x10\n +#0 [^\n]*faulty_trainer\\+0x"));
  EXPECT_THAT(run.err(), HasSubstr("exitcode  : -11 (pid: "));
}

TEST(WorkerUnderDdprunTest, TheReportTellsWhatARankThrew) {
  DdprunDriver run(Job("elephants", {}));
  EXPECT_EQ(run.Wait(), 1) << run.err();
  EXPECT_THAT(run.err(), HasSubstr("std::invalid_argument: no such fault: elephants"));
  EXPECT_THAT(run.err(), Not(HasSubstr("cannot be used")));
}

// The agent stops the survivors at once. This trainer ignores SIGTERM, so they end by their errors.
TEST(WorkerUnderDdprunTest, SurvivorsNameTheRankThatWasKilled) {
  const std::string folder = ::testing::TempDir();
  DdprunDriver run(
      {.arguments = {"--standalone", "--nproc-per-node=4", "--fault-grace-ms=20000",
                     "testing/hosts/summing_trainer", "--dies=2",
                     "--state=" + folder + "/killed_state", "--until=" + folder + "/never"}});
  EXPECT_EQ(run.Wait(), 1) << run.err();
  for (const char* survivor : {"rank 0", "rank 1", "rank 3"}) {
    EXPECT_THAT(run.err(), HasSubstr(std::string(survivor) +
                                     ": stopped in an all-reduce, because rank 2 failed: "));
  }
}

}  // namespace
}  // namespace ddp::testing
