#ifndef DDP_LAUNCHER_POSIX_PROCESS_SPAWNER_H_
#define DDP_LAUNCHER_POSIX_PROCESS_SPAWNER_H_

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
#include "launcher/launch_options.h"
#include "launcher/log_layout.h"
#include "launcher/log_router.h"
#include "launcher/process_tree.h"

namespace ddp::launcher {

// The real ProcessSpawner: fork and exec, one session per worker, pidfds on the event loop.
//
// A worker starts with default signal dispositions, an empty signal mask, stdin as ours, stdout and
// stderr where -r and -t send them, no other descriptor than those of its spec, and SIGKILL as its
// parent-death signal. Make this process a child subreaper first: descendants that a worker leaves
// behind come to it, are reaped when they end, and are what KillStrays() kills.
//
// Not thread-safe; on the thread of the event loop, which must be the one that outlives the
// workers: the kernel kills them when the *thread* that started them ends. Takes SIGCHLD by a
// signalfd for as long as it lives.
class PosixProcessSpawner final : public elastic::ProcessSpawner {
 public:
  struct Options {
    OutputOptions output;  // its log_dir means nothing here: `layout` is made of it
    LogLayout layout;
    std::string host;  // ${hostname} in the prefix of teed lines
    // CPUs that a worker may run on, by local rank; empty: all of ours.
    std::vector<std::vector<int>> cpus;
    // The workers' limit of open files; none: ours.
    std::optional<rlimit> open_files;
    // How long the end of the job and the destructor wait for what SIGKILL was sent to.
    absl::Duration kill_timeout = absl::Seconds(10);
    // Where folders are made and files opened, which may be on a mount that has stalled. Not owned;
    // must outlive the spawner. Null: on the calling thread, waiting for it.
    TaskThread* files = nullptr;
    // Kills what workers have left behind; see KillChildrenOnce().
    std::function<KillPass(const std::set<pid_t>& spared)> kill_children = KillChildrenOnce;
    // Where it is true nothing is started any more, and no end is told; may be nullptr. See
    // AgentContext::doomed.
    const std::atomic<bool>* doomed = nullptr;
  };

  // `event_loop` and `router` are not owned and must outlive the spawner.
  // Errors: kInternal (signalfd, epoll).
  static absl::StatusOr<std::unique_ptr<PosixProcessSpawner>> Create(EventLoop* event_loop,
                                                                     LogRouter* router,
                                                                     Options options);

  // Kills what is left.
  ~PosixProcessSpawner() override;

  // `pid` is a child that has nothing to do with the workers: it is neither killed nor reaped here.
  void Spare(pid_t pid) { spared_.insert(pid); }
  // Its number may come to mean another process.
  void SpareNoMore(pid_t pid) { spared_.erase(pid); }

  void Spawn(const elastic::WorkerSpec& spec, StartCallback on_start,
             ExitCallback on_exit) override;
  void CancelStart() override;
  void Signal(pid_t pid, int signal) override;

  // Also ends the streams of workers that have ended, before `on_gone`.
  void KillStrays(std::function<void()> on_gone) override;

  // The same for the end of the job, where no heartbeat is due any more: waits, for
  // Options::kill_timeout at most. Then says that some are not gone.
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
  // The one start that is under way. Its files are made first, then its process, then exec follows.
  struct Starting {
    elastic::WorkerSpec spec;
    StartCallback on_start;
    ExitCallback on_exit;
    std::shared_ptr<Outputs> outputs;
    pid_t pid = -1;       // once there is a process
    UniqueFd exec_error;  // then: errno of exec, or the end of the file when it has succeeded
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
  std::map<pid_t, Worker> workers_;                 // running
  std::vector<LogRouter::StreamId> ended_streams_;  // of workers that have ended
  std::optional<Starting> starting_;
  std::function<void()> on_strays_gone_;  // while they are hunted
  EventLoop::TimerId hunt_timer_ = 0;
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_POSIX_PROCESS_SPAWNER_H_
