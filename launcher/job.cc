#include "launcher/job.h"

#include <limits.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/duration_text.h"
#include "base/event_loop.h"
#include "base/file_writer.h"
#include "base/process/oom_kills.h"
#include "base/status_macros.h"
#include "base/task_thread.h"
#include "base/unique_fd.h"
#include "elastic/agent/agent.h"
#include "elastic/agent/event_log.h"
#include "elastic/agent/node_status_tracker.h"
#include "elastic/agent/say_line.h"
#include "elastic/error_file/error_record.h"
#include "elastic/job/job_spec.h"
#include "elastic/rendezvous/redis_rendezvous.h"
#include "launcher/flags/exit_code.h"
#include "launcher/flags/rendezvous_choice.h"
#include "launcher/meeting/meeting_place.h"
#include "launcher/meeting/server_shutdown.h"
#include "launcher/output/failure_report.h"
#include "launcher/output/log_layout.h"
#include "launcher/output/log_router.h"
#include "launcher/output/patience.h"
#include "launcher/output/root_cause_file.h"
#include "launcher/output/say.h"
#include "launcher/process/cpu_topology.h"
#include "launcher/process/numa_plan.h"
#include "launcher/process/open_files.h"
#include "launcher/process/posix_process_spawner.h"
#include "launcher/process/private_folder.h"
#include "launcher/watch/job_marker.h"
#include "launcher/watch/metrics_server.h"
#include "nlohmann/json.hpp"
#include "store/redis/redis_endpoint.h"
#include "store/redis/redis_errors.h"
#include "xxhash.h"

