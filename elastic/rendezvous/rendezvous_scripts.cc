#include "elastic/rendezvous/rendezvous_scripts.h"

#include "absl/strings/str_cat.h"
#include "elastic/rendezvous/scripts.h"

namespace ddp::elastic {
namespace {

namespace scripts = embedded::scripts;

// Joins the parts of a transition's script.
std::string Transition(const char* before, const std::string& script) {
  return absl::StrCat(scripts::kPrelude, before, scripts::kPermissions, scripts::kMembership,
                      scripts::kBudget, scripts::kSeats, scripts::kLeases, script);
}

std::string Source(ScriptName name) {
  switch (name) {
    case ScriptName::kOpenInstance:
      return absl::StrCat(scripts::kInstances, scripts::kPermissions, scripts::kOpenInstance);
    case ScriptName::kJoin:
      return Transition(scripts::kJoinFast, absl::StrCat(scripts::kInstances, scripts::kJoin));
    case ScriptName::kHeartbeat:
      return Transition(scripts::kHeartbeatFast, scripts::kHeartbeat);
    case ScriptName::kReportFailure:
      return Transition("", scripts::kReportFailure);
    case ScriptName::kComplete:
      return Transition("", scripts::kComplete);
    case ScriptName::kDrain:
      return Transition("", scripts::kDrain);
    case ScriptName::kTakeBack:
      return Transition("", scripts::kTakeBack);
    case ScriptName::kLeave:
      return Transition("", scripts::kLeave);
    case ScriptName::kClose:
      return Transition("", scripts::kClose);
  }
  return "";
}

store::RedisScript Make(ScriptName name,
                        const std::function<std::string(ScriptName, std::string)>& edit) {
  return store::RedisScript(edit ? edit(name, Source(name)) : Source(name));
}

}  // namespace

const char* ToString(ScriptName name) {
  static constexpr std::array<const char*, kScriptCount> kNames = {
      "open_instance", "join",      "heartbeat", "report_failure", "complete",
      "drain",         "take_back", "leave",     "close"};
  return kNames[static_cast<int>(name)];
}

RendezvousScripts::RendezvousScripts(
    const std::function<std::string(ScriptName, std::string)>& edit)
    : scripts_{Make(ScriptName::kOpenInstance, edit), Make(ScriptName::kJoin, edit),
               Make(ScriptName::kHeartbeat, edit),    Make(ScriptName::kReportFailure, edit),
               Make(ScriptName::kComplete, edit),     Make(ScriptName::kDrain, edit),
               Make(ScriptName::kTakeBack, edit),     Make(ScriptName::kLeave, edit),
               Make(ScriptName::kClose, edit)} {}

}  // namespace ddp::elastic
