#include "launcher/process/keeper.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/detached_thread.h"
#include "base/process/pidfd.h"
#include "base/unique_fd.h"
#include "elastic/agent/worker_failure.h"
#include "launcher/output/patience.h"
#include "launcher/output/say.h"
#include "launcher/process/private_folder.h"
#include "launcher/process/process_tree.h"

namespace ddp::launcher {
namespace {

constexpr char kAgentName[] = "ddp-agent";

// Time for a request to a nearby server, or for learning that there is no message to send.
constexpr int kLastWordMilliseconds = 500;

sigset_t SignalSet(const std::vector<int>& signals) {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : signals) {
    struct sigaction action {};
    ::sigaction(signal, nullptr, &action);
    // nohup sets SIGHUP to ignored, and means it. Shells start background jobs with SIGINT and
    // SIGQUIT ignored, but a signal sent to such a job is still meant.
    if (signal == SIGHUP && action.sa_handler == SIG_IGN) continue;
    sigaddset(&set, signal);
  }
  return set;
}

// Shows options.agent_title as the command line of this process, cut to the length of the old one.
void SetProcessTitle(const KeeperOptions& options) {
  ::prctl(PR_SET_NAME, kAgentName);
  if (options.argc < 1 || options.argv == nullptr) return;
  // The kernel stores the arguments one behind the other.
  char* begin = options.argv[0];
  char* end = begin;
  for (int i = 0; i < options.argc && options.argv[i] == end; ++i) {
    end += std::strlen(options.argv[i]) + 1;
  }
  const size_t room = static_cast<size_t>(end - begin);
  if (room == 0) return;
  std::memset(begin, 0, room);
  std::memcpy(begin, options.agent_title.data(), std::min(room - 1, options.agent_title.size()));
}

void Remove(const std::string& folder, absl::Duration patience) {
  const absl::Status removed = RemoveFolder(folder);
  if (!removed.ok()) SayError(removed, patience);
}

bool KeepsLogs(const KeeperOptions& options) {
  return options.logs_hold_output && HoldsData(options.temporary_log_folder);
}

// Removes the folders of a run of which the keeper or the agent was killed.
void RemoveFolders(const KeeperOptions& options, absl::Duration patience) {
  Remove(options.runtime_folder, patience);
  if (!KeepsLogs(options)) Remove(options.temporary_log_folder, patience);
}

// Tells the user where the workers' output is, if RemoveFolders() has kept it.
void SayWhereLogsAre(const KeeperOptions& options, absl::Duration patience) {
  if (!KeepsLogs(options)) return;
  Say(absl::StrCat("the workers' output is in ", options.temporary_log_folder,
                   " (--log-dir chooses the place)"),
      patience);
}

// State that the agent's two threads share. Trivially destroyed, so the watcher's thread may
// outlive main().
struct Shared {
  std::atomic<bool> doomed = false;
  std::atomic<bool> has_last_word = false;
  int said_fd = -1;
};

// The agent's second thread: waits for the keeper's end, then kills everything below the agent and
// ends the process.
class KeeperWatcher {
 public:
  // Starts the thread, which ends only with the process. `keeper` stays open until then.
  static absl::Status Start(int keeper, const KeeperOptions& options, Shared* shared) {
    return StartDetachedThread("keeper-watcher", [keeper, options, shared] {
      AwaitEnd(keeper);
      shared->doomed.store(true);
      EndEverything(options, *shared);
    });
  }

 private:
  static void AwaitEnd(int pidfd) {
    pollfd polled{.fd = pidfd, .events = POLLIN, .revents = 0};
    while (::poll(&polled, 1, -1) != 1) {
    }
  }

  static void AwaitLastWord(const Shared& shared) {
    if (!shared.has_last_word.load()) return;
    pollfd polled{.fd = shared.said_fd, .events = POLLIN, .revents = 0};
    (void)::poll(&polled, 1, kLastWordMilliseconds);
  }

