#ifndef DDP_LAUNCHER_PROCESS_POSIX_PROCESS_SPAWNER_H_
#define DDP_LAUNCHER_PROCESS_POSIX_PROCESS_SPAWNER_H_

#include <sys/resource.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "base/task_thread.h"
#include "base/unique_fd.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/job/job_spec.h"
#include "launcher/output/log_layout.h"
#include "launcher/output/log_router.h"
#include "launcher/output/output_options.h"
#include "launcher/process/process_tree.h"

namespace ddp::launcher {

// The real ProcessSpawner: fork and exec, one session per worker, pidfds on the event loop. Owned
// by the agent's process, one per job.
//
// A worker starts with default signal dispositions, an empty signal mask and our stdin. Its stdout
// and stderr follow -r and -t. Its only other descriptors are those of its spec, and its
// parent-death signal is SIGKILL.
//
// Make this process a child subreaper first. Descendants that a worker leaves behind then become
// its children: they are reaped when they end, and KillStrays() kills them.
//
// Not thread-safe. Thread: that of the event loop, which must outlive the workers: the kernel kills
// them when the *thread* that started them ends. Receives SIGCHLD through a signalfd while it
// lives.
class PosixProcessSpawner final : public elastic::ProcessSpawner {
 public:
  struct Options {
    OutputOptions output;  // `log_dir` is ignored: `layout` was made from it
    LogLayout layout;
    std::string host;  // value of ${hostname} in the prefix of teed lines
    // CPUs that a worker may run on, by local rank; empty: all of this process's.
    std::vector<std::vector<int>> cpus;
    // Limits of open files for the workers; nullopt: this process's.
    std::optional<rlimit> open_files;
    // Longest wait of AwaitStrays() and the destructor for processes that SIGKILL was sent to.
    absl::Duration kill_timeout = elastic::AgentTimes{}.kill_timeout;
    // Thread that makes folders and opens files, since their mount may stall. Not owned; must
    // outlive the spawner. Null: the calling thread does, and blocks.
    TaskThread* files = nullptr;
    // Function that kills processes that workers have left behind; see KillChildrenOnce().
    std::function<KillPass(const std::set<pid_t>& spared)> kill_children = KillChildrenOnce;
    // While true no process is started and no exit is reported; may be nullptr. See
    // AgentContext::doomed.
    const std::atomic<bool>* doomed = nullptr;
  };

  // `event_loop` and `router` are not owned and must outlive the spawner.
  // Errors: kResourceExhausted (no descriptor or memory is left), kInternal (signalfd, epoll).
  static absl::StatusOr<std::unique_ptr<PosixProcessSpawner>> Create(EventLoop* event_loop,
                                                                     LogRouter* router,
                                                                     Options options);

  // Kills the remaining workers and strays, and blocks as AwaitStrays() does.
  ~PosixProcessSpawner() override;

  // Excludes the child `pid`, which is no worker: it is neither killed nor reaped here.
  void Spare(pid_t pid) { spared_.insert(pid); }
  // Ends Spare(): the number may come to mean another process.
  void SpareNoMore(pid_t pid) { spared_.erase(pid); }

  void Spawn(const elastic::WorkerSpec& spec, StartCallback on_start,
             ExitCallback on_exit) override;
  void CancelStart() override;
  void Signal(pid_t pid, int signal) override;

  // Kills strays as the interface says. Also ends the streams of workers that have ended, before
  // `on_gone`.
  void KillStrays(std::function<void()> on_gone) override;

  // Kills strays at the end of the job, where no heartbeat is due any more. Blocks until none is
  // left, for Options::kill_timeout at most; then it prints that some are left.
  void AwaitStrays();

 private:
  struct Worker {
    UniqueFd pidfd;
    std::string error_file;
    std::vector<LogRouter::StreamId> streams;
    ExitCallback on_exit;
  };
  struct Output;
  struct OutputPlaces;
  struct Outputs;
  // The start in progress. Its files are made first, then its process; exec follows.
  struct Starting {
    elastic::WorkerSpec spec;
    StartCallback on_start;
    ExitCallback on_exit;
    std::shared_ptr<Outputs> outputs;
    pid_t pid = -1;       // process id, once forked
    UniqueFd exec_error;  // errno of exec, or end of file after success
  };

  PosixProcessSpawner(EventLoop* event_loop, LogRouter* router, Options options);

  std::vector<unsigned long> CpuMask(int local_rank) const;
  void StartProcess();
  void OnExecEnd();
  void EndStart(absl::StatusOr<pid_t> pid);
  absl::Status AddStreams(Outputs& outputs, Worker& worker);
  absl::Status Adopt(pid_t pid, Worker worker);
  void OnExit(pid_t pid);
  void Hunt();
  void EndHunt();
  void CloseEndedStreams();
  std::set<pid_t> Spared() const;

  EventLoop* const event_loop_;
  LogRouter* const router_;
  const Options options_;
  const std::shared_ptr<OutputPlaces> places_;
  std::set<pid_t> spared_;
  UniqueFd child_signals_;
  std::map<pid_t, Worker> workers_;                 // running workers
  std::vector<LogRouter::StreamId> ended_streams_;  // streams of workers that have ended
  std::optional<Starting> starting_;
  std::function<void()> on_strays_gone_;  // set while strays are being killed
  EventLoop::TimerId hunt_timer_ = 0;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_PROCESS_POSIX_PROCESS_SPAWNER_H_
