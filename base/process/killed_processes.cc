#include "base/process/killed_processes.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/process/process_state.h"

namespace ddp {

void KilledProcesses::Add(pid_t pid, const std::string& name) {
  processes_.try_emplace(pid, Process{.name = name, .remains = RemainsOf(pid)});
}

std::optional<KilledProcesses::Finding> KilledProcesses::Look() {
  Finding finding;
  for (auto& [pid, process] : processes_) {
    const Remains now = RemainsOf(pid);
    const Remains before = std::exchange(process.remains, now);
    if (now.threads == 0) continue;
    finding.progress |= now.threads < before.threads || now.memory_bytes < before.memory_bytes;
    finding.what = absl::StrCat(process.name, " (pid ", pid, ")",
                                now.uninterruptible ? " is in uninterruptible sleep (state D)"
                                                    : " is still being ended by the kernel",
                                ", with ", now.memory_bytes >> 20, " MiB of memory");
  }
  if (finding.what.empty()) return std::nullopt;
  return finding;
}

KilledProcesses::Remains KilledProcesses::RemainsOf(pid_t pid) {
  Remains remains;
  std::error_code error;
  std::filesystem::directory_iterator thread(absl::StrCat("/proc/", pid, "/task"), error);
  for (; !error && thread != std::filesystem::directory_iterator(); thread.increment(error)) {
    const std::string number = thread->path().filename();
    const char state = ProcessState(static_cast<pid_t>(std::strtol(number.c_str(), nullptr, 10)));
    if (state == '?' || state == 'Z' || state == 'X') continue;  // it has ended
    ++remains.threads;
    remains.uninterruptible |= state == 'D';
    // An ended main thread shows no memory.
    int64_t all_pages = 0;
    int64_t resident_pages = 0;
    std::ifstream(thread->path() / "statm") >> all_pages >> resident_pages;
    remains.memory_bytes = std::max(remains.memory_bytes, resident_pages * sysconf(_SC_PAGESIZE));
  }
  return remains;
}

}  // namespace ddp