  [[noreturn]] static void EndEverything(const KeeperOptions& options, const Shared& shared) {
    constexpr absl::Duration kPatience = kConsoleStallTimeoutAfterSignal;
    KillChildren({}, options.kill_timeout);
    RemoveFolders(options, kPatience);
    AwaitLastWord(shared);
    // The main thread may have been in the middle of starting a worker or a server.
    KillChildren({}, options.kill_timeout);
    RemoveFolders(options, kPatience);
    Say("the process that was started by the user is gone: stopped", kPatience);
    SayWhereLogsAre(options, kPatience);
    ::_exit(1);
  }
};

[[noreturn]] void RunAgent(UniqueFd keeper_pidfd, const KeeperOptions& options,
                           const std::function<int(const AgentContext&)>& agent) {
  ::setsid();
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  SetProcessTitle(options);
  static Shared shared;
  shared.said_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  const absl::Status watched = KeeperWatcher::Start(keeper_pidfd.get(), options, &shared);
  if (!watched.ok()) {
    SayError(watched, kConsoleStallTimeout);
    RemoveFolders(options, kConsoleStallTimeout);
    std::exit(options.cannot_start_exit_code);  // NOLINT(concurrency-mt-unsafe): the only thread
  }
  const int code = agent({.doomed = &shared.doomed,
                          .keeper_fd = keeper_pidfd.get(),
                          .has_last_word = &shared.has_last_word,
                          .said_fd = shared.said_fd});
  if (shared.doomed.load()) {
    // The watcher ends the process when it is done; without this, exit() would cut it short.
    while (true) ::pause();
  }
  std::exit(code);  // NOLINT(concurrency-mt-unsafe): the watcher uses nothing that exit() destroys
}

// Returns the signals that the keeper reads: the user's, and SIGTSTP unless the user ignores it.
sigset_t KeeperSignals(const KeeperOptions& options) {
  sigset_t set = SignalSet(options.signals);
  struct sigaction action {};
  ::sigaction(SIGTSTP, nullptr, &action);
  if (action.sa_handler != SIG_IGN) sigaddset(&set, SIGTSTP);
  return set;
}

bool IsOneOf(const std::vector<int>& signals, int signal) {
  return std::find(signals.begin(), signals.end(), signal) != signals.end();
}

// Stops this process as Ctrl-Z does; returns once it continues. The kernel does not stop a process
// group that no shell could continue.
void StopAsByCtrlZ() {
  sigset_t stop;
  sigemptyset(&stop);
  sigaddset(&stop, SIGTSTP);
  ::raise(SIGTSTP);  // pending, so that a SIGCONT that comes first cancels it
  ::pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);
  ::pthread_sigmask(SIG_BLOCK, &stop, nullptr);
}

// How the agent ended.
struct AgentEnd {
  siginfo_t status{};
  std::set<int> forwarded;  // signals that the keeper sent to the agent
};

// Returns a descriptor that is readable when a child has ended. Invalid when no descriptor is left:
// children are then reaped at the end.
UniqueFd WatchChildren() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
  return UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

// Forwards signals and reaps other children until the agent has ended.
AgentEnd KeepUntilEnd(pid_t agent, const UniqueFd& agent_pidfd, const UniqueFd& signals,
                      const KeeperOptions& options) {
  AgentEnd end;
  const UniqueFd children = WatchChildren();
  pollfd polled[] = {{.fd = agent_pidfd.get(), .events = POLLIN, .revents = 0},
                     {.fd = signals.get(), .events = POLLIN, .revents = 0},
                     {.fd = children.get(), .events = POLLIN, .revents = 0}};
  ReapChildren({agent});  // children that ended before the signalfd existed
  while (true) {
    if (::poll(polled, std::size(polled), -1) < 0) continue;
    if ((polled[1].revents & POLLIN) != 0) {
      std::array<signalfd_siginfo, 16> infos{};
      const ssize_t bytes = ::read(signals.get(), infos.data(), sizeof(infos));
      const auto last = infos.begin() + std::max<ssize_t>(bytes, 0) / sizeof(infos[0]);
      // A hangup comes last, as in Agent.
      std::stable_partition(infos.begin(), last,
                            [](const auto& info) { return info.ssi_signo != SIGHUP; });
      for (auto info = infos.begin(); info != last; ++info) {
        const int signal = static_cast<int>(info->ssi_signo);
        ::kill(agent, signal);
        if (IsOneOf(options.signals, signal)) {
          end.forwarded.insert(signal);
        } else {  // SIGTSTP: the agent stops the workers, and holds the node's place in the job
          StopAsByCtrlZ();
          ::kill(agent, SIGCONT);
        }
      }
    }
    if ((polled[2].revents & POLLIN) != 0) {
      signalfd_siginfo info{};
      (void)!::read(children.get(), &info, sizeof(info));
      ReapChildren({agent});
    }
    if ((polled[0].revents & POLLIN) != 0) break;
  }
  while (::waitid(P_PID, static_cast<id_t>(agent), &end.status, WEXITED) != 0 && errno == EINTR) {
  }
  return end;
}

