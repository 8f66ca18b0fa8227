#include "launcher/job.h"

#include <limits.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "elastic/agent/agent.h"
#include "elastic/agent/event_log.h"
#include "base/event_loop.h"
#include "elastic/rendezvous/redis_rendezvous.h"
#include "launcher/failure_report.h"
#include "launcher/log_layout.h"
#include "launcher/log_router.h"
#include "launcher/posix_process_spawner.h"
#include "launcher/private_folder.h"
#include "launcher/server_guard.h"
#include "store/redis_endpoint.h"

namespace ddp::launcher {
namespace {

// How long the end of a job waits for a console that takes nothing.
constexpr absl::Duration kConsoleStallTimeout = absl::Seconds(60);

void Say(const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); }

void SayError(const absl::Status& status) {
  Say(absl::StrCat("ddprun: ", std::string(status.message())));
}

std::string HostName() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

// What one job is made of. Destroyed from the last member to the first: the workers before the
// server that they talk to.
struct Parts {
  LogLayout layout;
  elastic::EventLog event_log;
  std::unique_ptr<EventLoop> event_loop;
  std::unique_ptr<ServerGuard> server;  // none: the user has one
  std::unique_ptr<LogRouter> router;
  std::unique_ptr<PosixProcessSpawner> spawner;
  std::unique_ptr<elastic::RedisRendezvous> rendezvous;
  MonotonicClock clock;
};

absl::StatusOr<store::RedisEndpoint> Endpoint(const JobSpec& spec, Parts& parts) {
  if (spec.endpoint.has_value()) return *spec.endpoint;
  DDP_ASSIGN_OR_RETURN(parts.server, ServerGuard::Start(spec.runtime_folder));
  // The workers find these and would offer them to a server that wants none.
  for (const char* name : {"DDP_REDIS_USER", "DDP_REDIS_PASSWORD", "DDP_REDIS_PASSWORD_FILE"}) {
    ::unsetenv(name);
  }
  return parts.server->endpoint();
}

// What can fail for the user's sake comes first, what costs time last.
absl::Status Prepare(const JobSpec& spec, const AgentContext& context, Parts& parts) {
  DDP_ASSIGN_OR_RETURN(parts.event_log,
                       elastic::EventLog::Open(spec.config.event_log_file, spec.config.run_id));
  DDP_ASSIGN_OR_RETURN(parts.layout, LogLayout::Create(spec.log_dir, spec.config.run_id));
  DDP_ASSIGN_OR_RETURN(const store::RedisEndpoint endpoint, Endpoint(spec, parts));
  DDP_ASSIGN_OR_RETURN(parts.event_loop, EventLoop::Create());
  parts.router = std::make_unique<LogRouter>(parts.event_loop.get(), STDOUT_FILENO, STDERR_FILENO);

  PosixProcessSpawner::Options spawner;
  spawner.output.redirects = spec.redirects;
  spawner.output.tee = spec.tee;
  spawner.output.prefix_template = "[${role_name}${local_rank}]:";
  spawner.host = HostName();
  spawner.layout = parts.layout;
  spawner.doomed = context.doomed;
  DDP_ASSIGN_OR_RETURN(
      parts.spawner,
      PosixProcessSpawner::Create(parts.event_loop.get(), parts.router.get(), std::move(spawner)));
  if (parts.server != nullptr) {
    PosixProcessSpawner* const spare = parts.spawner.get();
    spare->Spare(parts.server->pid());
    DDP_RETURN_IF_ERROR(
        parts.server->Watch(parts.event_loop.get(), [spare](pid_t pid) { spare->Spare(pid); }));
  }

  elastic::RedisRendezvous::Options rendezvous;
  rendezvous.endpoint = endpoint;
  rendezvous.run_id = spec.config.run_id;
  rendezvous.max_restarts = spec.config.max_restarts;
  rendezvous.lease = spec.config.lease;
  DDP_ASSIGN_OR_RETURN(parts.rendezvous,
                       elastic::RedisRendezvous::Open(rendezvous, parts.event_loop.get()));
  return absl::OkStatus();
}

void Report(const JobSpec& spec, const elastic::JobResult& result) {
  if (!result.reason.empty()) Say(absl::StrCat("ddprun: ", result.reason));
  if (result.failures.empty()) return;
  const ReportContext context = {.host = HostName()};
  std::vector<ReportedFailure> failures;
  for (const elastic::WorkerFailure& failure : result.failures) {
    failures.push_back(DescribeFailure(failure, context));
  }
  std::fputs(FormatFailureReport(spec.config.entrypoint, failures).c_str(), stderr);
}

bool Exists(const std::string& path) { return !path.empty() && ::access(path.c_str(), F_OK) == 0; }

// The files in a temporary folder are kept when somebody may want to read them: the output that was
// sent there, the error files that the report names.
void SettleLogs(const JobSpec& spec, const LogLayout& layout, const elastic::JobResult& result) {
  // Goes when no worker was started: then it is empty.
  if (!layout.root().empty() && ::rmdir(layout.root().c_str()) == 0) {
    if (!spec.temporary_log_folder.empty()) ::rmdir(spec.temporary_log_folder.c_str());
    return;
  }
  if (spec.temporary_log_folder.empty()) return;
  if (!spec.redirects.empty() || !spec.tee.empty()) {
    Say(absl::StrCat("ddprun: the workers' output is in ", layout.root(),
                     " (--log-dir chooses the place)"));
    return;
  }
  const bool has_error_file =
      std::any_of(result.failures.begin(), result.failures.end(),
                  [](const elastic::WorkerFailure& failure) { return Exists(failure.error_file); });
  if (has_error_file) return;
  if (const absl::Status removed = RemoveFolder(spec.temporary_log_folder); !removed.ok()) {
    SayError(removed);
  }
}

int Run(const JobSpec& spec, const AgentContext& context) {
  Parts parts;
  // Nothing runs yet that would need more than to be killed, and reaching Redis can take long.
  ReleaseSignals();
  const absl::Status prepared = Prepare(spec, context, parts);
  HoldSignals();
  if (!prepared.ok()) {
    SayError(prepared);
    SettleLogs(spec, parts.layout, {});
    return 1;
  }
  elastic::Agent agent(spec.config, {.event_loop = parts.event_loop.get(),
                                     .spawner = parts.spawner.get(),
                                     .rendezvous = parts.rendezvous.get(),
                                     .clock = &parts.clock,
                                     .event_log = &parts.event_log});
  const elastic::JobResult result = agent.Run();
  parts.spawner->KillStrays();
  parts.router->Flush(kConsoleStallTimeout);
  Report(spec, result);
  SettleLogs(spec, parts.layout, result);
  return result.exit_code;
}

}  // namespace

int RunJob(const JobSpec& spec, const AgentContext& context) {
  const int code = Run(spec, context);
  if (const absl::Status removed = RemoveFolder(spec.runtime_folder); !removed.ok()) {
    SayError(removed);
  }
  return code;
}

}  // namespace ddp::launcher
