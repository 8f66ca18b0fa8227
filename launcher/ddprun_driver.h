#ifndef DDP_LAUNCHER_DDPRUN_DRIVER_H_
#define DDP_LAUNCHER_DDPRUN_DRIVER_H_

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/under_sanitizer.h"
#include "base/unique_fd.h"

namespace ddp::launcher {

// One run of the real ddprun in a test: in an environment of its own, with a folder of its own for
// what is temporary, its output caught. Every wait has a deadline, after which the test fails and
// the run is killed. For tests only; not thread-safe.
//
// The test's process becomes a child subreaper: what ddprun leaves behind comes to it, is found by
// Leftovers(), and is killed by the destructor.
class DdprunDriver {
 public:
  struct Options {
    std::vector<std::string> arguments;
    std::map<std::string, std::string> environment;  // over the test's own, less PET_* and DDP_*
    int stdout_fd = -1;  // where its stdout goes in place of being caught; not owned
    int stderr_fd = -1;  // the same for stderr
    // Executed with ddprun and its arguments behind it, which it must exec in its turn.
    std::vector<std::string> before;
  };

  // The time for a whole run. A sanitizer makes a run several times as long.
  static constexpr absl::Duration kDeadline =
      kUnderSanitizer ? absl::Minutes(5) : absl::Seconds(60);

  explicit DdprunDriver(const Options& options);
  DdprunDriver(const DdprunDriver&) = delete;
  DdprunDriver& operator=(const DdprunDriver&) = delete;
  ~DdprunDriver();

  // The process that the user would have started: the keeper.
  pid_t pid() const { return pid_; }

  // The keeper's child that does the work.
  pid_t AgentPid() const;

  // All processes below and including ddprun.
  std::vector<pid_t> Tree() const;

  // Until stdout holds `text` `times` times.
  void AwaitStdout(const std::string& text, int times = 1);
  // The same for stderr.
  void AwaitStderr(const std::string& text);

  // Until ddprun has ended and nobody holds its output any more. Returns its exit code, or minus
  // the signal that ended it.
  int Wait();

  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }

  // The folder under which ddprun makes temporary folders (TMPDIR), and what is in it.
  const std::string& temporary_folder() const { return folder_; }
  std::vector<std::string> TemporaryEntries() const;

 private:
  void Start(const Options& options);
  bool ReadOnce(absl::Time deadline);
  void Reap();

  const std::string folder_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  int result_ = 0;
  UniqueFd pidfd_;
  UniqueFd out_pipe_;
  UniqueFd err_pipe_;
  std::string out_;
  std::string err_;
};

// A process that may end at any moment, held so that its number cannot come to mean another.
class HeldProcess {
 public:
  explicit HeldProcess(pid_t pid);

  pid_t pid() const { return pid_; }
  // Waits until it has ended; false at the deadline.
  bool AwaitEnd(absl::Time deadline) const;

 private:
  pid_t pid_;
  UniqueFd pidfd_;
};

// How often `text` stands in `whole`.
int Count(const std::string& whole, const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_DDPRUN_DRIVER_H_
