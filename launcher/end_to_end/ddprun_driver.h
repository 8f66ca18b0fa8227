#ifndef DDP_LAUNCHER_END_TO_END_DDPRUN_DRIVER_H_
#define DDP_LAUNCHER_END_TO_END_DDPRUN_DRIVER_H_

#include <sys/types.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/under_sanitizer.h"
#include "base/unique_fd.h"

namespace ddp::launcher {

// A run of the real ddprun in a test. It has an environment and a folder for temporary files of its
// own, and the driver captures its output. Every wait has a deadline; a wait that passes it fails
// the test. For tests only. Not thread-safe.
//
// The test's process becomes a child subreaper: processes that ddprun leaves behind become its
// children. The destructor kills them.
class DdprunDriver {
 public:
  struct Options {
    std::vector<std::string> arguments;
    std::map<std::string, std::string>
        environment;     // added to the test's own without PET_* and DDP_*
    int stdout_fd = -1;  // descriptor for stdout instead of capturing it; not owned
    int stderr_fd = -1;  // descriptor for stderr, likewise
    // Command that is executed with ddprun and its arguments appended, and must exec them in turn.
    std::vector<std::string> before;
  };

  // Deadline of a whole run. A sanitizer makes a run several times as long.
  static constexpr absl::Duration kDeadline =
      kUnderSanitizer ? absl::Minutes(5) : absl::Seconds(60);

  explicit DdprunDriver(const Options& options);
  DdprunDriver(const DdprunDriver&) = delete;
  DdprunDriver& operator=(const DdprunDriver&) = delete;
  ~DdprunDriver();

  // Returns the process that a user would have started: the keeper.
  pid_t pid() const { return pid_; }

  // Returns the keeper's child: the agent.
  pid_t AgentPid() const;

  // Returns ddprun and all processes below it.
  std::vector<pid_t> Tree() const;

  // Blocks until stdout holds `text` at least `times` times.
  void AwaitStdout(const std::string& text, int times = 1);
  // Blocks until stderr holds `text`.
  void AwaitStderr(const std::string& text);

  // Blocks until ddprun has ended and no process holds its output open. Returns its exit code, or
  // minus the signal that ended it. At the deadline it fails the test and kills ddprun.
  int Wait();

  // What the two functions above and Wait() have seen.
  const std::string& out() const { return out_; }
  const std::string& err() const { return err_; }

  // Returns the folder under which ddprun makes temporary folders (TMPDIR).
  const std::string& temporary_folder() const { return folder_; }
  // Returns the names in that folder.
  std::vector<std::string> TemporaryEntries() const;

 private:
  // Reads the output on a thread, so that ddprun never waits for a test that awaits something else.
  class Reader;

  void Start(const Options& options);
  bool TakeOutput(absl::Time deadline);
  void Reap();

  const std::string folder_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  int result_ = 0;
  UniqueFd pidfd_;
  std::unique_ptr<Reader> reader_;
  std::string out_;
  std::string err_;
};

// A process that may end at any moment. The constructor opens a pidfd, so AwaitEnd() waits for this
// process even when its number means another process by then.
class HeldProcess {
 public:
  explicit HeldProcess(pid_t pid);

  pid_t pid() const { return pid_; }
  // Blocks until the process has ended. Returns false at the deadline.
  bool AwaitEnd(absl::Time deadline) const;

 private:
  pid_t pid_;
  UniqueFd pidfd_;
};

// Returns the number of times that `text` occurs in `whole`.
int Count(const std::string& whole, const std::string& text);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_END_TO_END_DDPRUN_DRIVER_H_
