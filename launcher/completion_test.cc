#include "launcher/completion.h"

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
#include "launcher/flag_table.h"

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

// Runs bash with these arguments; what it prints on either stream.
Output RunBash(std::vector<std::string> arguments) {
  Output output;
  std::array<int, 2> fds{};
  EXPECT_EQ(::pipe2(fds.data(), O_CLOEXEC), 0);
  const UniqueFd read(fds[0]);
  UniqueFd write(fds[1]);
  arguments.insert(arguments.begin(), "bash");
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

  // What is offered for the last of `words`, as bash hands them over: `--a=b` is three of them.
  std::vector<std::string> Complete(const std::vector<std::string>& words) {
    const std::string driver = ::testing::TempDir() + "/complete.bash";
    std::ofstream file(driver);
    file << "source " << path_ << "\nCOMP_WORDS=(ddprun";
    for (const std::string& word : words) file << " '" << word << "'";
    file << ")\nCOMP_CWORD=" << words.size() << "\n_ddprun\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n";
    file.close();
    const Output output = RunBash({"--norc", driver});
    EXPECT_EQ(output.exit_code, 0) << output.text;
    return absl::StrSplit(output.text, '\n', absl::SkipEmpty());
  }

  const std::string path_;
};

TEST_F(BashCompletionTest, IsBash) {
  const Output output = RunBash({"-n", path_});
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
  EXPECT_THAT(Complete({"status", "--"}), ElementsAre("--rdzv-endpoint", "--rdzv-id", "--instance",
                                                      "--json", "--all", "--help"));
  EXPECT_THAT(Complete({"status", "--json", "--rdzv_"}),
              ElementsAre("--rdzv-endpoint", "--rdzv-id"));
  EXPECT_THAT(Complete({"status", "--rdzv-id", "="}), IsEmpty());
}

TEST(ZshCompletionTest, EveryFlagWithItsValues) {
  const std::string script = CompletionScript("zsh");
  EXPECT_THAT(script, HasSubstr("#compdef ddprun\n"));
  for (const FlagSpec& flag : kFlagTable) {
    EXPECT_THAT(script, HasSubstr(absl::StrCat("'--", flag.name, flag.takes_value ? "=[" : "[")));
  }
  EXPECT_THAT(script, AllOf(HasSubstr(":(cpu gpu auto)'"), HasSubstr(":_files -/'")));
  EXPECT_THAT(script, AllOf(HasSubstr("'commands:subcommand:(status)'"),
                            HasSubstr(" '--rdzv-id=[the job there]:value: '")));
  // Quotes are even: none ends early.
  EXPECT_EQ(std::count(script.begin(), script.end(), '\'') % 2, 0);
}

}  // namespace
}  // namespace ddp::launcher
