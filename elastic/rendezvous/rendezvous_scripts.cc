#include "elastic/rendezvous/rendezvous_scripts.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "elastic/rendezvous/scripts.h"
#include "glog/logging.h"

namespace ddp::elastic {
namespace {

namespace scripts = embedded::scripts;

using Names = std::vector<absl::string_view>;

struct Row {
  ScriptName script;
  const char* name;
  std::vector<const char*> texts;  // of the parts that the script is made of, in order
  Names arguments;                 // in the order of ARGV
};

// Returns the row of a transition: a script that starts with the prelude.
Row Transition(ScriptName script, const char* name, const Names& arguments,
               const std::vector<const char*>& own_text, const char* fast_path = "") {
  Row row = {script,
             name,
             {scripts::kPrelude, fast_path, scripts::kPermissions, scripts::kMembership,
              scripts::kBudget, scripts::kSeats, scripts::kLeases},
             {"node", "token", "seen_generation", "seen_nonce", "seen_restarts", "generation",
              "nonce", "row", "next_nonce"}};
  row.texts.insert(row.texts.end(), own_text.begin(), own_text.end());
  row.arguments.insert(row.arguments.end(), arguments.begin(), arguments.end());
  return row;
}

const Row& RowOf(ScriptName script) {
  static const auto& rows = *new std::array<Row, kScriptCount>{
      Row{ScriptName::kOpenInstance,
          "open_instance",
          {scripts::kInstances, scripts::kPermissions, scripts::kOpenInstance},
          {"prefix", "wanted", "token", "is_known", "fingerprint", "ttl_ms", "request_ttl_ms",
           "lease_ms", "heartbeat_ms", "max_restarts", "min_nodes", "max_nodes", "last_call_ms",
           "no_progress_limit", "quarantine_strikes", "cooldown_ms", "max_node_losses",
           "scale_up_delay_ms", "node_unit"}},
      Transition(ScriptName::kJoin, "join", {"offer", "only_changes", "program"},
                 {scripts::kInstances, scripts::kJoin}, scripts::kJoinFast),
      Transition(ScriptName::kHeartbeat, "heartbeat",
                 {"step", "rate", "busy_us", "report", "max_world", "completed", "at_work"},
                 {scripts::kHeartbeat}, scripts::kHeartbeatFast),
      Transition(ScriptName::kReportFailure, "report_failure",
                 {"rank", "host", "cause", "is_victim", "step", "progress_known", "exit_code",
                  "instead_of", "grace_ms"},
                 {scripts::kReportFailure}),
      Transition(ScriptName::kComplete, "complete", {}, {scripts::kComplete}),
      Transition(ScriptName::kDrain, "drain", {"cause"}, {scripts::kDrain}),
      Transition(ScriptName::kTakeBack, "take_back", {}, {scripts::kTakeBack}),
      Transition(ScriptName::kLeave, "leave", {"in_order"}, {scripts::kLeave}),
      Transition(ScriptName::kClose, "close", {"kind", "exit_code", "reason"}, {scripts::kClose}),
  };
  const Row& row = rows[static_cast<size_t>(script)];
  CHECK(row.script == script);
  return row;
}

// Returns the lines that give a script its arguments as the fields of `args`.
std::string ReadArguments(const Names& names) {
  std::string text = "local args = setmetatable({";
  for (size_t i = 0; i < names.size(); ++i) {
    absl::StrAppend(&text, names[i], " = ARGV[", i + 1, "], ");
  }
  return text + "}, {__index = function(_, name) error('no argument ' .. name) end})\n";
}

store::RedisScript Make(ScriptName script,
                        const std::function<std::string(ScriptName, std::string)>& edit) {
  const Row& row = RowOf(script);
  std::string source = ReadArguments(row.arguments);
  for (const char* text : row.texts) source += text;
  return store::RedisScript(edit ? edit(script, std::move(source)) : std::move(source));
}

}  // namespace

const char* ToString(ScriptName name) { return RowOf(name).name; }

std::vector<std::string> EncodeArguments(ScriptName script,
                                         const std::vector<ScriptArgument>& arguments) {
  const Names& names = RowOf(script).arguments;
  std::vector<std::string> values(names.size());
  std::vector<bool> given(names.size(), false);
  for (const ScriptArgument& argument : arguments) {
    const size_t index = ArgumentIndex(script, argument.name);
    CHECK(!given[index]) << argument.name << " is given twice";
    given[index] = true;
    values[index] = argument.value;
  }
  const auto missing = std::find(given.begin(), given.end(), false);
  CHECK(missing == given.end()) << ToString(script) << " needs "
                                << names[static_cast<size_t>(missing - given.begin())];
  return values;
}

size_t ArgumentIndex(ScriptName script, absl::string_view name) {
  const Names& names = RowOf(script).arguments;
  const auto found = std::find(names.begin(), names.end(), name);
  CHECK(found != names.end()) << ToString(script) << " has no argument " << name;
  return static_cast<size_t>(found - names.begin());
}

RendezvousScripts::RendezvousScripts(
    const std::function<std::string(ScriptName, std::string)>& edit)
    : scripts_{Make(ScriptName::kOpenInstance, edit), Make(ScriptName::kJoin, edit),
               Make(ScriptName::kHeartbeat, edit),    Make(ScriptName::kReportFailure, edit),
               Make(ScriptName::kComplete, edit),     Make(ScriptName::kDrain, edit),
               Make(ScriptName::kTakeBack, edit),     Make(ScriptName::kLeave, edit),
               Make(ScriptName::kClose, edit)} {}

}  // namespace ddp::elastic
