#include "launcher/flags/completion.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "launcher/flags/flag_table.h"
#include "launcher/subcommands/checkpoint_flags.h"
#include "launcher/subcommands/status_flags.h"

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
  local verbs='@VERBS@' of_verb
  local current=${COMP_WORDS[COMP_CWORD]} flag='' word i
  COMPREPLY=()
  if [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[1]} == status && ! -f status ]] && ! type -P status; then
    [[ $current == -* ]] && COMPREPLY=($(compgen -W "$of_status" -- "${current//_/-}"))
    return
  fi >/dev/null
  if [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[1]} == checkpoint && ! -f checkpoint ]] &&
      ! type -P checkpoint; then
    case ${COMP_WORDS[2]} in
@CHECKPOINT_CASES@      *) of_verb='--help' ;;
    esac
    if [[ $current == -* ]]; then
      COMPREPLY=($(compgen -W "$of_verb" -- "${current//_/-}"))
    elif [[ $COMP_CWORD == 2 ]]; then
      COMPREPLY=($(compgen -W "$verbs" -- "$current"))
    elif [[ $current != '=' && ${COMP_WORDS[COMP_CWORD-1]} != '=' ]]; then
      COMPREPLY=($(compgen -d -- "$current"))
    fi
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
  if [[ $COMP_CWORD == 1 && -n $current ]]; then
    COMPREPLY=($(compgen -W 'status checkpoint' -- "$current"))
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

// Returns one case for each verb of `ddprun checkpoint`, with its flags.
std::string BashCheckpointCases() {
  std::string cases;
  for (const std::string verb : kCheckpointVerbs) {
    absl::StrAppend(&cases, "      ", verb, ") of_verb='");
    for (const CheckpointFlag& flag : kCheckpointFlags) {
      if (*flag.verb == '\0' || verb == flag.verb) absl::StrAppend(&cases, "--", flag.name, " ");
    }
    absl::StrAppend(&cases, "' ;;\n");
  }
  return cases;
}

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
                                     {"@VERBS@", absl::StrJoin(kCheckpointVerbs, " ")},
                                     {"@CHECKPOINT_CASES@", BashCheckpointCases()},
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
  (( CURRENT == 2 )) && subcommand=('commands:subcommand:(status checkpoint)')
  _alternative $subcommand 'programs:program:_command_names -e' 'files:script:_files'
}
_ddprun() {
  if [[ $CURRENT -gt 2 && $words[2] == status && ! -f status ]] && ! (( $+commands[status] )); then
    shift words
    (( CURRENT-- ))
    _arguments -S @OF_STATUS@
    return
  fi
  if [[ $CURRENT -gt 2 && $words[2] == checkpoint && ! -f checkpoint ]] &&
      ! (( $+commands[checkpoint] )); then
    shift words
    (( CURRENT-- ))
    local -a of_verb
    case $words[2] in
@CHECKPOINT_CASES@    esac
    _arguments -S $of_verb '--help[what the verbs and flags mean]' \
        '1:verb:(@VERBS@)' '*:folder:_files -/'
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

// Returns one case for each verb of `ddprun checkpoint`, with its flags other than --help.
std::string ZshCheckpointCases() {
  std::string cases;
  for (const std::string verb : kCheckpointVerbs) {
    absl::StrAppend(&cases, "      ", verb, ") of_verb=(");
    for (const CheckpointFlag& flag : kCheckpointFlags) {
      if (std::string(flag.name) == "help") continue;
      if (*flag.verb != '\0' && verb != flag.verb) continue;
      absl::StrAppend(&cases, "'--", flag.name, flag.takes_value ? "=[" : "[", flag.help, "]",
                      flag.takes_value ? ":value: ' " : "' ");
    }
    absl::StrAppend(&cases, ") ;;\n");
  }
  return cases;
}

std::string ZshScript() {
  std::string of_status;
  for (const StatusFlag& flag : kStatusFlags) {
    absl::StrAppend(&of_status, " '--", flag.name, flag.takes_value ? "=[" : "[", flag.help, "]",
                    flag.takes_value ? ":value: '" : "'");
  }
  std::string script =
      absl::StrReplaceAll(kZshBegin, {{" @OF_STATUS@", of_status},
                                      {"@CHECKPOINT_CASES@", ZshCheckpointCases()},
                                      {"@VERBS@", absl::StrJoin(kCheckpointVerbs, " ")}});
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
