#ifndef DDP_BASE_PROCESS_KILLED_PROCESSES_H_
#define DDP_BASE_PROCESS_KILLED_PROCESSES_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace ddp {

// Processes that got SIGKILL and may not have ended: the kernel may take minutes to free the memory
// of a process, and ends none that sleeps uninterruptibly. Thread-compatible.
class KilledProcesses {
 public:
  struct Finding {
    std::string what;       // about one of the processes: "NAME (pid N) is in uninterruptible ..."
    bool progress = false;  // a process has fewer threads or less memory than at the last look
  };

  // Adds a process, which lines call `name`. The number must stay the process's until Remove().
  void Add(pid_t pid, const std::string& name);

  // Returns false for a process that was not added.
  bool Remove(pid_t pid) { return processes_.erase(pid) > 0; }

  // Returns nullopt when no process is left, as far as /proc tells.
  std::optional<Finding> Look();

 private:
  struct Remains {
    int threads = 0;
    int64_t memory_bytes = 0;  // 0 also when the kernel no longer counts what it frees
    bool uninterruptible = false;
  };
  struct Process {
    std::string name;
    Remains remains;
  };
  static Remains RemainsOf(pid_t pid);

  std::map<pid_t, Process> processes_;
};

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_KILLED_PROCESSES_H_
