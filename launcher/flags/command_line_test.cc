#include "launcher/flags/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <map>

#include "launcher/flags/flag_table.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::StatusOr<CommandLine> Parse(const std::vector<std::string>& arguments,
                                  const std::map<std::string, std::string>& environment = {}) {
  return ParseCommandLine(arguments, [&](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  });
}

// Returns the flags as "name=value", sorted.
std::vector<std::string> Given(const CommandLine& command_line) {
  std::vector<std::string> given;
  for (const auto& [name, flag] : command_line.flags) {
    given.push_back(absl::StrCat(name, "=", flag.value));
  }
  return given;
}

std::string Error(const std::vector<std::string>& arguments,
                  const std::map<std::string, std::string>& environment = {}) {
  const absl::StatusOr<CommandLine> result = Parse(arguments, environment);
  return result.ok() ? "no error" : std::string(result.status().message());
}

TEST(CommandLineTest, EndsWhereTheProgramBegins) {
  const auto result = Parse({"--nproc-per-node", "2", "./train", "--nproc-per-node=9", "-t", "--"});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(Given(*result), ElementsAre("nproc-per-node=2"));
  EXPECT_THAT(result->program, ElementsAre("./train", "--nproc-per-node=9", "-t", "--"));
}

TEST(CommandLineTest, BothSpellingsAndAllFormsOfAValue) {
  const auto result = Parse({"--nproc_per_node=2", "--max-restarts", "3", "-t3", "-r", "1", "-r=2",
                             "--log-dir=/x", "--standalone", "--no_python", "prog"});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(Given(*result),
              ElementsAre("log-dir=/x", "max-restarts=3", "no-python=true", "nproc-per-node=2",
                          "redirects=2", "standalone=true", "tee=3"));
  EXPECT_EQ(result->flags.at("nproc-per-node").spelled, "--nproc_per_node");
  EXPECT_EQ(result->flags.at("tee").spelled, "-t");
}

TEST(CommandLineTest, ASwitchDoesNotSwallowTheProgram) {
  const auto result = Parse({"--standalone", "-m", "package.module", "-m"});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(Given(*result), ElementsAre("module=true", "standalone=true"));
  EXPECT_THAT(result->program, ElementsAre("package.module", "-m"));
}

TEST(CommandLineTest, ADoubleDashMayStandBeforeTheProgram) {
  const auto result = Parse({"--standalone", "--", "--odd-name", "--", "x"});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->program, ElementsAre("--odd-name", "--", "x"));
}

TEST(CommandLineTest, ANegativeNumberIsAValue) {
  const auto result = Parse({"--max-restarts", "-1", "prog"});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(Given(*result), ElementsAre("max-restarts=-1"));
}

