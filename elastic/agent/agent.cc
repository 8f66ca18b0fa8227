#include "elastic/agent/agent.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/unique_fd.h"
#include "elastic/agent/agent_core.h"
#include "elastic/agent/free_port.h"
#include "elastic/agent/worker_environment_builder.h"
#include "elastic/health/health_page.h"

namespace ddp::elastic {
namespace {

// How often the pages are looked at until every worker has done its first step. The event carries
// the worker's own stamp, so this costs the reader of the log a delay and no precision.
constexpr absl::Duration kFirstStepPollMin = absl::Milliseconds(20);
constexpr absl::Duration kFirstStepPollMax = absl::Seconds(1);

std::map<std::string, std::string> InheritedEnvironment() {
  std::map<std::string, std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const char* equals = strchr(*entry, '=');
    if (equals != nullptr) environment[std::string(*entry, equals - *entry)] = equals + 1;
  }
  return environment;
}

// The signals to take over. One that is ignored from the start (nohup) stays ignored: taken from a
// signalfd it would be seen all the same.
sigset_t HandledSignalSet() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) {
    struct sigaction action {};
    if (signal == SIGHUP && sigaction(signal, nullptr, &action) == 0 &&
        action.sa_handler == SIG_IGN) {
      continue;
    }
    sigaddset(&signals, signal);
  }
  return signals;
}

void PrintLine(const std::string& line) {
  // One write, so that it does not mix with what workers print.
  const std::string text = line + "\n";
  (void)!write(STDERR_FILENO, text.data(), text.size());
}

AgentCore::Options CoreOptions(const LaunchConfig& config) {
  AgentCore::Options options;
  options.max_restarts = config.max_restarts;
  options.role = config.role;
  options.rendezvous_timeout = config.rendezvous_timeout;
  options.fault_grace = config.fault_grace;
  options.shutdown_timeout = config.shutdown_timeout;
  return options;
}

}  // namespace

struct Agent::State {
  struct Worker {
    pid_t pid = 0;
    HealthPage page;
    bool first_step_seen = false;
  };

  State(LaunchConfig launch_config, Dependencies dependencies)
      : config(std::move(launch_config)),
        loop(*dependencies.event_loop),
        spawner(*dependencies.spawner),
        rendezvous(*dependencies.rendezvous),
        clock(*dependencies.clock),
        event_log(*dependencies.event_log),
        inherited(InheritedEnvironment()),
        core(CoreOptions(config)) {}

  absl::Status TakeSignals();
  void GiveSignalsBack();
  void OnSignalReadable();

  // Takes the event and all that follow from it through the core.
  void Post(AgentEvent event);
  void ArmDeadline();

  void Do(const JoinAction& action);
  void Do(const StartWorkersAction& action);
  void Do(const ReportFailureAction& action);
  void Do(const CompleteAction& action);
  void Do(const LeaveAction& action);
  void Do(const CancelRequestAction& action);
  void Do(const SignalWorkersAction& action);
  void Do(const KillStraysAction& action);
  void Do(const LogRestartAction& action);
  void Do(const FinishAction& action);

  absl::Status StartWorker(int local_rank);
  void OnWorkerExit(uint64_t generation, int local_rank, const ExitStatus& status);
  void LookForFirstSteps();
  bool LookForFirstStep(int local_rank, Worker& worker);
  int RankOf(int local_rank) const { return PlaceNode(*round).first_rank + local_rank; }

  const LaunchConfig config;
  EventLoop& loop;
  ProcessSpawner& spawner;
  Rendezvous& rendezvous;
  const Clock& clock;
  EventLog& event_log;
  const std::map<std::string, std::string> inherited;

  AgentCore core;
  std::deque<AgentEvent> events;
  bool stepping = false;
  bool finished = false;

  UniqueFd signal_fd;
  sigset_t handled_signals{};
  sigset_t earlier_mask{};

  absl::Time armed_deadline = absl::InfiniteFuture();
  EventLoop::TimerId deadline_timer = 0;

  // Of the current generation.
  std::optional<Round> round;
  std::map<int, Worker> workers;  // by local rank; those that run
  int64_t generation_started_ns = 0;
  EventLoop::TimerId first_step_timer = 0;
  absl::Duration first_step_poll;

  bool told_of_omp_num_threads = false;
  bool checked_master_port = false;
};

Agent::Agent(LaunchConfig config, Dependencies dependencies)
    : state_(std::make_unique<State>(std::move(config), dependencies)) {}

Agent::~Agent() = default;

