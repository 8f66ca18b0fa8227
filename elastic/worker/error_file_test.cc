#include "elastic/worker/error_file.h"

#include <sys/wait.h>

#include <csignal>
#include <exception>
#include <string>

#include "elastic/worker/error_file_fixture.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ddp::elastic {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ErrorFileTest : public ErrorFileFixture {};

TEST_F(ErrorFileTest, StackOfALibTorchErrorGoesToTheDetail) {
  const std::string what =
      "expected 3 channels,\nbut got 1\nException raised from forward at conv.cpp:12 (call first)\n"
      "frame #0: somewhere";
  const Result result =
      RunChild([&what] { return run_worker([&what]() -> int { throw Bug(what); }); });
  EXPECT_THAT(Message(result), HasSubstr("Bug: expected 3 channels, but got 1"));
  EXPECT_THAT(Message(result), Not(HasSubstr("frame")));
  EXPECT_THAT(result.file, HasSubstr("frame #0: somewhere"));
}

TEST_F(ErrorFileTest, TerminateWithoutExceptionIsReported) {
  const Result result = RunChild([]() -> int {
    install_terminate_handler();
    std::terminate();
  });
  EXPECT_EQ(WTERMSIG(result.wait_status), SIGABRT);
  EXPECT_THAT(Message(result), HasSubstr("std::terminate"));
}

TEST_F(ErrorFileTest, FirstErrorWins) {
  const Result result = RunChild([] {
    write_error_file(std::make_exception_ptr(Bug("the cause")));
    return run_worker([]() -> int { throw Bug("a consequence"); });
  });
  EXPECT_THAT(Message(result), HasSubstr("the cause"));
  EXPECT_THAT(result.standard_error, HasSubstr("a consequence"));
}

TEST_F(ErrorFileTest, WhatIsNoStdExceptionIsNamedByItsType) {
  const Result result = RunChild([] { return run_worker([]() -> int { throw 42; }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(Message(result), HasSubstr("int: "));
}

TEST_F(ErrorFileTest, BytesThatAreNoTextStillMakeJson) {
  const Result result =
      RunChild([] { return run_worker([]() -> int { throw Bug("bad \xff\xfe name"); }); });
  EXPECT_THAT(Message(result), HasSubstr("name"));
}

TEST_F(ErrorFileTest, FileThatCannotBeWrittenCostsOneLine) {
  path_override_ = "/nonexistent/folder/error.json";
  const Result result = RunChild([] { return run_worker([]() -> int { throw Bug("x"); }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(result.standard_error,
              HasSubstr("cannot write the error file /nonexistent/folder/error.json"));
}

TEST_F(ErrorFileTest, NoVariableNoFile) {
  path_override_ = "";
  const Result result = RunChild([] { return run_worker([]() -> int { throw Bug("x"); }); });
  EXPECT_EQ(WEXITSTATUS(result.wait_status), 1);
  EXPECT_THAT(result.standard_error, Not(HasSubstr("cannot write")));
}

}  // namespace
}  // namespace ddp::elastic
