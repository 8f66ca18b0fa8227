#include "launcher/flags/command_line.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "launcher/flags/exit_code.h"

namespace ddp::launcher {
namespace {

std::string WithDashes(std::string name) {
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

const FlagSpec* FindShort(char name) {
  for (const FlagSpec& flag : kFlagTable) {
    if (flag.short_name != 0 && flag.short_name == name) return &flag;
  }
  return nullptr;
}

// Returns a hint for an unknown flag: the flag of which `name` is a prefix or that is a prefix of
// `name`.
std::string Suggestion(const std::string& name) {
  const std::string dashed = WithDashes(name);
  if (dashed.size() < 3) return "";
  for (const FlagSpec& flag : kFlagTable) {
    const std::string candidate = flag.name;
    if (candidate.rfind(dashed, 0) == 0 || dashed.rfind(candidate, 0) == 0) {
      return absl::StrCat("; did you mean --", candidate, "?");
    }
  }
  return "";
}

absl::Status UnknownFlag(const std::string& argument, const std::string& name) {
  return absl::InvalidArgumentError(absl::StrCat("unknown flag ", Shown(argument), Suggestion(name),
                                                 " (ddprun --help lists the flags; the program's"
                                                 " own go after the program)"));
}

std::string Expected(const FlagSpec& flag) { return absl::StrCat("expected ", flag.value_name); }

// A flag as it stands on the command line.
struct Token {
  const FlagSpec* flag = nullptr;
  std::string spelled;               // "--nproc_per_node"
  std::optional<std::string> value;  // value within the same argument
};

absl::StatusOr<Token> ReadLong(const std::string& argument) {
  const size_t equals = argument.find('=');
  Token token;
  token.spelled = argument.substr(0, equals);
  token.flag = FindFlag(WithDashes(token.spelled.substr(2)));
  if (token.flag == nullptr) return UnknownFlag(token.spelled, token.spelled.substr(2));
  if (equals != std::string::npos) token.value = argument.substr(equals + 1);
  return token;
}

absl::StatusOr<Token> ReadShort(const std::string& argument) {
  Token token;
  token.spelled = argument.substr(0, 2);
  token.flag = FindShort(argument[1]);
  if (token.flag == nullptr) return UnknownFlag(argument, argument.substr(1));
  if (argument.size() > 2) {
    if (!token.flag->takes_value) return UnknownFlag(argument, argument.substr(1));
    token.value = argument.substr(argument[2] == '=' ? 3 : 2);
  }
  return token;
}

// A negative number is a value; `-x` and `--x` are flags.
bool LooksLikeFlag(const std::string& argument) {
  return argument.size() > 1 && argument[0] == '-' &&
         std::isdigit(static_cast<unsigned char>(argument[1])) == 0;
}

void Set(const FlagSpec& flag, const std::string& spelled, const std::string& value,
         CommandLine& result) {
  result.flags[flag.name] = {.value = value, .spelled = spelled};
}

absl::Status SetFromVariable(const FlagSpec& flag, const std::string& name,
                             const std::string& value, CommandLine& result) {
  if (flag.takes_value) {
    Set(flag, name, value, result);
  } else if (value == "0" || value == "1") {
    Set(flag, name, value == "1" ? "true" : "false", result);
  } else {
    return absl::InvalidArgumentError(absl::StrCat(name, "=", Shown(value), ": expected 0 or 1"));
  }
  return absl::OkStatus();
}

absl::Status ReadEnvironment(const VariableGetter& environment, CommandLine& result) {
  for (const FlagSpec& flag : kFlagTable) {
    std::string name = VariableOf(flag);
    if (name.empty()) continue;
    std::optional<std::string> value = environment(name);
    if (!value.has_value() && flag.other_variable != nullptr) {
      name = flag.other_variable;
      value = environment(name);
      // torchrun treats these variables as unset when they are empty; an empty PET_* variable
      // counts.
      if (value.has_value() && value->empty()) continue;
    }
    if (!value.has_value()) continue;
    absl::Status status = SetFromVariable(flag, name, *value, result);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Returns true for flags that the parser itself answers.
bool IsOurs(const FlagSpec& flag) { return flag.group == HelpGroup::kOther; }

void Answer(const FlagSpec& flag, const std::string& value, CommandLine& result) {
  if (std::strcmp(flag.name, "help") == 0) {
    result.help = true;
  } else if (std::strcmp(flag.name, "version") == 0) {
    result.version = true;
  } else {
    result.completion = value;
  }
}

// Reads the flag at `arguments[index]` and moves `index` past it and its value.
absl::Status ReadFlag(const std::vector<std::string>& arguments, size_t& index,
                      CommandLine& result) {
  const std::string& argument = arguments[index];
  absl::StatusOr<Token> token = argument[1] == '-' ? ReadLong(argument) : ReadShort(argument);
  if (!token.ok()) return token.status();
  ++index;
  const FlagSpec& flag = *token->flag;
  if (!flag.takes_value) {
    if (token->value.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(token->spelled, "=", Shown(*token->value), ": this flag takes no value"));
    }
    if (IsOurs(flag)) {
      Answer(flag, "", result);
    } else {
      Set(flag, token->spelled, "true", result);
    }
    return absl::OkStatus();
  }
  if (!token->value.has_value()) {
    if (index == arguments.size() || LooksLikeFlag(arguments[index])) {
      return absl::InvalidArgumentError(
          absl::StrCat(token->spelled, " needs a value: ", Expected(flag)));
    }
    token->value = arguments[index++];
  }
  if (!IsOurs(flag)) {
    Set(flag, token->spelled, *token->value, result);
  } else if (*token->value == "bash" || *token->value == "zsh") {
    Answer(flag, *token->value, result);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat(token->spelled, "=", Shown(*token->value), ": ", Expected(flag)));
  }
  return absl::OkStatus();
}

const char* GroupTitle(HelpGroup group) {
  switch (group) {
    case HelpGroup::kJob:
      return "The job";
    case HelpGroup::kProgram:
      return "How the program is run";
    case HelpGroup::kRendezvous:
      return "Where nodes meet";
    case HelpGroup::kFailures:
      return "Failures and signals";
    case HelpGroup::kWatching:
      return "Watching the job";
    case HelpGroup::kOutput:
      return "The workers' output";
    case HelpGroup::kOther:
      return "Other";
  }
  return "";
}

// Returns `text` in lines of at most 100 columns, each behind `indent` blanks.
std::string Wrapped(const std::string& text, size_t indent) {
  constexpr size_t kColumns = 100;
  std::string result;
  std::string line(indent, ' ');
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = text.find(' ', begin);
    if (end == std::string::npos) end = text.size();
    const std::string word = text.substr(begin, end - begin);
    if (line.size() > indent && line.size() + 1 + word.size() > kColumns) {
      absl::StrAppend(&result, line, "\n");
      line.assign(indent, ' ');
    }
    if (line.size() > indent) line += ' ';
    line += word;
    begin = end + 1;
  }
  return absl::StrCat(result, line, "\n");
}

std::string FlagHelp(const FlagSpec& flag) {
  std::string head = "  ";
  if (flag.short_name != 0) absl::StrAppend(&head, "-", std::string(1, flag.short_name), ", ");
  absl::StrAppend(&head, "--", flag.name);
  if (flag.takes_value) absl::StrAppend(&head, " ", flag.value_name);
  std::string tail;
  const std::string value = TextOf(flag.default_value);
  if (!value.empty()) absl::StrAppend(&tail, " Default: ", value, ".");
  return absl::StrCat(head, "\n", Wrapped(absl::StrCat(flag.help, tail), 6));
}

}  // namespace

std::string VariableOf(const FlagSpec& flag) {
  if (IsOurs(flag)) return "";
  std::string variable = absl::StrCat("PET_", absl::AsciiStrToUpper(flag.name));
  std::replace(variable.begin(), variable.end(), '-', '_');
  return variable;
}

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments,
                                             const VariableGetter& environment) {
  CommandLine result;
  if (absl::Status status = ReadEnvironment(environment, result); !status.ok()) return status;
  size_t index = 0;
  while (index < arguments.size()) {
    const std::string& argument = arguments[index];
    if (argument == "--") {
      ++index;
      break;
    }
    if (argument.size() < 2 || argument[0] != '-') break;
    if (absl::Status status = ReadFlag(arguments, index, result); !status.ok()) return status;
    if (result.help || result.version || !result.completion.empty()) return result;
  }
  result.program.assign(arguments.begin() + static_cast<std::ptrdiff_t>(index), arguments.end());
  if (result.program.empty() || result.program[0].empty()) {
    return absl::InvalidArgumentError(
        "no program to run: ddprun [flags] PROGRAM [arguments of the program]");
  }
  return result;
}