namespace ddp::launcher {
namespace {

// Time for which the server is awaited without a message to the user.
constexpr absl::Duration kQuietConnect = absl::Seconds(5);
constexpr absl::Duration kShortestReach = absl::Seconds(1);

std::string HostName() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  if (::gethostname(name.data(), name.size()) != 0) return "unknown";
  return name.data();
}

// Parts of one job. Destroyed from the last member to the first: the workers before the servers
// that they use.
struct Parts {
  MonotonicClock clock;
  rlimit open_files{};  // limits that the user gave us
  std::string host;     // this node's name
  LogLayout layout;
  std::unique_ptr<EventLoop> event_loop;
  std::unique_ptr<FileWriter> event_writer;
  elastic::EventLog event_log;
  MeetingPlace place;
  std::unique_ptr<TaskThread> files;
  std::unique_ptr<FileWriter> log_writer;
  std::unique_ptr<LogRouter> router;
  std::unique_ptr<PosixProcessSpawner> spawner;
  std::unique_ptr<elastic::RedisRendezvous> rendezvous;
  std::optional<const elastic::LaunchConfig> config;  // made when the rendezvous is open
  std::unique_ptr<elastic::NodeStatusTracker> status;
  std::unique_ptr<MetricsServer> metrics;
  OomKills oom_kills;
};

// Returns the agent's configuration. `limits`: the job's.
elastic::LaunchConfig MakeConfig(const JobInput& input, const std::string& host,
                                 const MeetingPlace& place, const elastic::JobLimits& limits) {
  const LaunchOptions& options = input.options;
  // MASTER_ADDR and MASTER_PORT of a static rendezvous are node 0's. If another node holds rank 0
  // later, it uses its own.
  const bool is_static = options.rendezvous.kind == RendezvousKind::kStatic;
  const bool has_own_address = options.master_addr.empty() || (is_static && options.node_rank > 0);
  // Without an interface, Gloo looks up this host's name and listens on the resulting address.
  const bool needs_interface = options.job.limits.max_nodes > 1 && !place.own.is_loopback;
  elastic::LaunchConfig config = {
      .job = options.job,
      .nproc_per_node = options.nproc_per_node,
      .host = host,
      .node_rank = options.node_rank,
      .command = input.command,
      .entrypoint = input.entrypoint,
      .master_addr = has_own_address ? place.own.address : options.master_addr,
      .master_port = is_static ? 0 : options.master_port,
      .socket_interface = needs_interface ? place.own.interface : "",
      .virtual_local_rank = options.virtual_local_rank,
      .timer_file = input.timer_file,
      .signals_to_handle = options.signals_to_handle};
  config.job.limits = limits;
  return config;
}

absl::Status OpenLogs(const JobInput& input, Parts& parts) {
  elastic::EventLog::Options options;
  options.path = input.options.event_log_file;
  options.console = input.options.events_to_console;
  options.run_id = input.options.job.run_id;
  options.host = parts.host;
  options.role = input.options.job.role;
  options.say = [&parts](const std::string& line) {
    parts.router != nullptr ? parts.router->Say(line) : Say(line);
  };
  options.write_to_console = [&parts](const std::string& line) {
    parts.router != nullptr ? parts.router->SayAsItIs(line) : elastic::SayLine(line);
  };
  DDP_ASSIGN_OR_RETURN(parts.event_writer,
                       FileWriter::Create(parts.event_loop.get(), "event-writer"));
  options.writer = parts.event_writer.get();
  DDP_ASSIGN_OR_RETURN(parts.event_log, elastic::EventLog::Open(options));
  DDP_ASSIGN_OR_RETURN(parts.layout,
                       LogLayout::Create(input.options.output.log_dir, input.options.job.run_id));
  return absl::OkStatus();
}

// Returns the CPUs of each worker; empty without --numa-binding, or when this host's topology
// cannot be read.
absl::StatusOr<std::vector<std::vector<int>>> CpusOfWorkers(const JobInput& input) {
  if (input.options.numa_binding == NumaBinding::kNone) return std::vector<std::vector<int>>();
  const absl::StatusOr<CpuTopology> topology = ReadCpuTopologyOfThisHost();
  if (topology.ok()) {
    return PlanNuma(*topology, input.options.numa_binding, input.options.nproc_per_node);
  }
  Say(
      absl::StrCat("--numa-binding: the workers may use all CPUs, since this host does not tell how"
                   " they lie: ",
                   std::string(topology.status().message())));
  return std::vector<std::vector<int>>();
}

absl::Status MakeSpawner(const JobInput& input, const AgentContext& context, Parts& parts) {
  DDP_ASSIGN_OR_RETURN(parts.log_writer, FileWriter::Create(parts.event_loop.get(), "log-writer"));
  parts.router = std::make_unique<LogRouter>(parts.event_loop.get(), STDOUT_FILENO, STDERR_FILENO,
                                             parts.log_writer.get());
  PosixProcessSpawner::Options options;
  options.output = input.options.output;
  options.layout = parts.layout;
  options.host = parts.host;
  options.open_files = parts.open_files;
  options.doomed = context.doomed;
  options.kill_timeout = input.options.job.times.kill_timeout;
  DDP_ASSIGN_OR_RETURN(parts.files, TaskThread::Create(parts.event_loop.get(), "worker-files"));
  options.files = parts.files.get();
  DDP_ASSIGN_OR_RETURN(options.cpus, CpusOfWorkers(input));
  DDP_ASSIGN_OR_RETURN(
      parts.spawner,
      PosixProcessSpawner::Create(parts.event_loop.get(), parts.router.get(), std::move(options)));
  if (parts.place.server == nullptr) return absl::OkStatus();
  PosixProcessSpawner* const spare = parts.spawner.get();
  spare->Spare(parts.place.server->pid());
  const auto on_launched = [spare, last = parts.place.server->pid()](pid_t pid) mutable {
    spare->SpareNoMore(std::exchange(last, pid));
    spare->Spare(pid);
  };
  return parts.place.server->Watch(
      parts.event_loop.get(),
      {.on_replaced = [](pid_t) {},
       .on_launched = on_launched,
       .say = [router = parts.router.get()](const std::string& line) { router->Say(line); },
       .doomed = context.doomed});
}

// Waits a third of a lease for surviving nodes of the job. A server that this node has just started
// may be the second one of a job whose other nodes live on. They call within a sixth of a lease and
// present the job's generation. They must come before this node, which would treat the empty server
// as a new job's.
void AwaitSurvivors(const JobInput& input, Parts& parts) {
  const bool may_be = parts.place.server != nullptr && input.options.job.limits.max_nodes > 1 &&
                      input.options.rendezvous.kind == RendezvousKind::kRedis;
  if (!may_be) return;
  EventLoop* const loop = parts.event_loop.get();
  loop->AddTimer(input.options.job.rules.lease / 3, [loop] { loop->Stop(); });
  if (const absl::Status status = loop->Run(); !status.ok()) SayError(status);
}

// Tells the user where the job's limits are not those that this node was given. The job's count:
// workers and messages must show the same limits on every node.
void SayOtherLimits(const elastic::JobLimits& limits, const elastic::JobLimits& wanted) {
  if (limits == wanted) return;
  const auto flags = [](const elastic::JobLimits& of) {
    return absl::StrCat("--nnodes=", of.min_nodes, ":", of.max_nodes,
                        " --max-restarts=", of.max_restarts);
  };
  Say(absl::StrCat("the job was opened with ", flags(limits), ", which counts for all nodes; here ",
                   flags(wanted), " was given"));
}

// Opens the rendezvous. The node that has the server may start later than this one, so the function
// waits for at most `total`, and tells the user after kQuietConnect. kUnavailable: the server was
// away for `total`.
absl::StatusOr<std::unique_ptr<elastic::RedisRendezvous>> ReachRendezvous(
    elastic::RedisRendezvous::Options options, absl::Duration total, EventLoop* loop) {
  options.connect_timeout = std::min(total, kQuietConnect);
  auto rendezvous = elastic::RedisRendezvous::Open(options, loop);
  if (store::IsTransient(rendezvous.status()) && total > kQuietConnect) {
    Say(absl::StrCat("waiting for the rendezvous, at most ", DurationText(total), ": ",
                     std::string(rendezvous.status().message())));
    options.connect_timeout = total - kQuietConnect;
    rendezvous = elastic::RedisRendezvous::Open(options, loop);
  }
  if (!store::IsTransient(rendezvous.status())) return rendezvous;
  return absl::UnavailableError(rendezvous.status().message());
}

// Returns the time left until `deadline` for reaching the server, after the wait for its name. If
// the name came late, it is at least kShortestReach (or `read_timeout`, if that is shorter).
absl::Duration TimeToReach(const RendezvousOptions& wanted, absl::Time deadline, absl::Time now) {
  return std::max(deadline - now, std::min(wanted.read_timeout, kShortestReach));
}

absl::Status OpenRendezvous(const JobInput& input, absl::Time deadline, Parts& parts) {
  const RendezvousOptions& wanted = input.options.rendezvous;
  elastic::RedisRendezvous::Options options;
  options.job = input.options.job;
  options.endpoint = parts.place.endpoint;
  options.reply_timeout = wanted.heartbeat_timeout;
  options.retry_pause_max = wanted.retry_pause_max;
  const absl::Duration left = TimeToReach(wanted, deadline, parts.clock.Now());
  DDP_ASSIGN_OR_RETURN(parts.rendezvous, ReachRendezvous(options, left, parts.event_loop.get()));
  SayOtherLimits(parts.rendezvous->limits(), input.options.job.limits);
  parts.config.emplace(MakeConfig(input, parts.host, parts.place, parts.rendezvous->limits()));
  return absl::OkStatus();
}

// Makes what people and programs can read while the job runs: status, marker, metrics.
absl::Status MakeVisible(const JobInput& input, Parts& parts) {
  parts.status = std::make_unique<elastic::NodeStatusTracker>(
      elastic::NodeStatusTracker::Identity{.job = parts.config->job,
                                           .instance = parts.rendezvous->instance(),
                                           .host = parts.host,
                                           .agent_pid = ::getpid()});

  store::RedisEndpoint place = parts.place.endpoint;
  const std::string password = std::exchange(place.password, "");
  place.user.clear();
  DDP_RETURN_IF_ERROR(WriteJobMarker(input.runtime_folder,
                                     {.run_id = parts.config->job.run_id,
                                      .instance = parts.rendezvous->instance(),
                                      .endpoint = store::FormatRedisEndpoint(place),
                                      .with_credentials = !password.empty(),
                                      .password = parts.place.has_random_password ? password : "",
                                      .agent_pid = ::getpid()}));
  if (!input.options.metrics_port.has_value()) return absl::OkStatus();
  DDP_ASSIGN_OR_RETURN(
      parts.metrics,
      MetricsServer::Listen(parts.event_loop.get(), {.port = *input.options.metrics_port},
                            [&parts] { return parts.status->Status(parts.clock.Now()); }));
  if (*input.options.metrics_port == 0) {
    Say(absl::StrCat("metrics are served on port ", parts.metrics->port()));
  }
  return absl::OkStatus();
}

// Steps that can fail through a user's mistake come first, those that take time last.
absl::Status Prepare(const JobInput& input, const AgentContext& context, Parts& parts) {
  parts.open_files = RaiseOpenFiles();  // before the servers, which inherit the limit
  parts.host = HostName();
  DDP_ASSIGN_OR_RETURN(parts.event_loop, EventLoop::Create());
  DDP_RETURN_IF_ERROR(OpenLogs(input, parts));
  const absl::Time reached_by = parts.clock.Now() + input.options.rendezvous.read_timeout;
  DDP_ASSIGN_OR_RETURN(parts.place, FindMeetingPlace(input.options, input.endpoint,
                                                     input.runtime_folder, parts.event_loop.get()));
  DDP_RETURN_IF_ERROR(MakeSpawner(input, context, parts));
  AwaitSurvivors(input, parts);
  DDP_RETURN_IF_ERROR(OpenRendezvous(input, reached_by, parts));
  return MakeVisible(input, parts);
}

// Writes the error file for a parent that started this ddprun as ddprun starts workers.
void LeaveRootCause(const elastic::JobResult& result, LogRouter& router) {
  const char* path = std::getenv(elastic::kErrorFileVariable);
  if (path == nullptr || *path == '\0') return;
  const bool is_here = result.cause_elsewhere.empty();
  const absl::Status written = is_here ? WriteRootCauseFile(path, result.failures.front())
                                       : WriteRootCauseFile(path, DescribeCauseElsewhere(result),
                                                            result.root_exit_code, absl::Now());
  if (!written.ok()) router.Say(std::string(written.message()));
}

void Report(const JobInput& input, const elastic::JobResult& result, LogRouter& router) {
  if (!result.reason.empty()) router.Say(result.reason);
  if (result.failures.empty() && result.cause_elsewhere.empty()) return;
  const ReportContext context = {.host = HostName()};
  std::vector<ReportedFailure> described;
  for (const elastic::WorkerFailure& failure : result.failures) {
    described.push_back(DescribeFailure(failure, context));
  }
  std::string report =
      FormatFailureReport(input.entrypoint, described, DescribeCauseElsewhere(result));
  report.pop_back();  // trailing newline
  router.SayAtTheEnd(report);
  LeaveRootCause(result, router);
}

bool Exists(const std::string& path) { return !path.empty() && ::access(path.c_str(), F_OK) == 0; }

// Removes log folders that are of no more use. A temporary folder is kept when the user may want
// its files: redirected output, and error files that the report names. `say` gets lines for the
// user.
void CleanUpLogs(const JobInput& input, const LogLayout& layout, const elastic::JobResult& result,
                 const std::function<void(const std::string&)>& say) {
  // The folder is empty, and removed, when no worker was started. A cleaner of /tmp may have
  // removed it before.
  if (!layout.root().empty() && (::rmdir(layout.root().c_str()) == 0 || errno == ENOENT)) {
    if (!input.temporary_log_folder.empty()) ::rmdir(input.temporary_log_folder.c_str());
    return;
  }
  if (input.temporary_log_folder.empty()) return;
  const OutputOptions& output = input.options.output;
  if (!output.redirects.empty() || !output.tee.empty()) {
    say(absl::StrCat("the workers' output is in ", layout.root(),
                     " (--log-dir chooses the place)"));
    return;
  }
  const bool has_error_file =
      std::any_of(result.failures.begin(), result.failures.end(),
                  [](const elastic::WorkerFailure& failure) { return Exists(failure.error_file); });
  if (has_error_file) return;
  if (const absl::Status removed = RemoveFolder(input.temporary_log_folder); !removed.ok()) {
    say(std::string(removed.message()));
  }
}

// Waits for the other nodes, since the server that they need ends with this process.
void LeaveOthersWithoutServer(const Parts& parts, absl::Time signalled_at, int hurry_fd) {
  if (parts.place.server == nullptr || parts.config->job.limits.max_nodes == 1) return;
  ServerShutdownOptions options;
  options.endpoint = parts.place.endpoint;
  options.job = parts.config->job;
  options.instance = parts.rendezvous->instance();
  options.own_generation = parts.status->Status(parts.clock.Now()).generation;
  options.host = parts.host;
  options.end_by = ServerShutdownDeadline(signalled_at, options.job.times);
  options.hurry_fd = hurry_fd;
  AwaitOthers(options, parts.event_loop.get(), parts.rendezvous.get(), parts.clock);
}

elastic::JobResult CannotStart(const absl::Status& status) {
  elastic::JobResult result;
  result.end = absl::IsUnavailable(status)        ? elastic::JobEndReason::kStoreLost
               : absl::IsDeadlineExceeded(status) ? elastic::JobEndReason::kRendezvousTimeout
                                                  : elastic::JobEndReason::kCannotStart;
  result.exit_code = 1;
  return result;
}

void FlushEvents(const Patience& patience, Parts& parts) {
  FileWriter& writer = *parts.event_writer;
  PatientPoll poll(patience);
  while (writer.pending() > 0 && poll.Wait(writer.fd(), POLLIN)) writer.Dispatch();
  if (writer.pending() == 0) return;
  parts.router->Say(
      absl::StrCat("the event log takes nothing: ", writer.pending(), " bytes of it are lost"));
}

// Tells the watcher that the last message to the other nodes is sent: the process may be killed.
void SayLastWord(const AgentContext& context) {
  const uint64_t one = 1;
  (void)!::write(context.said_fd, &one, sizeof(one));
}

int Run(const JobInput& input, const AgentContext& context) {
  Parts parts;
  // Nothing runs yet that needs an orderly end, and reaching Redis can take long.
  ReleaseSignals(input.options.signals_to_handle);
  if (const absl::Status prepared = Prepare(input, context, parts); !prepared.ok()) {
    const auto say = [](const std::string& line) { Say(line, kConsoleStallTimeout); };
    say(std::string(prepared.message()));
    CleanUpLogs(input, parts.layout, {}, say);
    return ExitCodeOf(CannotStart(prepared), input.options.exit_code);
  }
  HoldSignals(input.options.signals_to_handle);
  elastic::Agent agent(
      *parts.config,
      {.event_loop = parts.event_loop.get(),
       .spawner = parts.spawner.get(),
       .rendezvous = parts.rendezvous.get(),
       .clock = &parts.clock,
       .event_log = &parts.event_log,
       .status = parts.status.get(),
       .say = [&parts](const std::string& line) { parts.router->Say(line); },
       .say_as_it_is = [&parts](const std::string& line) { parts.router->SayAsItIs(line); },
       .files = parts.files.get(),
       .oom_kills = &parts.oom_kills,
       .keeper_fd = context.keeper_fd,
       .on_silent = [&context] { SayLastWord(context); },
       .worker_store = parts.place.worker_store.get()});
  const auto route_log = [&input](std::function<void(const std::string&)> say) {
    if (input.log_lines != nullptr) input.log_lines->Route(std::move(say));
  };
  route_log([&parts](const std::string& line) { parts.router->Say(line); });
  if (context.has_last_word != nullptr) context.has_last_word->store(true);
  const elastic::JobResult result = agent.Run();
  if (context.has_last_word != nullptr) context.has_last_word->store(false);
  // Signals from now on no longer change the result, but shorten the waits that follow.
  const UniqueFd hurry = WatchHeldSignals(input.options.signals_to_handle);
  parts.spawner->AwaitStrays();
  LeaveOthersWithoutServer(parts, agent.signalled_at(), hurry.get());
  Report(input, result, *parts.router);
  const Patience patience = {.stall_timeout = agent.signalled_at() < absl::InfiniteFuture()
                                                  ? kConsoleStallTimeoutAfterSignal
                                                  : kConsoleStallTimeout,
                             .hurry_fd = hurry.get(),
                             .hurried_timeout = kConsoleStallTimeoutAfterSignal};
  FlushEvents(patience, parts);
  CleanUpLogs(input, parts.layout, result, [&parts](const std::string& line) {
    parts.router->SayAtTheEnd(absl::StrCat("ddprun: ", line));
  });
  parts.router->Flush(patience);
  route_log(nullptr);
  return ExitCodeOf(result, input.options.exit_code);
}

}  // namespace

std::string JobFingerprint(const elastic::JobSpec& job, const std::vector<std::string>& program) {
  const nlohmann::json content = {job.limits.min_nodes, job.limits.max_nodes, job.role, program};
  const std::string text = content.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
}

std::string ProgramText(const std::vector<std::string>& program) {
  constexpr size_t kShownBytes = 200;
  const std::string text = absl::StrJoin(program, std::string(1, '\0'));
  return absl::StrFormat("%016x %s", XXH3_64bits(text.data(), text.size()),
                         absl::StrJoin(program, " ").substr(0, kShownBytes));
}

int RunJob(const JobInput& input, const AgentContext& context) {
  const int code = Run(input, context);
  if (const absl::Status removed = RemoveFolder(input.runtime_folder); !removed.ok()) {
    SayError(removed, kConsoleStallTimeout);
  }
  return code;
}

}  // namespace ddp::launcher
