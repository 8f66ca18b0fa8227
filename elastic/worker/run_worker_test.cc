#include "elastic/worker/run_worker.h"

#include <sys/wait.h>

#include <csignal>
#include <thread>

#include "elastic/worker/error_file_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;

class RunWorkerTest : public ErrorFileFixture {};

TEST_F(RunWorkerTest, BodysResultIsTheExitCodeAndNothingIsWritten) {
  const Result result = RunChild([] { return run_worker([] { return 7; }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 7);
  EXPECT_EQ(result.file, "");
}

TEST_F(RunWorkerTest, ExceptionIsReportedWithTypeAndText) {
  const Result result =
      RunChild([] { return run_worker([]() -> int { throw Bug("weights are gone"); }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(Message(result), HasSubstr("Bug: weights are gone"));
  EXPECT_THAT(result.standard_error, HasSubstr("Bug: weights are gone\n"));
}

TEST_F(RunWorkerTest, ExceptionOnAnotherThreadIsReportedBeforeTheAbort) {
  const Result result = RunChild([] {
    return run_worker([] {
      std::thread([] { throw Bug("in the loader"); }).join();
      return 0;
    });
  });
  EXPECT_TRUE(WIFSIGNALED(result.wait_status));
  EXPECT_EQ(WTERMSIG(result.wait_status), SIGABRT);
  EXPECT_THAT(Message(result), HasSubstr("Bug: in the loader"));
}

TEST_F(RunWorkerTest, FaultOfTheProcessIsReported) {
  const Result result = RunChild([] {
    return run_worker([] {
      raise(SIGFPE);
      return 0;
    });
  });
  EXPECT_TRUE(WIFSIGNALED(result.wait_status));
  EXPECT_EQ(WTERMSIG(result.wait_status), SIGFPE);
  EXPECT_THAT(Message(result), HasSubstr("SIGFPE"));
}

}  // namespace
}  // namespace ddp::elastic
