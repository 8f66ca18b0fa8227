// Tests of the real ddprun in control groups that hold its processes down. Skipped where a test can
// make no groups of version 1.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "launcher/end_to_end/ddprun_case.h"
#include "launcher/end_to_end/ddprun_driver.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// A control group of one controller.
class ControlGroup {
 public:
  explicit ControlGroup(const std::string& controller)
      : path_(absl::StrCat("/sys/fs/cgroup/", controller, "/ddprun-test-", ::getpid())),
        made_(::mkdir(path_.c_str(), 0700) == 0) {}
  ~ControlGroup() { ::rmdir(path_.c_str()); }
  ControlGroup(const ControlGroup&) = delete;
  ControlGroup& operator=(const ControlGroup&) = delete;

  bool made() const { return made_; }
  void Set(const std::string& file, const std::string& value) const {
    std::ofstream(path_ + "/" + file) << value;
  }
  std::string Get(const std::string& file) const { return Slurp(path_ + "/" + file); }
  // Returns the shell command by which a process enters the group.
  std::string Enter() const { return absl::StrCat("echo $$ > ", path_, "/cgroup.procs; "); }

 private:
  const std::string path_;
  const bool made_;
};

TEST(ControlGroupTest, WithFewProcessesARunNamesTheCallThatIsRefused) {
  const ControlGroup limit("pids");
  if (!limit.made()) GTEST_SKIP() << "no control group for processes can be made here";
  bool succeeded = false;
  for (int most = 1; most <= 40 && !succeeded; ++most) {
    limit.Set("pids.max", absl::StrCat(most));
    DdprunDriver run({.arguments = Shell({"--standalone", "--nproc-per-node=2"}, "true"),
                      .before = {"/bin/sh", "-c", limit.Enter() + "exec \"$0\" \"$@\""}});
    const int code = run.Wait();
    EXPECT_THAT(run.TemporaryEntries(), IsEmpty());
    EXPECT_THAT(run.err(), AllOf(Not(HasSubstr("SIGABRT")), Not(HasSubstr("terminate called"))));
    if (most <= 2) {
      EXPECT_THAT(Lines(run.err()), ElementsAre(HasSubstr("unavailable"))) << most;
    }
    if (code == 0) {
      EXPECT_EQ(run.err(), "") << most;
    } else {
      EXPECT_EQ(code, 1) << most;
      EXPECT_THAT(run.err(), AnyOf(HasSubstr("Resource temporarily unavailable"),
                                   HasSubstr("Can't initialize Background Jobs")))  // Redis' words
          << most;
    }
    succeeded = code == 0;
  }
  EXPECT_TRUE(succeeded);
}

// A run whose rank 0 fails while rank 1 is frozen: SIGKILL ends a frozen process when it thaws.
class FrozenWorkerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!freezer_.made()) GTEST_SKIP() << "no control group can be frozen here";
  }

  std::vector<std::string> Arguments(std::vector<std::string> flags) const {
    flags.insert(flags.end(), {"--nproc-per-node=2", "--max-restarts=1", "--kill-timeout=1"});
    return Shell(flags, absl::StrCat("if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then exit 0; fi; "
                                     "if [ $RANK = 1 ]; then ",
                                     freezer_.Enter(), "echo ready; sleep 1000; fi; ",
                                     "until [ -e ", frozen_, " ]; do sleep .02; done; exit 3"));
  }

  ~FrozenWorkerTest() override { Thaw(); }

  void FreezeOneAndFail(DdprunDriver& run) {
    run.AwaitStdout("ready");
    const absl::Time deadline = MonotonicClock().Now() + DdprunDriver::kDeadline;
    freezer_.Set("freezer.state", "FROZEN");
    while (freezer_.Get("freezer.state") != "FROZEN\n" && MonotonicClock().Now() < deadline) {
    }
    EXPECT_EQ(freezer_.Get("freezer.state"), "FROZEN\n");
    std::ofstream(frozen_).flush();
  }

  void Thaw() const { freezer_.Set("freezer.state", "THAWED"); }

  const ControlGroup freezer_{"freezer"};
  const Folder folder_;
  const std::string frozen_ = folder_ / "frozen";
};

TEST_F(FrozenWorkerTest, ThatTheKernelEndsLateDoesNotCostTheNode) {
  DdprunDriver run({.arguments = Arguments({})});
  FreezeOneAndFail(run);
  run.AwaitStderr("waiting 2m in all (--stuck-timeout)");
  Thaw();
  EXPECT_EQ(run.Wait(), 0);
  EXPECT_THAT(run.err(),
              AllOf(HasSubstr("1 worker did not end by SIGKILL within 1s (--kill-timeout): rank 1"),
                    HasSubstr("is in uninterruptible sleep (state D)"),
                    HasSubstr("restart 1 of 1: generation 2: rank 0 exited with code 3")));
}

TEST_F(FrozenWorkerTest, IsWaitedForAsLongAsTheUserSays) {
  DdprunDriver run({.arguments = Arguments({"--stuck-timeout=2"})});
  FreezeOneAndFail(run);
  run.AwaitStderr("waiting 2s in all (--stuck-timeout)");
  run.AwaitStderr("some processes of the workers did not end by SIGKILL");
  Thaw();
  EXPECT_EQ(run.Wait(), 1);
  EXPECT_THAT(run.err(), HasSubstr("did not end by SIGKILL within 2s"));
}

}  // namespace
}  // namespace ddp::launcher