int CleanUp(const AgentEnd& end, const KeeperOptions& options, const std::set<pid_t>& spared) {
  const absl::Duration patience =
      end.forwarded.empty() ? kConsoleStallTimeout : kConsoleStallTimeoutAfterSignal;
  const bool killed = end.status.si_code != CLD_EXITED;
  const bool all_gone = KillChildren(spared, options.kill_timeout);
  if (killed) {
    RemoveFolders(options, patience);
  } else {
    Remove(options.runtime_folder, patience);
  }
  if (!all_gone) {
    Say(absl::StrCat("some processes did not end by SIGKILL within ",
                     absl::FormatDuration(options.kill_timeout), " (--kill-timeout)"),
        patience);
  }
  const int status = end.status.si_status;
  if (!killed) return status;
  const std::string signal = elastic::SignalName(status);
  const bool was_asked = end.forwarded.count(status) != 0;
  Say(was_asked ? absl::StrCat("stopped by ", signal)
                : absl::StrCat("the agent (pid ", end.status.si_pid, ") was killed by ", signal,
                               ": stopped all that it ran"),
      patience);
  SayWhereLogsAre(options, patience);
  return was_asked ? options.stopped_exit_code : 128 + status;
}

}  // namespace

void HoldSignals(const std::vector<int>& signals) {
  const sigset_t set = SignalSet(signals);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

void ReleaseSignals(const std::vector<int>& signals) {
  const sigset_t set = SignalSet(signals);
  // A shell starts background jobs with SIGINT and SIGQUIT ignored.
  for (const int signal : signals) {
    if (sigismember(&set, signal) == 1) ::signal(signal, SIG_DFL);
  }
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

UniqueFd WatchHeldSignals(const std::vector<int>& signals) {
  const sigset_t set = SignalSet(signals);
  return UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
}

absl::StatusOr<int> RunWithKeeper(const KeeperOptions& options,
                                  const std::function<int(const AgentContext&)>& agent) {
  const std::vector<pid_t> children = ChildrenOf(::getpid());
  const std::set<pid_t> spared(children.begin(), children.end());
  UniqueFd keeper_pidfd = OpenPidfd(::getpid());  // the agent inherits it
  if (!keeper_pidfd.valid()) {
    const int error = errno;
    return absl::UnimplementedError(
        absl::StrCat("pidfd_open: ", std::strerror(error),
                     error == ENOSYS ? " (Linux 5.3 or newer is needed)"
                                     : " (a filter of system calls may refuse it)"));
  }
  if (!ProcShowsThisNamespace()) {
    Say("/proc does not show this process as /proc/self (another PID namespace's, or not mounted): "
        "processes that workers leave behind are not found");
  }
  const sigset_t set = KeeperSignals(options);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);  // the agent inherits it
  const UniqueFd signals(::signalfd(-1, &set, SFD_CLOEXEC));
  if (!signals.valid()) {
    return absl::ResourceExhaustedError(absl::StrCat("signalfd: ", std::strerror(errno)));
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  std::fflush(nullptr);
  const pid_t pid = ::fork();
  if (pid < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("fork: ", std::strerror(errno)));
  }
  if (pid == 0) RunAgent(std::move(keeper_pidfd), options, agent);
  keeper_pidfd.reset();
  const UniqueFd agent_pidfd = OpenPidfd(pid);
  if (!agent_pidfd.valid()) {
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    return absl::ResourceExhaustedError(absl::StrCat("pidfd_open: ", std::strerror(errno)));
  }
  return CleanUp(KeepUntilEnd(pid, agent_pidfd, signals, options), options, spared);
}

}  // namespace ddp::launcher
