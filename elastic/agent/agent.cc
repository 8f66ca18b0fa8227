#include "elastic/agent/agent.h"

#include <errno.h>
#include <glog/logging.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/unique_fd.h"
#include "elastic/agent/agent_core.h"
#include "elastic/agent/agent_events.h"
#include "elastic/agent/say_line.h"
#include "elastic/agent/worker_group.h"
#include "elastic/agent/worker_store.h"

namespace ddp::elastic {
namespace {

bool IsIgnored(int signal) {
  struct sigaction action {};
  return sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

// Returns the signals to take over. A signal that is ignored from the start (nohup) is left out: a
// signalfd would deliver it nevertheless.
sigset_t SignalSet(const std::vector<int>& handled) {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : handled) {
    if (signal != SIGHUP || !IsIgnored(signal)) sigaddset(&signals, signal);
  }
  return signals;
}

}  // namespace

struct Agent::State {
  State(LaunchConfig launch_config, const Dependencies& dependencies)
      : config(std::move(launch_config)),
        loop(*dependencies.event_loop),
        rendezvous(*dependencies.rendezvous),
        clock(*dependencies.clock),
        event_log(*dependencies.event_log),
        status(*dependencies.status),
        say(dependencies.say ? dependencies.say
                             : [](const std::string& line) { SayOwnLine(line); }),
        keeper_fd(dependencies.keeper_fd),
        on_silent(dependencies.on_silent),
        say_as_it_is(dependencies.say_as_it_is ? dependencies.say_as_it_is
                                               : [](const std::string& line) { SayLine(line); }),
        worker_store(config, &loop, dependencies.worker_store),
        workers(config,
                {.event_loop = &loop,
                 .spawner = dependencies.spawner,
                 .clock = &clock,
                 .event_log = &event_log,
                 .status = &status,
                 .say = say,
                 .files = dependencies.files,
                 .oom_kills = dependencies.oom_kills},
                [this](AgentEvent event) {
                  LookForKeeper();
                  Post(std::move(event));
                }),
        core(config.job, config.host) {}

  absl::Status TakeSignals();
  void GiveSignalsBack();
  void OnSignalReadable();
  void LookForKeeper();
  bool IsNews(int signal, bool is_forwarded);

  // Passes the event, and all events that it causes, to the core.
  void Post(AgentEvent event);
  void ArmDeadline();
  void OnNews(const News& news);
  void OnRound(const Round& joined);
  void Report();

  void Do(const RequestAction& action);
  void Do(const CancelRequestAction&) { rendezvous.Cancel(); }
  void Do(const StartWorkersAction&) { workers.Start(round); }
  void Do(const SignalWorkersAction& a) { workers.Signal(a.signal, a.local_ranks); }
  void Do(const StopWorkersAction& action) { workers.Stop(action); }
  void Do(const KillStraysAction&) { workers.KillStrays(); }
  void Do(const LogRestartAction& action);
  void Do(const FallSilentAction&) {
    if (on_silent) on_silent();
  }
  void Do(const FinishAction& action);

  const LaunchConfig config;
  EventLoop& loop;
  Rendezvous& rendezvous;
  const Clock& clock;
  EventLog& event_log;
  NodeStatusTracker& status;
  const std::function<void(const std::string&)> say;
  const int keeper_fd;
  const std::function<void()> on_silent;
  const std::function<void(const std::string&)> say_as_it_is;

  WorkerStore worker_store;
  WorkerGroup workers;
  AgentCore core;
  Round round;  // the last round

  std::deque<AgentEvent> events;
  bool stepping = false;
  bool finished = false;
  bool keeper_is_gone = false;

  struct Received {
    int forwarded = 0;
    int direct = 0;
  };
  std::map<int, Received> received_signals;
  absl::Time signalled_at = absl::InfiniteFuture();
  UniqueFd signal_fd;
  sigset_t handled_signals{};
  bool holds_workers = false;  // on SIGTSTP, until SIGCONT
  sigset_t earlier_mask{};

