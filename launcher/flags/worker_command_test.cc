#include "launcher/flags/worker_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class WorkerCommandTest : public ::testing::Test {
 protected:
  WorkerCommandTest() {
    bin_ = Make("bin-", true);
    python_ = bin_ + "/python3";
    File("bin-/python3", 0755);
    program_ = File("bin-/prog", 0755);
    script_ = File("train.py", 0644);
    request_.path = bin_;
  }

  std::string Make(const std::string& name, bool folder) {
    const std::string path = ::testing::TempDir() + "/" + name;
    if (folder) ::mkdir(path.c_str(), 0755);
    return path;
  }
  std::string File(const std::string& name, mode_t mode) {
    const std::string path = Make(name, false);
    std::ofstream(path) << "#!/bin/sh\n";
    ::chmod(path.c_str(), mode);
    return path;
  }

  std::vector<std::string> Command(std::vector<std::string> program, ProgramKind kind) {
    request_.program = std::move(program);
    request_.kind = kind;
    const auto command = WorkerCommand(request_);
    EXPECT_TRUE(command.ok()) << command.status();
    return command.value_or(std::vector<std::string>());
  }
  absl::Status Error(std::vector<std::string> program, ProgramKind kind = ProgramKind::kByName) {
    request_.program = std::move(program);
    request_.kind = kind;
    return WorkerCommand(request_).status();
  }

  std::string bin_, python_, program_, script_;
  ProgramRequest request_;
};

TEST_F(WorkerCommandTest, APythonScriptIsKnownByItsName) {
  EXPECT_THAT(Command({script_, "--lr=1"}, ProgramKind::kByName),
              ElementsAre(python_, "-u", script_, "--lr=1"));
}

TEST_F(WorkerCommandTest, RunPathMakesAnythingAScript) {
  EXPECT_THAT(Command({program_}, ProgramKind::kPythonScript),
              ElementsAre(python_, "-u", program_));
}

TEST_F(WorkerCommandTest, AModuleNeedsNoFile) {
  EXPECT_THAT(Command({"pkg.train", "x"}, ProgramKind::kPythonModule),
              ElementsAre(python_, "-u", "-m", "pkg.train", "x"));
}

TEST_F(WorkerCommandTest, AnythingElseIsExecuted) {
  EXPECT_THAT(Command({program_, "a b"}, ProgramKind::kByName), ElementsAre(program_, "a b"));
  EXPECT_THAT(Command({"prog"}, ProgramKind::kByName), ElementsAre(program_));
  const std::string executable_script = File("runs_itself.py", 0755);
  EXPECT_THAT(Command({executable_script}, ProgramKind::kExecutable),
              ElementsAre(executable_script));
}

TEST_F(WorkerCommandTest, PythonExecChoosesTheInterpreter) {
  const std::string other = File("bin-/pypy", 0755);
  request_.python_exec = other;
  EXPECT_THAT(Command({script_}, ProgramKind::kByName), ElementsAre(other, "-u", script_));
  request_.python_exec = "";
  EXPECT_THAT(Command({script_}, ProgramKind::kByName), ElementsAre(python_, "-u", script_));
}

TEST_F(WorkerCommandTest, AScriptWithoutItsEndingIsToldOfRunPath) {
  const std::string folder = std::filesystem::current_path().string();
  std::filesystem::current_path(::testing::TempDir());
  const std::string script = File("noext", 0644);
  const std::string by_name(Error({"noext"}).message());
  File("noext", 0755);
  const std::string executable(Error({"noext"}).message());
  std::filesystem::remove(script);
  std::filesystem::current_path(folder);
  EXPECT_THAT(by_name, AllOf(HasSubstr("./noext, which is not executable (chmod +x)?"),
                             HasSubstr("--run-path")));
  EXPECT_THAT(executable, AllOf(HasSubstr("did you mean ./noext?"), Not(HasSubstr("--run-path"))));
  EXPECT_THAT(std::string(Error({script_}, ProgramKind::kExecutable).message()),
              HasSubstr("--run-path"));
}

TEST_F(WorkerCommandTest, WhatCannotRunIsNamedBeforeAnythingStarts) {
  EXPECT_TRUE(absl::IsNotFound(Error({"./no-such-program"})));
  EXPECT_TRUE(absl::IsNotFound(Error({"no-such-program"})));
  EXPECT_TRUE(absl::IsNotFound(Error({"no-such-script.py"})));
  const absl::Status status = Error({script_}, ProgramKind::kExecutable);
  EXPECT_TRUE(absl::IsPermissionDenied(status));
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(script_), HasSubstr("chmod +x")));
  EXPECT_THAT(std::string(Error({bin_}).message()), HasSubstr("it is a folder"));
  request_.python_exec = "/no/such/python";
  EXPECT_THAT(std::string(Error({script_}).message()),
              AllOf(HasSubstr("PYTHON_EXEC"), HasSubstr("/no/such/python")));
  request_.python_exec.reset();
  request_.path = "/nowhere";
  EXPECT_THAT(std::string(Error({script_}).message()), HasSubstr("python3 is not on PATH"));
}

}  // namespace
}  // namespace ddp::launcher
