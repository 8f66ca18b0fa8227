#include "base/process/numa_node.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace ddp {

int NumaNodeOf(const cpu_set_t& cores, const std::string& root) {
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat(root, "/sys/devices/system/node"), error)) {
    const std::string name = entry.path().filename();
    absl::string_view digits = name;
    int node = -1;
    if (!absl::ConsumePrefix(&digits, "node") || !absl::SimpleAtoi(digits, &node)) continue;
    bool all = CPU_COUNT(&cores) > 0;
    for (int core = 0; all && core < CPU_SETSIZE; ++core) {
      all = !CPU_ISSET(core, &cores) ||
            std::filesystem::exists(entry.path() / absl::StrCat("cpu", core), error);
    }
    if (all) return node;
  }
  return -1;
}

}  // namespace ddp
