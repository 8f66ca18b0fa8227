// ddprun: starts a program once per worker and keeps the job running.
//
// This process is the keeper. The agent, in a child process, runs the job (launcher/job.h).

#include <fcntl.h>
#include <glog/logging.h>
#include <signal.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/environment.h"
#include "base/status_macros.h"
#include "elastic/agent/job_result.h"
#include "elastic/job/job_spec.h"
#include "launcher/checkpoint/checkpoint_command.h"
#include "launcher/flags/command_line.h"
#include "launcher/flags/completion.h"
#include "launcher/flags/exit_code.h"
#include "launcher/flags/flag_default.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/flag_table.h"
#include "launcher/flags/host_resources.h"
#include "launcher/flags/launch_options.h"
#include "launcher/flags/rendezvous_choice.h"
#include "launcher/flags/worker_command.h"
#include "launcher/job.h"
#include "launcher/meeting/network_server.h"
#include "launcher/output/log_lines.h"
#include "launcher/output/output_options.h"
#include "launcher/output/patience.h"
#include "launcher/output/say.h"
#include "launcher/process/keeper.h"
#include "launcher/process/private_folder.h"
#include "launcher/subcommands/subcommand.h"
#include "launcher/watch/status_command.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::launcher {
namespace {

constexpr char kVersion[] = "ddprun 0.1.0";
constexpr int kUsageError = 2;

int Fail(const absl::Status& status, int exit_code) {
  SayError(status, kConsoleStallTimeout);
  return exit_code;
}

// A descriptor that we open must never become 0, 1 or 2.
void OpenMissingStandardStreams() {
  while (true) {
    const int fd = ::open("/dev/null", O_RDWR);
    if (fd > STDERR_FILENO) ::close(fd);
    if (fd < 0 || fd > STDERR_FILENO) return;
  }
}

void InitLogging(LogLines* lines) {
  // No log files, and on stderr only messages that end the process.
  FLAGS_stderrthreshold = google::GLOG_FATAL;
  for (int severity = google::GLOG_INFO; severity < google::NUM_SEVERITIES; ++severity) {
    google::SetLogDestination(severity, "");
  }
  google::AddLogSink(lines);
  if (std::getenv("GLOG_minloglevel") == nullptr) FLAGS_minloglevel = google::GLOG_WARNING;
  google::InitGoogleLogging("ddprun");
}

// Run id (torchrun's default) for nodes that must share one when the user gave none.
constexpr char kCommonRunId[] = "none";

std::string RandomHex() {
  std::string bytes(6, '\0');
  PCHECK(::getrandom(bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  return absl::BytesToHexString(bytes);
}

// Returns the fingerprint by which agents without a run id find their job. A job of one node has a
// random one. Nodes that name the same node 0 as their master need not agree on anything else.
std::string Fingerprint(RendezvousKind kind, const elastic::JobSpec& job,
                        const std::vector<std::string>& program) {
  if (kind == RendezvousKind::kPrivate) return "";
  if (job.limits.max_nodes == 1) return RandomHex();
  return kind == RendezvousKind::kStatic ? "static" : JobFingerprint(job, program);
}

// Gives a run id and a fingerprint to a job to which the user gave no run id. Nodes with the user's
// run id compare their programs.
void NameJob(const RendezvousOptions& rendezvous, const std::vector<std::string>& program,
             elastic::JobSpec& job) {
  if (!rendezvous.any_program) job.program = ProgramText(program);
  if (!job.run_id.empty()) return;
  job.run_id = rendezvous.kind == RendezvousKind::kPrivate ? RandomHex() : kCommonRunId;
  job.fingerprint = Fingerprint(rendezvous.kind, job, program);
}

// Returns the file for timers that workers set for themselves (torch.distributed.elastic.timer);
// empty unless requested. torchrun serves them on request too.
std::string TimerFile(const std::string& runtime_folder) {
  const char* enabled = std::getenv("TORCHELASTIC_ENABLE_FILE_TIMER");
  if (enabled == nullptr || std::string(enabled) != "1") return "";
  const char* path = std::getenv("TORCHELASTIC_TIMER_FILE");
  return path == nullptr || *path == '\0' ? runtime_folder + "/timers" : path;
}

// Checks that `host`, the value of the flag or variable `name`, is no address of every machine.
absl::Status CheckOneMachine(const std::string& name, const std::string& host) {
  if (!IsWildcard(host)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, ": ", host, " is an address of every machine: name the one of one machine"));
}

// Checks the place where the nodes meet. Returns the endpoint that the user named, with its
// credentials; nullopt: none.
absl::StatusOr<std::optional<store::RedisEndpoint>> Endpoint(const LaunchOptions& options,
                                                             const FlagReader& flags) {
  const RendezvousOptions& rendezvous = options.rendezvous;
  const std::string name = flags.NameOf("rdzv-endpoint");
  if (rendezvous.kind == RendezvousKind::kStatic) {
    // An endpoint counts as the master's address.
    const bool has_endpoint = flags.IsGiven("rdzv-endpoint");
    DDP_RETURN_IF_ERROR(
        CheckOneMachine(has_endpoint ? name : flags.NameOf("master-addr"), options.master_addr));
  }
  if (rendezvous.kind != RendezvousKind::kRedis) return std::nullopt;
  absl::StatusOr<store::RedisEndpoint> endpoint =
      store::ParseRedisEndpoint(rendezvous.endpoint, rendezvous.default_port);
  if (!endpoint.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", std::string(endpoint.status().message())));
  }
  DDP_RETURN_IF_ERROR(CheckOneMachine(name, endpoint->host));
  for (const auto& [file, path] : rendezvous.tls_files) store::SetTlsFile(file, path, *endpoint);
  if (const absl::Status checked = store::CheckTlsFiles(*endpoint); !checked.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.NameOf("rdzv-conf"), ": ", std::string(checked.message())));
  }
  DDP_RETURN_IF_ERROR(store::ApplyRedisCredentialsFromEnvironment(*endpoint));
  return *endpoint;
}

