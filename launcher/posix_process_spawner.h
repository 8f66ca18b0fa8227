#ifndef DDP_LAUNCHER_POSIX_PROCESS_SPAWNER_H_
#define DDP_LAUNCHER_POSIX_PROCESS_SPAWNER_H_

#include <sys/resource.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/event_loop.h"
#include "base/unique_fd.h"
#include "elastic/agent/process_spawner.h"
#include "launcher/launch_options.h"
#include "launcher/log_layout.h"
#include "launcher/log_router.h"

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

  absl::StatusOr<pid_t> Spawn(const elastic::WorkerSpec& spec, ExitCallback on_exit) override;
  void Signal(pid_t pid, int signal) override;

  // Returns when all of them are gone, at most after 10 s; then says on stderr that some are not.
  // Also ends the streams of workers that have ended.
  void KillStrays() override;

 private:
  struct Worker {
    UniqueFd pidfd;
    std::string error_file;
    std::vector<LogRouter::StreamId> streams;
    ExitCallback on_exit;
  };
  struct Output;

  PosixProcessSpawner(EventLoop* event_loop, LogRouter* router, Options options);

  absl::StatusOr<Output> OpenOutput(const elastic::WorkerSpec& spec, Streams stream,
                                    const LogLayout::WorkerFiles& files) const;
  absl::StatusOr<LogRouter::Stream> MakeStream(const elastic::WorkerSpec& spec, Streams stream,
                                               const LogLayout::WorkerFiles& files) const;
  std::vector<unsigned long> CpuMask(int local_rank) const;
  absl::Status Adopt(pid_t pid, Worker worker);
  void OnExit(pid_t pid);
  std::set<pid_t> Spared() const;

  EventLoop* const event_loop_;
  LogRouter* const router_;
  const Options options_;
  LogLayout layout_;
  std::set<pid_t> spared_;
  UniqueFd child_signals_;
  std::map<pid_t, Worker> workers_;                 // running
  std::vector<LogRouter::StreamId> ended_streams_;  // of workers that have ended
};

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_POSIX_PROCESS_SPAWNER_H_
