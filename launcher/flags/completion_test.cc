#include "launcher/flags/completion.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/unique_fd.h"
#include "launcher/flags/flag_table.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Output {
  std::string text;
  int exit_code = -1;
};

// Runs a shell with these arguments and captures both output streams.
Output RunShell(const std::string& shell, std::vector<std::string> arguments) {
  Output output;
  std::array<int, 2> fds{};
  EXPECT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
  const UniqueFd read(fds[0]);
  UniqueFd write(fds[1]);
  arguments.insert(arguments.begin(), shell);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::dup2(write.get(), STDOUT_FILENO);
    ::dup2(write.get(), STDERR_FILENO);
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  write.reset();
  std::array<char, 4096> buffer;
  for (ssize_t count = 0; (count = ::read(read.get(), buffer.data(), buffer.size())) > 0;) {
    output.text.append(buffer.data(), static_cast<size_t>(count));
  }
  EXPECT_EQ(::waitpid(pid, &output.exit_code, 0), pid);
  return output;
}

class BashCompletionTest : public ::testing::Test {
 protected:
  BashCompletionTest() : path_(::testing::TempDir() + "/completion.bash") {
    std::ofstream(path_) << CompletionScript("bash");
  }

  // Returns the completions of the last of `words`, split as bash splits them: `--a=b` is three
  // words.
  std::vector<std::string> Complete(const std::vector<std::string>& words) {
    const std::string driver = ::testing::TempDir() + "/complete.bash";
    std::ofstream file(driver);
    file << "source " << path_ << "\nCOMP_WORDS=(ddprun";
    for (const std::string& word : words) file << " '" << word << "'";
    file << ")\nCOMP_CWORD=" << words.size() << "\n_ddprun\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n";
    file.close();
    const Output output = RunShell("bash", {"--norc", driver});
    EXPECT_EQ(output.exit_code, 0) << output.text;
    return absl::StrSplit(output.text, '\n', absl::SkipEmpty());
  }

  const std::string path_;
};

TEST_F(BashCompletionTest, IsBash) {
  const Output output = RunShell("bash", {"-n", path_});
  EXPECT_EQ(output.exit_code, 0) << output.text;
  EXPECT_EQ(output.text, "");
}

TEST_F(BashCompletionTest, EveryFlagIsOffered) {
  const std::vector<std::string> offered = Complete({"--"});
  for (const FlagSpec& flag : kFlagTable) {
    EXPECT_THAT(offered, Contains(absl::StrCat("--", flag.name)));
  }
}

TEST_F(BashCompletionTest, FlagsByTheirBeginningInEitherSpelling) {
  EXPECT_THAT(Complete({"--nproc"}), ElementsAre("--nproc-per-node"));
  EXPECT_THAT(Complete({"--standalone", "--max_r"}), ElementsAre("--max-restarts"));
  EXPECT_THAT(Complete({"--rdzv"}),
              ElementsAre("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf"));
}

TEST_F(BashCompletionTest, ValuesThatAreWords) {
  EXPECT_THAT(Complete({"--nproc-per-node", ""}), ElementsAre("cpu", "gpu", "auto"));
  EXPECT_THAT(Complete({"--exit_code", "=", "w"}), ElementsAre("worker"));
  EXPECT_THAT(Complete({"--exit-code", "="}), ElementsAre("default", "worker", "reason"));
  EXPECT_THAT(Complete({"--numa-binding", "core"}), ElementsAre("core-complex"));
}

TEST_F(BashCompletionTest, ValuesThatAreFoldersProgramsAndWhatIsTheProgramsOwn) {
  EXPECT_THAT(Complete({"--log-dir", "/us"}), ElementsAre("/usr"));
  EXPECT_THAT(Complete({"--tee", "3", "bas"}), Contains("bash"));
  EXPECT_THAT(Complete({"--max-restarts", "=", "3", "train.py", "--"}), IsEmpty());
}

TEST_F(BashCompletionTest, TheSubcommandAndItsOwnFlags) {
  EXPECT_THAT(Complete({"st"}), AllOf(Contains("status"), Contains("stat")));
  EXPECT_THAT(Complete({"--standalone", "statu"}), Not(Contains("status")));
  EXPECT_THAT(Complete({"status", "--"}),
              ElementsAre("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--instance", "--json",
                          "--all", "--help"));
  EXPECT_THAT(Complete({"status", "--json", "--rdzv_"}),
              ElementsAre("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"));
  EXPECT_THAT(Complete({"status", "--rdzv-id", "="}), IsEmpty());
  EXPECT_THAT(Complete({"checkp"}), Contains("checkpoint"));
  EXPECT_THAT(Complete({"checkpoint", ""}), ElementsAre("ls", "show", "verify", "diff", "prune"));
  EXPECT_THAT(Complete({"checkpoint", "v"}), ElementsAre("verify"));
  EXPECT_THAT(Complete({"checkpoint", "prune", "--"}),
              ElementsAre("--keep-last", "--dry-run", "--json", "--help"));
  EXPECT_THAT(Complete({"checkpoint", "ls", "--"}), ElementsAre("--json", "--help"));
  EXPECT_THAT(Complete({"checkpoint", "ls", "/us"}), ElementsAre("/usr"));
  EXPECT_THAT(Complete({"checkpoint", "prune", "--keep-last", "="}), IsEmpty());
}