TEST(CommandLineTest, TheCommandLineBeatsTheEnvironment) {
  const auto result = Parse({"--nproc-per-node=2", "prog"}, {{"PET_NPROC_PER_NODE", "4"},
                                                             {"PET_TEE", "3"},
                                                             {"PET_STANDALONE", "1"},
                                                             {"PET_NO_PYTHON", "0"}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(Given(*result),
              ElementsAre("no-python=false", "nproc-per-node=2", "standalone=true", "tee=3"));
  EXPECT_EQ(result->flags.at("tee").spelled, "PET_TEE");
  EXPECT_EQ(result->flags.at("nproc-per-node").spelled, "--nproc-per-node");
}

TEST(CommandLineTest, MistakesAreOneClearLine) {
  EXPECT_THAT(Error({}), HasSubstr("no program"));
  EXPECT_THAT(Error({"--standalone", "--"}), HasSubstr("no program"));
  EXPECT_THAT(Error({"--standalone=true", "prog"}), HasSubstr("takes no value"));
  EXPECT_THAT(Error({"--frobnicate", "prog"}), HasSubstr("unknown flag --frobnicate"));
  EXPECT_THAT(Error({"-x", "prog"}), HasSubstr("unknown flag -x"));
  EXPECT_THAT(Error({"-m3", "prog"}), HasSubstr("unknown flag -m3"));
  EXPECT_THAT(Error({"--nproc-per-node"}),
              AllOf(HasSubstr("--nproc-per-node needs a value"), HasSubstr("N|cpu|gpu|auto")));
  EXPECT_THAT(Error({"--role", "--standalone", "prog"}), HasSubstr("--role needs a value"));
  EXPECT_THAT(Error({"prog"}, {{"PET_STANDALONE", "yes"}}),
              HasSubstr("PET_STANDALONE=yes: expected 0 or 1"));
}

TEST(CommandLineTest, AbbreviationsAreRefusedWithAHint) {
  EXPECT_THAT(Error({"--nproc=2", "prog"}),
              AllOf(HasSubstr("unknown flag --nproc"), HasSubstr("--nproc-per-node?")));
}

TEST(CommandLineTest, FlagsOfOurLibrariesAreNotTheUsers) {
  for (const char* flag : {"--v=1", "-v", "--logtostderr", "--flagfile=x", "--worker_log_dir=x",
                           "--helpfull", "--undefok=x", "--fromenv=x"}) {
    EXPECT_THAT(Error({flag, "prog"}), HasSubstr("unknown flag")) << flag;
  }
}

TEST(CommandLineTest, HelpAndVersionNeedNoProgram) {
  const auto help = Parse({"--standalone", "-h"});
  ASSERT_TRUE(help.ok());
  EXPECT_TRUE(help->help);
  const auto version = Parse({"--version"});
  ASSERT_TRUE(version.ok());
  EXPECT_TRUE(version->version);
  EXPECT_THAT(version->program, IsEmpty());
  const auto completion = Parse({"--print_completion=zsh"});
  ASSERT_TRUE(completion.ok()) << completion.status();
  EXPECT_EQ(completion->completion, "zsh");
}

TEST(CommandLineTest, TorchrunsOwnVariablesComeAfterPet) {
  const auto result = Parse({"prog"}, {{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5"},
                                       {"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", ""},
                                       {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "x"},
                                       {"PET_LOG_LINE_PREFIX_TEMPLATE", "y"}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(Given(*result), ElementsAre("log-line-prefix-template=y", "shutdown-timeout=5"));
  EXPECT_EQ(result->flags.at("shutdown-timeout").spelled, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT");
}

TEST(CommandLineTest, EveryFlagHasItsVariable) {
  for (const FlagSpec& flag : kFlagTable) {
    std::string variable = absl::StrCat("PET_", flag.name);
    std::replace(variable.begin(), variable.end(), '-', '_');
    std::transform(variable.begin(), variable.end(), variable.begin(), ::toupper);
    EXPECT_EQ(VariableOf(flag), flag.group == HelpGroup::kOther ? "" : variable);
  }
}

TEST(CommandLineTest, NoFlagOfTorchrunIsMissing) {
  // Flags of torchrun 2.11 and of its newest version.
  for (const char* flag : {"nnodes",
                           "nproc-per-node",
                           "rdzv-backend",
                           "rdzv-endpoint",
                           "rdzv-id",
                           "rdzv-conf",
                           "standalone",
                           "max-restarts",
                           "monitor-interval",
                           "start-method",
                           "event-log-handler",
                           "role",
                           "module",
                           "no-python",
                           "run-path",
                           "log-dir",
                           "redirects",
                           "tee",
                           "node-rank",
                           "master-addr",
                           "master-port",
                           "local-addr",
                           "local-ranks-filter",
                           "duplicate-stdout-filters",
                           "logs-specs",
                           "numa-binding",
                           "duplicate-stderr-filters",
                           "shutdown-timeout",
                           "signals-to-handle",
                           "virtual-local-rank",
                           "print-completion",
                           "log-line-prefix-template"}) {
    EXPECT_TRUE(std::any_of(std::begin(kFlagTable), std::end(kFlagTable),
                            [&](const FlagSpec& spec) { return std::string(flag) == spec.name; }))
        << flag;
  }
}

TEST(CommandLineTest, AMistakeIsOneLineWhateverIsInIt) {
  EXPECT_THAT(Error({"--a\nb", "p"}), HasSubstr("unknown flag --a?b"));
  EXPECT_THAT(Error({"-x\033[2J", "p"}), HasSubstr("unknown flag -x?[2J"));
  EXPECT_THAT(Error({"--module=\n", "p"}), HasSubstr("--module=?: this flag takes no value"));
  EXPECT_THAT(Error({"--print-completion=\n"}), HasSubstr("--print-completion=?: expected"));
  EXPECT_THAT(Error({"p"}, {{"PET_MODULE", "\n"}}), HasSubstr("PET_MODULE=?: expected 0 or 1"));
}

TEST(CommandLineTest, HelpNamesEveryFlagInLinesThatFit) {
  const std::string help = HelpText();
  for (const FlagSpec& flag : kFlagTable) {
    EXPECT_THAT(help, HasSubstr(std::string("--") + flag.name));
  }
  for (const char* code :
       {"   1  ", "  10  ", "  11  ", "  12  ", "  13  ", "  14  ", "  15  ", "  16  "}) {
    EXPECT_THAT(help, HasSubstr(std::string("\n") + code));
  }
  size_t begin = 0;
  for (size_t end = 0; (end = help.find('\n', begin)) != std::string::npos; begin = end + 1) {
    EXPECT_LE(end - begin, 100U) << help.substr(begin, end - begin);
  }
}

}  // namespace
}  // namespace ddp::launcher
