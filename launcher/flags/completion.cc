#include "launcher/flags/completion.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "launcher/flags/flag_table.h"
#include "launcher/flags/status_flags.h"

namespace ddp::launcher {
namespace {

// Returns the words among the alternatives of a flag's value: those in lower case, by the table's
// rule.
std::vector<std::string> Words(const FlagSpec& flag) {
  std::vector<std::string> words;
  const std::vector<std::string> alternatives = absl::StrSplit(flag.value_name, '|');
  for (const std::string& word : alternatives) {
    if (!word.empty() && std::none_of(word.begin(), word.end(),
                                      [](unsigned char c) { return std::isupper(c) != 0; })) {
      words.push_back(word);
    }
  }
  return words;
}

bool NamesFolder(const FlagSpec& flag) { return std::string(flag.value_name) == "FOLDER"; }
bool NamesFile(const FlagSpec& flag) { return std::string(flag.value_name) == "FILE"; }

// Returns the names of a flag, "--tee" and "-t", each behind a blank.
std::string Names(const FlagSpec& flag) {
  std::string names = absl::StrCat(" --", flag.name);
  if (flag.short_name != 0) absl::StrAppend(&names, " -", std::string(1, flag.short_name));
  return names;
}

std::string BashCase(const FlagSpec& flag, const std::string& reply) {
  std::string pattern = absl::StrCat("--", flag.name);
  if (flag.short_name != 0) absl::StrAppend(&pattern, "|-", std::string(1, flag.short_name));
  return absl::StrCat("    ", pattern, ") COMPREPLY=($(compgen ", reply, " -- \"$current\")) ;;\n");
}

std::string BashCases() {
  std::string cases;
  for (const FlagSpec& flag : kFlagTable) {
    const std::vector<std::string> words = Words(flag);
    if (!flag.takes_value) continue;
    if (!words.empty()) {
      absl::StrAppend(&cases, BashCase(flag, absl::StrCat("-W '", absl::StrJoin(words, " "), "'")));
    } else if (NamesFolder(flag)) {
      absl::StrAppend(&cases, BashCase(flag, "-d"));
    } else if (NamesFile(flag)) {
      absl::StrAppend(&cases, BashCase(flag, "-f"));
    }
  }
  return cases;
}

// Bash splits `--flag=value` into three words.
constexpr char kBash[] = R"(# Completion of ddprun for bash.
_ddprun() {
  local all='@ALL@ '
  local with_value='@WITH_VALUE@ '
  local of_status='@OF_STATUS@ '
  local current=${COMP_WORDS[COMP_CWORD]} flag='' word i
  COMPREPLY=()
  if [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[1]} == status && ! -f status ]] && ! type -P status; then
    [[ $current == -* ]] && COMPREPLY=($(compgen -W "$of_status" -- "${current//_/-}"))
    return
  fi >/dev/null
  for ((i = 1; i < COMP_CWORD; ++i)); do
    word=${COMP_WORDS[i]}
    if [[ $word == '=' ]]; then
      continue
    elif [[ -n $flag ]]; then
      flag=''
    elif [[ $word == -?* && $word != -- ]]; then
      word=${word//_/-}
      [[ $with_value == *" $word "* ]] && flag=$word
    else
      return  # the program is there: what follows is its own
    fi
  done
  [[ $current == '=' ]] && current=''
  if [[ $COMP_CWORD == 1 && -n $current && status == "$current"* ]]; then
    COMPREPLY=(status)
  fi
  case $flag in
    '')
      if [[ $current == -* ]]; then
        COMPREPLY=($(compgen -W "$all" -- "${current//_/-}"))
      else
        COMPREPLY+=($(compgen -c -- "$current"))
      fi
      ;;
@CASES@  esac
}
complete -o default -F _ddprun ddprun
)";

