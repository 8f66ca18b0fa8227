#include "base/process/process_state.h"

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace ddp {

// "4711 (a name) with) any characters) S 1 ...": the state follows the last parenthesis.
char ProcessState(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return '?';
  const size_t name_end = line.rfind(") ");
  return name_end == std::string::npos || name_end + 2 >= line.size() ? '?' : line[name_end + 2];
}

}  // namespace ddp