JobResult Agent::Run() {
  State& state = *state_;
  JobResult broken;
  broken.exit_code = 1;
  if (absl::Status status = state.TakeSignals(); !status.ok()) {
    broken.reason = std::string(status.message());
    return broken;
  }
  state.rendezvous.WatchContact([](const absl::Status& status) {
    if (status.ok()) {
      PrintLine("ddprun: the rendezvous is in reach again");
    } else {
      PrintLine(absl::StrCat("ddprun: the rendezvous is out of reach, the workers go on: ",
                             std::string(status.message())));
    }
  });
  state.Post(StartEvent{});
  absl::Status loop_status;
  if (!state.finished) loop_status = state.loop.Run();
  state.rendezvous.WatchContact(nullptr);
  state.GiveSignalsBack();
  if (!loop_status.ok()) {
    broken.reason = std::string(loop_status.message());
    return broken;
  }
  return state.core.result();
}

absl::Status Agent::State::TakeSignals() {
  handled_signals = HandledSignalSet();
  pthread_sigmask(SIG_BLOCK, &handled_signals, &earlier_mask);
  signal_fd.reset(signalfd(-1, &handled_signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signal_fd.valid()) {
    return absl::InternalError(absl::StrCat("signalfd: ", strerror(errno)));
  }
  return loop.Watch(signal_fd.get(), EPOLLIN, [this](uint32_t) { OnSignalReadable(); });
}

void Agent::State::GiveSignalsBack() {
  loop.Unwatch(signal_fd.get());
  // What came too late to be forwarded must not hit us when it is unblocked.
  signalfd_siginfo info;
  while (read(signal_fd.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
  }
  signal_fd.reset();
  pthread_sigmask(SIG_SETMASK, &earlier_mask, nullptr);
}

void Agent::State::OnSignalReadable() {
  signalfd_siginfo info;
  while (!finished &&
         read(signal_fd.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
    Post(SignalEvent{static_cast<int>(info.ssi_signo)});
  }
}

void Agent::State::Post(AgentEvent event) {
  events.push_back(std::move(event));
  if (stepping) return;
  stepping = true;
  while (!events.empty()) {
    const AgentEvent next = std::move(events.front());
    events.pop_front();
    const AgentCore::Decision decision = core.Step(next, clock.Now());
    bool is_restart = false;
    for (const AgentAction& action : decision.actions) {
      is_restart |= std::holds_alternative<LogRestartAction>(action);
    }
    // The line of a restart is a contract with whoever reads our stderr.
    if (!decision.reason.empty()) PrintLine((is_restart ? "" : "ddprun: ") + decision.reason);
    for (const AgentAction& action : decision.actions) {
      std::visit([this](const auto& a) { Do(a); }, action);
    }
  }
  stepping = false;
  ArmDeadline();
}

void Agent::State::ArmDeadline() {
  if (core.next_deadline() == armed_deadline) return;
  armed_deadline = core.next_deadline();
  loop.CancelTimer(deadline_timer);
  if (armed_deadline == absl::InfiniteFuture()) return;
  deadline_timer = loop.AddTimer(armed_deadline - clock.Now(), [this] {
    armed_deadline = absl::InfiniteFuture();
    Post(TickEvent{});
  });
}

void Agent::State::Do(const JoinAction& action) {
  NodeOffer offer{.nproc = config.nproc_per_node,
                  .role = config.role,
                  .master_addr = config.master_addr,
                  .master_port = config.master_port};
  if (config.master_port == 0) {
    const absl::StatusOr<int> port = FindFreePort();
    if (!port.ok()) return Post(RoundEvent{port.status()});
    offer.master_port = *port;
  } else if (!std::exchange(checked_master_port, true)) {
    // Only before the first generation: in later ones its own connections may linger.
    const absl::Status status = CheckPortIsFree(config.master_port);
    if (!status.ok()) return Post(RoundEvent{status});
  }
  rendezvous.Join(offer, action.timeout, [this](absl::StatusOr<Round> joined) {
    if (joined.ok()) round = *joined;
    Post(RoundEvent{std::move(joined)});
  });
}

void Agent::State::Do(const StartWorkersAction&) {
  if (!told_of_omp_num_threads && SetsOmpNumThreads(config, inherited)) {
    told_of_omp_num_threads = true;
    PrintLine(absl::StrCat("ddprun: OMP_NUM_THREADS is not set: each of the ",
                           config.nproc_per_node,
                           " workers gets 1, so that they do not crowd each other out"));
  }
  workers.clear();
  generation_started_ns = MonotonicNanoseconds();
  WorkersStartedEvent event;
  std::vector<EventLog::Worker> started;
  for (int local_rank = 0; local_rank < config.nproc_per_node && event.status.ok(); ++local_rank) {
    event.status = StartWorker(local_rank);
    if (!event.status.ok()) break;
    event.started.push_back(local_rank);
    started.push_back({.rank = RankOf(local_rank), .pid = workers.at(local_rank).pid});
  }
  if (event.status.ok()) {
    event_log.GenerationStarted(round->generation.number, started);
    first_step_poll = kFirstStepPollMin;
    LookForFirstSteps();
  }
  Post(std::move(event));
}

absl::Status Agent::State::StartWorker(int local_rank) {
  absl::StatusOr<HealthPage> page = HealthPage::Create();
  if (!page.ok()) return page.status();
  const uint64_t generation = round->generation.number;
  page->BeginGeneration(generation);
  WorkerSpec spec;
  spec.local_rank = local_rank;
  spec.rank = RankOf(local_rank);
  spec.attempt = round->restarts;
  spec.role = config.role;
  for (const std::string& argument : config.command) {
    spec.argv.push_back(SubstituteLocalRank(argument, local_rank));
  }
  spec.environment = BuildWorkerEnvironment(config, *round, local_rank, page->fd(), inherited);
  spec.inherited_fds = {page->fd()};
  const absl::StatusOr<pid_t> pid =
      spawner.Spawn(spec, [this, generation, local_rank](pid_t, const ExitStatus& status) {
        OnWorkerExit(generation, local_rank, status);
      });
  if (!pid.ok()) return pid.status();
  workers.emplace(local_rank, Worker{.pid = *pid, .page = *std::move(page)});
  return absl::OkStatus();
}

void Agent::State::OnWorkerExit(uint64_t generation, int local_rank, const ExitStatus& status) {
  const auto found = workers.find(local_rank);
  if (generation != core.generation() || found == workers.end()) return;
  LookForFirstStep(local_rank, found->second);
  const pid_t pid = found->second.pid;
  workers.erase(found);
  event_log.WorkerExited(generation, {.rank = RankOf(local_rank), .pid = pid}, status);
  Post(WorkerExitedEvent{
      .local_rank = local_rank, .pid = pid, .status = status, .wall_time = absl::Now()});
}

void Agent::State::LookForFirstSteps() {
  first_step_timer = 0;
  if (!event_log.enabled()) return;
  bool all_seen = true;
  for (auto& [local_rank, worker] : workers) all_seen &= LookForFirstStep(local_rank, worker);
  if (all_seen) return;
  first_step_timer = loop.AddTimer(first_step_poll, [this] { LookForFirstSteps(); });
  first_step_poll = std::min(first_step_poll * 5 / 4, kFirstStepPollMax);
}

bool Agent::State::LookForFirstStep(int local_rank, Worker& worker) {
  if (worker.first_step_seen || !event_log.enabled()) return true;
  const HealthPage::Snapshot snapshot = worker.page.Read();
  if (!snapshot.has_step || snapshot.generation != round->generation.number) return false;
  worker.first_step_seen = true;
  // The page is the worker's to write: a stamp that cannot be true is no measurement.
  const int64_t stamp_ns = snapshot.first_commit_monotonic_ns;
  if (stamp_ns < generation_started_ns || stamp_ns > MonotonicNanoseconds()) return true;
  event_log.FirstStepDone(
      round->generation.number,
      {.rank = RankOf(local_rank), .step = snapshot.first_step, .monotonic_ns = stamp_ns});
  return true;
}

void Agent::State::Do(const ReportFailureAction& action) {
  rendezvous.ReportFailure(
      {.generation = round->generation, .rank = action.rank, .cause = action.cause}, action.timeout,
      [this](absl::StatusOr<FailureVerdict> verdict) { Post(VerdictEvent{std::move(verdict)}); });
}

void Agent::State::Do(const CompleteAction& action) {
  rendezvous.Complete(round->generation, action.timeout,
                      [this](absl::Status status) { Post(CompletedEvent{std::move(status)}); });
}

void Agent::State::Do(const LeaveAction& action) {
  rendezvous.Leave(action.timeout,
                   [this](absl::Status status) { Post(LeftEvent{std::move(status)}); });
}

void Agent::State::Do(const CancelRequestAction&) { rendezvous.Cancel(); }

void Agent::State::Do(const SignalWorkersAction& action) {
  for (int local_rank : action.local_ranks) {
    const auto found = workers.find(local_rank);
    if (found != workers.end()) spawner.Signal(found->second.pid, action.signal);
  }
}

void Agent::State::Do(const KillStraysAction&) {
  loop.CancelTimer(first_step_timer);
  spawner.KillStrays();
}

void Agent::State::Do(const LogRestartAction& action) {
  event_log.Restarted(
      round->generation.number,
      {.restart = action.restart, .max_restarts = config.max_restarts, .reason = action.reason});
}

void Agent::State::Do(const FinishAction& action) {
  event_log.JobFinished(core.generation(), action.exit_code);
  finished = true;
  loop.Stop();
}

}  // namespace ddp::elastic