TEST(ZshCompletionScriptTest, EveryFlagWithItsValues) {
  const std::string script = CompletionScript("zsh");
  EXPECT_THAT(script, HasSubstr("#compdef ddprun\n"));
  for (const FlagSpec& flag : kFlagTable) {
    EXPECT_THAT(script, HasSubstr(absl::StrCat("'--", flag.name, flag.takes_value ? "=[" : "[")));
  }
  EXPECT_THAT(script, AllOf(HasSubstr(":(cpu gpu auto)'"), HasSubstr(":_files -/'")));
  EXPECT_THAT(script, AllOf(HasSubstr("'commands:subcommand:(status checkpoint)'"),
                            HasSubstr(" '--rdzv-id=[the job there]:value: '")));
  // The number of quotes is even: none ends early.
  EXPECT_EQ(std::count(script.begin(), script.end(), '\'') % 2, 0);
}

// Set-up of an interactive zsh that prints its completions between two NULs and ends.
constexpr char kZshSetUp[] = R"(
PROMPT=
autoload -Uz compinit
compinit -D -u
source $COMPLETION
bindkey '^I' complete-word
print-nul() { print -rn -- $'\0' }
compprefuncs=(print-nul)
comppostfuncs=(print-nul exit)
compadd() {
  # With one of these it tells its caller what fits, and offers nothing.
  if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then
    builtin compadd "$@"
    return
  fi
  local -a fitting
  builtin compadd -A fitting "$@"
  (( $#fitting )) && print -rl -- $fitting
  builtin compadd "$@"
}
print READY
)";

// Types $1 and a tabulator to such a zsh, on a terminal of its own.
constexpr char kZshDriver[] = R"(
zmodload zsh/zpty && zpty z zsh -f -i || exit 3
zpty -w z "source $SET_UP"
zpty -r -m z answer '*READY*' || exit 4
zpty -w -n z "$1"$'\t'
zpty -r -m z answer $'*\0*\0' || exit 5
answer=${${answer#*$'\0'}%$'\0'}
print -r -- "${answer//$'\r'/}"
)";

class ZshCompletionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (RunShell("zsh", {"-f", "-c", "zmodload zsh/zpty && zpty z true"}).exit_code != 0) {
      GTEST_SKIP() << "no zsh with zsh/zpty and a terminal is here";
    }
    std::ofstream(folder_ + "/completion.zsh") << CompletionScript("zsh");
    std::ofstream(folder_ + "/set_up.zsh") << kZshSetUp;
    std::ofstream(folder_ + "/train.py") << "";
  }

  // Returns the completions after `line`.
  std::vector<std::string> Complete(const std::string& line) {
    const std::string driver =
        absl::StrCat("cd ", folder_, "\nexport COMPLETION=", folder_,
                     "/completion.zsh SET_UP=", folder_, "/set_up.zsh\n", kZshDriver);
    const Output output = RunShell("zsh", {"-f", "-c", driver, "driver", line});
    EXPECT_EQ(output.exit_code, 0) << line << ": " << output.text;
    return absl::StrSplit(output.text, '\n', absl::SkipEmpty());
  }

  const std::string folder_ = ::testing::TempDir();
};

TEST_F(ZshCompletionTest, FlagsInEitherSpellingAndTheirValues) {
  EXPECT_THAT(Complete("ddprun --nproc_p"), ElementsAre("--nproc-per-node"));
  EXPECT_THAT(Complete("ddprun --tee 3 --max-r"), ElementsAre("--max-restarts"));
  EXPECT_THAT(Complete("ddprun --numa-binding "),
              ElementsAre("node", "socket", "exclusive", "core-complex"));
  EXPECT_THAT(Complete("ddprun --exit_code=w"), ElementsAre("worker"));
  EXPECT_THAT(Complete("ddprun --log-dir /us"), Contains("usr"));
}

TEST_F(ZshCompletionTest, ProgramsScriptsAndWhatIsTheProgramsOwn) {
  EXPECT_THAT(Complete("ddprun --max_restarts=2 tra"), Contains("train.py"));
  EXPECT_THAT(Complete("ddprun --tee 3 zs"), Contains("zsh"));
  EXPECT_THAT(Complete("ddprun --standalone train.py --max-r"), IsEmpty());
  EXPECT_THAT(Complete("ddprun train.py tra"), Contains("train.py"));
}

TEST_F(ZshCompletionTest, TheSubcommandAndItsOwnFlags) {
  EXPECT_THAT(Complete("ddprun statu"), ElementsAre("status"));
  EXPECT_THAT(Complete("ddprun --standalone statu"), Not(Contains("status")));
  EXPECT_THAT(Complete("ddprun checkp"), Contains("checkpoint"));
  EXPECT_THAT(Complete("ddprun checkpoint ver"), ElementsAre("verify"));
  EXPECT_THAT(Complete("ddprun checkpoint prune --keep"), Contains("--keep-last"));
  EXPECT_THAT(Complete("ddprun status --rdzv-"),
              ElementsAre("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"));
}

}  // namespace
}  // namespace ddp::launcher
