#include "elastic/worker/run_worker.h"

#include <sys/resource.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
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

TEST_F(RunWorkerTest, AWriteBeyondTheLimitOfFileSizesFailsAndEndsNothing) {
  const Result result = RunChild([] {
    return run_worker([] {
      const rlimit none{0, 0};
      setrlimit(RLIMIT_FSIZE, &none);
      FILE* const file = std::tmpfile();
      std::fputs("x", file);
      return std::fflush(file) == EOF && errno == EFBIG ? 7 : 8;
    });
  });
  EXPECT_EQ(WIFEXITED(result.wait_status) ? WEXITSTATUS(result.wait_status) : -1, 7);
}

// A program that has unwritten output, and a function for the end of the process.
int ProgramWithOutput(const RunOptions& options, const std::function<int()>& body) {
  std::atexit([] { std::fputs("atexit\n", stderr); });
  std::setvbuf(stderr, nullptr, _IOFBF, BUFSIZ);
  std::exit(run_worker(
      [&] {
        std::fputs("buffered\n", stderr);
        return body();
      },
      options));
}

TEST_F(RunWorkerTest, TheEndAtOnceWritesBuffersAndCallsNothingElse) {
  const auto seven = [] { return 7; };
  const Result usual = RunChild([&] { return ProgramWithOutput({}, seven); });
  EXPECT_EQ(WEXITSTATUS(usual.wait_status), 7);
  EXPECT_EQ(usual.standard_error, "buffered\natexit\n");
  const Result at_once = RunChild([&] { return ProgramWithOutput({.exit_at_once = true}, seven); });
  EXPECT_EQ(WEXITSTATUS(at_once.wait_status), 7);
  EXPECT_EQ(at_once.standard_error, "buffered\n");
}

TEST_F(RunWorkerTest, TheEndAtOnceComesAfterTheReportOfAnException) {
  const Result result = RunChild([] {
    return ProgramWithOutput({.exit_at_once = true}, []() -> int { throw Bug("no data"); });
  });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(Message(result), HasSubstr("Bug: no data"));
  EXPECT_THAT(result.standard_error, HasSubstr("Bug: no data\n"));
}

}  // namespace
}  // namespace ddp::elastic
