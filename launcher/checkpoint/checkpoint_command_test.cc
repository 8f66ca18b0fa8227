#include "launcher/checkpoint/checkpoint_command.h"

#include <cstdio>
#include <filesystem>

#include "absl/status/status.h"
#include "elastic/checkpoint/file_system/posix_file_system.h"
#include "elastic/checkpoint/inspect/example_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "testing/temporary_folder.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Verb = CheckpointRequest::Verb;
using Words = std::vector<std::string>;

TEST(ParseCheckpointArgumentsTest, VerbsPathsAndFlags) {
  const CheckpointRequest list = ParseCheckpointArguments({"ls", "jobs//", "--json"}).value();
  EXPECT_EQ(list.verb, Verb::kList);
  EXPECT_THAT(list.paths, ElementsAre("jobs"));
  EXPECT_TRUE(list.json);
  const CheckpointRequest diff = ParseCheckpointArguments({"diff", "a", "b"}).value();
  EXPECT_EQ(diff.verb, Verb::kDiff);
  EXPECT_THAT(diff.paths, ElementsAre("a", "b"));
  EXPECT_TRUE(ParseCheckpointArguments({"verify", "--all", "a"})->all);
  const CheckpointRequest prune =
      ParseCheckpointArguments({"prune", "--keep_last", "3", "a", "--dry-run"}).value();
  EXPECT_EQ(prune.verb, Verb::kPrune);
  EXPECT_EQ(prune.keep_last, 3);
  EXPECT_TRUE(prune.dry_run);
  EXPECT_EQ(ParseCheckpointArguments({"prune", "/", "--keep-last=1"})->paths[0], "/");
  EXPECT_TRUE(ParseCheckpointArguments({"--help"})->help);
  EXPECT_TRUE(ParseCheckpointArguments({"prune", "-h"})->help);
}

TEST(ParseCheckpointArgumentsTest, MistakesAreOneLine) {
  const std::vector<std::pair<Words, const char*>> cases = {
      {{}, "a verb is missing: one of ls, show, verify, diff, prune"},
      {{"list", "a"}, "unknown verb list"},
      {{"ls"}, "checkpoint ls needs a folder"},
      {{"ls", "a", "b"}, "unexpected b"},
      {{"ls", ""}, "an empty path"},
      {{"ls", "a", "--all"}, "unknown flag --all of checkpoint ls"},
      {{"ls", "a", "--json=1"}, "unknown flag --json=1"},
      {{"diff", "a"}, "checkpoint diff needs two checkpoints"},
      {{"prune", "a"}, "checkpoint prune needs --keep-last=N"},
      {{"prune", "a", "--keep-last"}, "--keep-last: a value is missing"},
      {{"prune", "a", "--keep-last=0"}, "--keep-last: 0 is not a number from 1"},
      {{"prune", "a", "--keep-last=-1"}, "--keep-last: -1 is not a number from 1"},
      {{"prune", "a", "--keep-last=x"}, "--keep-last: x is not a number from 1"},
      {{"verify", "a\n", "b\n"}, "unexpected b?"},
  };
  for (const auto& [arguments, text] : cases) {
    const absl::Status status = ParseCheckpointArguments(arguments).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << text;
    const std::string message(status.message());
    EXPECT_THAT(message, AllOf(HasSubstr(text), HasSubstr("; see ddprun checkpoint --help")));
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

// Runs the command over real files.
class CheckpointCommandTest : public ::testing::Test {
 protected:
  struct Output {
    int exit_code;
    std::string out;
    std::string err;
  };

  Output Run(Words arguments) {
    arguments.insert(arguments.begin(), "checkpoint");
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    Output output{.exit_code = RunCheckpointCommand(arguments), .out = "", .err = ""};
    std::fflush(stdout);
    output.out = ::testing::internal::GetCapturedStdout();
    output.err = ::testing::internal::GetCapturedStderr();
    return output;
  }

  std::string Write(int64_t step, elastic::ExampleCheckpoint example = {}) {
    example.id = {.step = step, .generation = 1};
    return elastic::WriteExample(files_, root_, example);
  }

  void Damage(const std::string& folder) {
    const std::string path = folder + "/model-00001-of-00002.safetensors";
    std::FILE* const file = std::fopen(path.c_str(), "r+");
    ASSERT_NE(file, nullptr) << path;
    ASSERT_EQ(std::fseek(file, -1, SEEK_END), 0);
    ASSERT_EQ(std::fputc('x', file), 'x');
    ASSERT_EQ(std::fclose(file), 0);
  }

  testing::TemporaryFolder temporary_;
  const std::string root_ = temporary_.path();
  elastic::PosixFileSystem files_;
};

TEST_F(CheckpointCommandTest, Lists) {
  Write(1);
  Write(2);
  const Output output = Run({"ls", root_});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.out, AllOf(HasSubstr("STEP  GENERATION  RUN"), HasSubstr("complete")));
  const auto json = nlohmann::json::parse(Run({"ls", root_, "--json"}).out);
  EXPECT_EQ(json["checkpoints"].size(), 2);
}

TEST_F(CheckpointCommandTest, ShowsTheNewestOfAFolder) {
  Write(1);
  Write(2);
  const Output output = Run({"show", root_});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.out, HasSubstr("step 2 of epoch 2"));
}