  absl::Time armed_deadline = absl::InfiniteFuture();
  EventLoop::TimerId deadline_timer = 0;
  absl::Time store_lost_at = absl::InfiniteFuture();
  int64_t reported_step = -1;
};

Agent::Agent(LaunchConfig config, Dependencies dependencies)
    : state_(std::make_unique<State>(std::move(config), dependencies)) {}

Agent::~Agent() = default;

JobResult Agent::Run() {
  State& state = *state_;
  JobResult broken;
  broken.end = JobEndReason::kCannotStart;
  broken.exit_code = 1;
  absl::Status ready = state.workers.ServeTimers();
  if (ready.ok()) ready = state.TakeSignals();
  if (!ready.ok()) {
    broken.reason = std::string(ready.message());
    return broken;
  }
  state.rendezvous.Watch([&state](const News& news) { state.OnNews(news); });
  state.workers.AfterLook([&state] { state.Report(); });
  if (state.keeper_fd >= 0) {
    ready =
        state.loop.Watch(state.keeper_fd, EPOLLIN, [&state](uint32_t) { state.LookForKeeper(); });
    if (!ready.ok()) LOG(WARNING) << ready;
  }
  state.Post(StartEvent{});
  absl::Status loop_status;
  if (!state.finished) loop_status = state.loop.Run();
  state.rendezvous.Watch(nullptr);
  if (state.keeper_fd >= 0 && !state.keeper_is_gone) state.loop.Unwatch(state.keeper_fd);
  state.GiveSignalsBack();
  if (!loop_status.ok()) {
    broken.reason = std::string(loop_status.message());
    return broken;
  }
  return state.core.result();
}

absl::Time Agent::signalled_at() const { return state_->signalled_at; }

absl::Status Agent::State::TakeSignals() {
  handled_signals = SignalSet(config.signals_to_handle);
  holds_workers = sigismember(&handled_signals, SIGTSTP) == 0 &&
                  sigismember(&handled_signals, SIGCONT) == 0 && !IsIgnored(SIGTSTP);
  if (holds_workers) {
    sigaddset(&handled_signals, SIGTSTP);
    sigaddset(&handled_signals, SIGCONT);
  }
  pthread_sigmask(SIG_BLOCK, &handled_signals, &earlier_mask);
  signal_fd.reset(signalfd(-1, &handled_signals, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!signal_fd.valid()) {
    const std::string why = strerror(errno);
    pthread_sigmask(SIG_SETMASK, &earlier_mask, nullptr);
    return absl::InternalError(absl::StrCat("signalfd: ", why));
  }
  return loop.Watch(signal_fd.get(), EPOLLIN, [this](uint32_t) { OnSignalReadable(); });
}

void Agent::State::GiveSignalsBack() {
  loop.Unwatch(signal_fd.get());
  // A pending signal that came too late to be forwarded must not hit this process when unblocked.
  // Signals that the caller had blocked stay pending for the caller.
  sigset_t unblocked = handled_signals;
  for (const int signal : config.signals_to_handle) {
    if (sigismember(&earlier_mask, signal) == 1) sigdelset(&unblocked, signal);
  }
  if (signalfd(signal_fd.get(), &unblocked, SFD_CLOEXEC | SFD_NONBLOCK) >= 0) {
    signalfd_siginfo info;
    while (read(signal_fd.get(), &info, sizeof(info)) == static_cast<ssize_t>(sizeof(info))) {
    }
  }
  signal_fd.reset();
  pthread_sigmask(SIG_SETMASK, &earlier_mask, nullptr);
}

void Agent::State::OnSignalReadable() {
  std::array<signalfd_siginfo, 16> infos;
  ssize_t bytes = 0;
  while (!finished && (bytes = read(signal_fd.get(), infos.data(), sizeof(infos))) > 0) {
    const auto end = infos.begin() + bytes / static_cast<ssize_t>(sizeof(infos[0]));
    // The kernel hands out the lowest number first. Of a stop and a hangup that come together, the
    // stop is meant: workers save on it.
    std::stable_partition(infos.begin(), end,
                          [](const auto& info) { return info.ssi_signo != SIGHUP; });
    for (auto info = infos.begin(); info != end && !finished; ++info) {
      const int signal = static_cast<int>(info->ssi_signo);
      if (holds_workers && (signal == SIGTSTP || signal == SIGCONT)) {
        event_log.SignalReceived(core.generation(), signal);
        signal == SIGTSTP ? workers.Hold() : workers.Continue();
        continue;
      }
      if (!IsNews(signal, static_cast<pid_t>(info->ssi_pid) == getppid())) continue;
      event_log.SignalReceived(core.generation(), signal);
      Post(SignalEvent{signal});
    }
  }
}

// Returns true when the signal is not a duplicate. Schedulers and service managers signal every
// process of a job, so the same signal may come twice: from them, and forwarded by the parent
// process. Both count as one signal; else the second would kill the workers.
bool Agent::State::IsNews(int signal, bool is_forwarded) {
  signalled_at = std::min(signalled_at, clock.Now());
  Received& received = received_signals[signal];
  const int before = std::max(received.forwarded, received.direct);
  ++(is_forwarded ? received.forwarded : received.direct);
  return std::max(received.forwarded, received.direct) > before;
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
      const auto* restart = std::get_if<LogRestartAction>(&action);
      is_restart |= restart != nullptr && restart->charged;
    }
    // The line of a restart is a contract with programs that read stderr.
    if (!decision.reason.empty()) (is_restart ? say_as_it_is : say)(decision.reason);
    for (const AgentAction& action : decision.actions) {
      std::visit([this](const auto& a) { Do(a); }, action);
    }
  }
  stepping = false;
  status.SetState(core.state_name());
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

void Agent::State::OnNews(const News& news) {
  const uint64_t generation = core.generation();
  switch (news.kind) {
    case News::Kind::kGenerationOver:
      event_log.GenerationOver(news.generation.number, news.cause);
      break;
    case News::Kind::kDrain:
      event_log.Drains(news.generation.number,
                       {.reason = news.cause, .stop_at_step = news.stop_at_step});
      break;
    case News::Kind::kEvicted:
      event_log.Evicted(generation, news.cause);
      break;
    case News::Kind::kOutOfReach:
      store_lost_at = clock.Now();
      status.StoreOutOfReach();
      event_log.StoreOutOfReach(generation, news.cause);
      break;
    case News::Kind::kBackInReach:
      status.StoreBack();
      event_log.StoreBack(generation, std::max(absl::ZeroDuration(), clock.Now() - store_lost_at));
      break;
    case News::Kind::kJobEnded:
    case News::Kind::kStoreWarning:
    case News::Kind::kWaiting:
      break;
  }
  Post(NewsEvent{news});
}

// Updates the content of the next heartbeat.
void Agent::State::Report() {
  workers.SetMedianBusy(rendezvous.median_busy_us());
  workers.SetAtWork(rendezvous.at_work());
  const NodeReport report = workers.Report();
  rendezvous.SetReport(report);
  if (std::exchange(reported_step, report.step) != report.step && report.step >= 0) {
    Post(StepEvent{workers.longest_step()});
  }
  if (workers.TakeProgress()) Post(ProgressEvent{});
}

// Adds to a request what AgentCore does not know.
void Agent::State::Do(const RequestAction& action) {
  RendezvousRequest request = action.request;
  if (auto* const join = std::get_if<JoinRequest>(&request)) {
    const absl::StatusOr<int> port = worker_store.Prepare();
    if (!port.ok()) return Post(AnsweredEvent{request, port.status()});
    event_log.Joining(core.generation(), {.nodes_min = config.job.limits.min_nodes,
                                          .nodes_max = config.job.limits.max_nodes,
                                          .nproc = config.nproc_per_node});
    join->offer = {.nproc = config.nproc_per_node,
                   .role = config.job.role,
                   .host = config.host,
                   .master_addr = config.master_addr,
                   .master_port = *port,
                   .node_rank = config.node_rank};
  } else if (auto* const failure = std::get_if<FailureRequest>(&request)) {
    failure->step = status.highest_step();
    failure->progress_known = workers.progress_known();
  } else if (std::holds_alternative<DrainRequest>(request)) {
    Report();  // the common step depends on this node's step
  }
  rendezvous.Ask(request, action.timeout, [this, request](const RendezvousAnswer& answer) {
    if (answer.ok() && std::holds_alternative<Round>(*answer)) OnRound(std::get<Round>(*answer));
    Post(AnsweredEvent{request, answer});
  });
}

void Agent::State::OnRound(const Round& joined) {
  round = joined;
  const NodePlacement& place = round.placement;
  worker_store.Serve(/*serves=*/place.group_rank == 0);
  status.BeginGeneration({.number = round.generation.number,
                          .nonce = round.generation.nonce,
                          .reason = round.reason,
                          .restarts = round.restarts,
                          .group_rank = place.group_rank,
                          .nodes = place.group_world_size,
                          .world_size = place.world_size});
  if (!round.run_id.empty()) event_log.SetRunId(round.run_id);
  event_log.Joined(round.generation.number, {.nonce = round.generation.nonce,
                                             .group_rank = place.group_rank,
                                             .nodes = place.group_world_size,
                                             .world_size = place.world_size,
                                             .first_rank = place.first_rank,
                                             .nproc = place.local_world_size,
                                             .restarts = round.restarts});
}

// Called before each end of a worker too: if both ends are seen in one look, the keeper's counts
// first.
void Agent::State::LookForKeeper() {
  pollfd keeper = {.fd = keeper_fd, .events = POLLIN, .revents = 0};
  if (keeper_is_gone || keeper_fd < 0 || poll(&keeper, 1, 0) != 1) return;
  keeper_is_gone = true;
  loop.Unwatch(keeper_fd);
  Post(KeeperGoneEvent{});
}

void Agent::State::Do(const LogRestartAction& action) {
  if (!action.charged) return;  // GenerationOver or Drains has logged the reason
  event_log.Restarted(round.generation.number, {.restart = action.restart,
                                                .max_restarts = config.job.limits.max_restarts,
                                                .reason = action.reason});
}

void Agent::State::Do(const FinishAction& action) {
  event_log.JobFinished(core.generation(), action.exit_code, core.result().reason);
  finished = true;
  loop.Stop();
}

}  // namespace ddp::elastic
