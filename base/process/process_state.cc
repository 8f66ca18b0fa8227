#include "base/process/process_state.h"

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace ddp {

// "4711 (a name) with) any characters) S 1 ...": the state follows the last parenthesis.
std::vector<std::string> ProcessStat(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(") ");
  if (name_end == std::string::npos) return {};
  return absl::StrSplit(line.substr(name_end + 2), ' ');
}

char ProcessState(pid_t pid) {
  const std::vector<std::string> fields = ProcessStat(pid);
  return fields.empty() || fields[0].empty() ? '?' : fields[0][0];
}

}  // namespace ddp