std::string HelpText() {
  std::string text =
      "Usage: ddprun [flags] PROGRAM [arguments of the program]\n"
      "       ddprun status [flags]    what jobs do now; see ddprun status --help\n"
      "       ddprun checkpoint VERB   checkpoints on disk; see ddprun checkpoint --help\n"
      "\n"
      "Starts PROGRAM once per worker, restarts all workers when one fails, and leaves no process\n"
      "behind. A PROGRAM whose name ends in .py runs under $PYTHON_EXEC (else python3) -u; any\n"
      "other is executed. ${local_rank} in an argument stands for the worker's local rank.\n"
      "\n"
      "Flags may be written --like-this or --like_this. Each has a variable PET_LIKE_THIS (1 or 0\n"
      "for switches), which counts where the flag is not given. -- may stand before PROGRAM.\n";
  HelpGroup group = HelpGroup::kOther;
  bool first = true;
  for (const FlagSpec& flag : kFlagTable) {
    if (first || flag.group != group) absl::StrAppend(&text, "\n", GroupTitle(flag.group), ":\n");
    first = false;
    group = flag.group;
    absl::StrAppend(&text, FlagHelp(flag));
  }
  absl::StrAppend(&text,
                  "\nExit code: 0 when every worker succeeded, 2 for a mistake on the command line,"
                  " 128 + N when\nddprun's agent was killed by signal N; else what --exit-code"
                  " says. --exit-code=reason:\n",
                  ReasonCodesText());
  return text;
}

}  // namespace ddp::launcher