TEST_F(CheckpointCommandTest, VerifiesOneOrAll) {
  const std::string old = Write(1);
  const std::string newest = Write(2);
  Damage(old);
  EXPECT_EQ(Run({"verify", root_}).exit_code, 0);
  const Output one = Run({"verify", old});
  EXPECT_EQ(one.exit_code, 1);
  EXPECT_THAT(one.out, HasSubstr("model-00001-of-00002.safetensors: tensor fc.weight: its"));
  const Output all = Run({"verify", root_, "--all"});
  EXPECT_EQ(all.exit_code, 1);
  EXPECT_THAT(all.out, AllOf(HasSubstr(newest + ": undamaged"), HasSubstr(old + ": 1 damage")));
  const auto json = nlohmann::json::parse(Run({"verify", root_, "--all", "--json"}).out);
  EXPECT_EQ(json["checkpoints"][1]["damages"][0]["place"], "tensor fc.weight");
}

TEST_F(CheckpointCommandTest, ComparesTwo) {
  const std::string a = Write(1);
  const std::string b = Write(2, {.weight = {1, 2, 3, 4, 5, 9}});
  const Output output = Run({"diff", a, b});
  EXPECT_EQ(output.exit_code, 1);
  EXPECT_THAT(output.out, HasSubstr("fc.weight"));
  EXPECT_EQ(Run({"diff", a, a}).exit_code, 0);
  Damage(b);
  const Output damaged = Run({"diff", a, b});
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_THAT(damaged.err, HasSubstr("tensor fc.weight is damaged"));
}

TEST_F(CheckpointCommandTest, PrunesAndTells) {
  const std::string old = Write(1);
  Write(2);
  EXPECT_THAT(Run({"prune", root_, "--keep-last=1", "--dry-run"}).out,
              HasSubstr(old + ": would be deleted"));
  EXPECT_TRUE(std::filesystem::exists(old));
  const Output output = Run({"prune", root_, "--keep-last=1"});
  EXPECT_EQ(output.exit_code, 0) << output.err;
  EXPECT_THAT(output.out, HasSubstr(old + ": deleted\n1 checkpoint deleted"));
  EXPECT_FALSE(std::filesystem::exists(old));
  EXPECT_THAT(Run({"ls", root_}).out, HasSubstr("\n  2     1"));
}

TEST_F(CheckpointCommandTest, WhatCannotBeReadIsOneLine) {
  for (const std::string verb : {"ls", "show", "verify"}) {
    const Output output = Run({verb, root_ + "/nowhere"});
    EXPECT_EQ(output.exit_code, 3);
    EXPECT_THAT(output.err, AllOf(HasSubstr("ddprun checkpoint: "), HasSubstr("/nowhere")));
    EXPECT_EQ(output.out, "");
  }
  EXPECT_THAT(Run({"show", root_}).err, HasSubstr(root_ + " holds no checkpoint"));
  EXPECT_EQ(Run({"prune", root_, "--keep-last=0"}).exit_code, 2);
  const std::string folder = Write(1);
  std::filesystem::remove(folder + "/MANIFEST.json");
  const Output damaged = Run({"show", folder});
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_THAT(damaged.err, HasSubstr("MANIFEST.json is missing"));
}

TEST_F(CheckpointCommandTest, Helps) {
  const Output output = Run({"--help"});
  EXPECT_EQ(output.exit_code, 0);
  EXPECT_THAT(output.out, HasSubstr("Usage: ddprun checkpoint ls FOLDER"));
}

}  // namespace
}  // namespace ddp::launcher
