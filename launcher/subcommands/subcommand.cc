#include "launcher/subcommands/subcommand.h"

#include "absl/strings/str_cat.h"
#include "base/environment.h"
#include "base/process/path_search.h"

namespace ddp::launcher {

bool IsSubcommand(const std::string& name, const std::vector<std::string>& arguments,
                  const std::function<bool(const std::string&)>& program_exists) {
  return !arguments.empty() && arguments[0] == name && !program_exists(name);
}

std::string HiddenSubcommandHint(const std::vector<std::string>& arguments) {
  for (const std::string name : {"status", "checkpoint"}) {
    if (arguments.empty() || arguments[0] != name) continue;
    return absl::StrCat("; the file ", name, " in this folder hides the subcommand 'ddprun ", name,
                        "': give that in another folder");
  }
  return "";
}

bool ProgramExists(const std::string& name) {
  return IsRegularFile(name) ||
         SearchPath(name, EnvironmentVariable("PATH").value_or(kDefaultPath)).has_value();
}

}  // namespace ddp::launcher