int KeepJob(JobInput input, int argc, char** argv) {
  const ExitCodeStyle style = input.options.exit_code;
  const int cannot_start = ExitCodeOf(elastic::JobEndReason::kCannotStart, style);
  HoldSignals(input.options.signals_to_handle);
  absl::StatusOr<std::string> runtime_folder = MakePrivateFolder("ddprun_");
  if (!runtime_folder.ok()) return Fail(runtime_folder.status(), cannot_start);
  input.runtime_folder = *runtime_folder;
  input.timer_file = TimerFile(input.runtime_folder);
  if (input.options.output.log_dir.empty()) {
    absl::StatusOr<std::string> log_folder = MakePrivateFolder("ddprun_logs_");
    if (!log_folder.ok()) {
      (void)RemoveFolder(input.runtime_folder);
      return Fail(log_folder.status(), cannot_start);
    }
    input.options.output.log_dir = input.temporary_log_folder = *log_folder;
  }
  const OutputOptions& output = input.options.output;
  const absl::StatusOr<int> code =
      RunWithKeeper({.runtime_folder = input.runtime_folder,
                     .temporary_log_folder = input.temporary_log_folder,
                     .logs_hold_output = !output.redirects.empty() || !output.tee.empty(),
                     .signals = input.options.signals_to_handle,
                     .kill_timeout = input.options.job.times.kill_timeout,
                     .cannot_start_exit_code = cannot_start,
                     .stopped_exit_code = ExitCodeOf(elastic::JobEndReason::kPreempted, style),
                     .agent_title = absl::StrCat("ddp-agent ", input.options.job.run_id),
                     .argc = argc,
                     .argv = argv},
                    [&input](const AgentContext& context) { return RunJob(input, context); });
  if (code.ok()) return *code;
  (void)RemoveFolder(input.runtime_folder);
  (void)RemoveFolder(input.temporary_log_folder);
  return Fail(code.status(), cannot_start);
}

// Returns the answer to --help, --version or --print-completion.
std::string Answer(const CommandLine& command_line) {
  if (command_line.help) return HelpText();
  if (command_line.version) return kVersion;
  return CompletionScript(command_line.completion);
}

int Main(int argc, char** argv) {
  OpenMissingStandardStreams();
  ::signal(SIGPIPE, SIG_IGN);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (IsSubcommand("status", arguments, &ProgramExists)) return RunStatusCommand(arguments);
  if (IsSubcommand("checkpoint", arguments, &ProgramExists)) return RunCheckpointCommand(arguments);
  const absl::StatusOr<CommandLine> command_line =
      ParseCommandLine(arguments, &EnvironmentVariable);
  if (!command_line.ok()) return Fail(command_line.status(), kUsageError);
  if (command_line->help || command_line->version || !command_line->completion.empty()) {
    std::puts(Answer(*command_line).c_str());
    return 0;
  }
  const FlagReader flags(command_line->flags);
  static LogLines log_lines;  // static: threads may log until the process ends
  InitLogging(&log_lines);
  absl::StatusOr<LaunchOptions> options = ParseLaunchOptions(flags, ReadHostResources());
  if (!options.ok()) return Fail(options.status(), kUsageError);
  for (const std::string& notice : options->notices) {
    Say(notice);
  }
  absl::StatusOr<std::optional<store::RedisEndpoint>> endpoint = Endpoint(*options, flags);
  if (!endpoint.ok()) return Fail(endpoint.status(), kUsageError);
  absl::StatusOr<std::vector<std::string>> command =
      WorkerCommand({.kind = options->program_kind,
                     .program = command_line->program,
                     .python_exec = EnvironmentVariable("PYTHON_EXEC"),
                     .path = EnvironmentVariable("PATH")});
  if (!command.ok()) {
    const std::string why(command.status().message());
    Say(absl::StrCat(why, HiddenSubcommandHint(arguments)));
    return ExitCodeOf(elastic::JobEndReason::kCannotStart, options->exit_code);
  }

  NameJob(options->rendezvous, command_line->program, options->job);
  JobInput input;
  input.command = *std::move(command);
  input.entrypoint = command_line->program[0];
  input.options = *std::move(options);
  input.endpoint = *std::move(endpoint);
  input.log_lines = &log_lines;
  return KeepJob(std::move(input), argc, argv);
}

}  // namespace
}  // namespace ddp::launcher

int main(int argc, char** argv) { return ddp::launcher::Main(argc, argv); }