std::string BashScript() {
  std::string all;
  std::string with_value;
  for (const FlagSpec& flag : kFlagTable) {
    absl::StrAppend(&all, Names(flag));
    if (flag.takes_value) absl::StrAppend(&with_value, Names(flag));
  }
  std::string of_status;
  for (const StatusFlag& flag : kStatusFlags) absl::StrAppend(&of_status, " --", flag.name);
  return absl::StrReplaceAll(kBash, {{"@ALL@", all},
                                     {"@WITH_VALUE@", with_value},
                                     {"@OF_STATUS@", of_status},
                                     {"@CASES@", BashCases()}});
}

// Returns the first sentence of the help, escaped for '...[...]...'.
std::string ZshText(const FlagSpec& flag) {
  const std::string help = flag.help;
  return absl::StrReplaceAll(help.substr(0, help.find(". ")),
                             {{"'", "'\\''"}, {"[", "\\["}, {"]", "\\]"}, {":", "\\:"}});
}

std::string ZshAction(const FlagSpec& flag) {
  const std::vector<std::string> words = Words(flag);
  if (!words.empty()) return absl::StrCat("(", absl::StrJoin(words, " "), ")");
  if (NamesFolder(flag)) return "_files -/";
  if (NamesFile(flag)) return "_files";
  return " ";
}

constexpr char kZshBegin[] = R"(#compdef ddprun
# Completion of ddprun for zsh.
_ddprun_program() {
  local -a subcommand
  (( CURRENT == 2 )) && subcommand=('commands:subcommand:(status)')
  _alternative $subcommand 'programs:program:_command_names -e' 'files:script:_files'
}
_ddprun() {
  if [[ $CURRENT -gt 2 && $words[2] == status && ! -f status ]] && ! (( $+commands[status] )); then
    shift words
    (( CURRENT-- ))
    _arguments -S @OF_STATUS@
    return
  fi
  # Flags come in two spellings; _arguments knows one.
  local i
  for ((i = 2; i <= CURRENT; ++i)); do
    [[ $words[i] == -* ]] || continue
    words[i]=${${words[i]%%=*}//_/-}${words[i]#${words[i]%%=*}}
  done
  [[ $PREFIX == --* ]] && PREFIX=${${PREFIX%%=*}//_/-}${PREFIX#${PREFIX%%=*}}
  _arguments -S \
)";

std::string ZshScript() {
  std::string of_status;
  for (const StatusFlag& flag : kStatusFlags) {
    absl::StrAppend(&of_status, " '--", flag.name, flag.takes_value ? "=[" : "[", flag.help, "]",
                    flag.takes_value ? ":value: '" : "'");
  }
  std::string script = absl::StrReplaceAll(kZshBegin, {{" @OF_STATUS@", of_status}});
  const auto add = [&](const FlagSpec& flag, const std::string& name) {
    absl::StrAppend(&script, "    '", name, "[", ZshText(flag), "]");
    if (flag.takes_value) {
      const std::string value_name = absl::StrReplaceAll(flag.value_name, {{":", "\\:"}});
      absl::StrAppend(&script, ":", value_name, ":", ZshAction(flag));
    }
    absl::StrAppend(&script, "' \\\n");
  };
  for (const FlagSpec& flag : kFlagTable) {
    add(flag, absl::StrCat("--", flag.name, flag.takes_value ? "=" : ""));
    if (flag.short_name != 0) {
      add(flag, absl::StrCat("-", std::string(1, flag.short_name), flag.takes_value ? "+" : ""));
    }
  }
  absl::StrAppend(&script,
                  "    '(-)1:program:_ddprun_program' \\\n    '*::argument:_default'\n}\n"
                  "# As a file of $fpath, or by `source`.\n"
                  "if [[ $funcstack[1] == _ddprun ]]; then\n  _ddprun \"$@\"\n"
                  "else\n  compdef _ddprun ddprun\nfi\n");
  return script;
}

}  // namespace

std::string CompletionScript(const std::string& shell) {
  return shell == "zsh" ? ZshScript() : BashScript();
}

}  // namespace ddp::launcher
