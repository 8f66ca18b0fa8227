#include "launcher/flags/launch_options.h"

#include <signal.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/rendezvous/round.h"
#include "launcher/flags/rendezvous_conf.h"
#include "launcher/flags/stop_times.h"

namespace ddp::launcher {
namespace {

constexpr int64_t kMaxPort = 65535;
constexpr size_t kMaxAddressLength = 300;  // a name of the DNS has up to 253 characters
constexpr int64_t kMaxInt = std::numeric_limits<int>::max();
constexpr int64_t kMinLeaseMs = 100;
constexpr int64_t kMaxMilliseconds = 24 * 3600 * 1000;
constexpr double kMaxStragglerFactor = 1000;
// Limit far above any real host, and low enough that a mistyped number is no fork bomb.
constexpr int kMaxProcessesPerNode = 4096;

absl::Status ReadNodes(const FlagReader& flags, LaunchOptions& options) {
  const std::vector<std::string> parts = absl::StrSplit(flags.Text("nnodes"), ':');
  int64_t min = 0;
  int64_t max = 0;
  if (parts.size() > 2 || !ParseInteger(parts.front(), &min) || !ParseInteger(parts.back(), &max) ||
      min < 1 || max < min || max > elastic::kNodesMax) {
    return flags.BadValue("nnodes", absl::StrCat("expected N or MIN:MAX with 1 <= MIN <= MAX <= ",
                                                 elastic::kNodesMax));
  }
  options.job.limits.min_nodes = static_cast<int>(min);
  options.job.limits.max_nodes = static_cast<int>(max);
  return absl::OkStatus();
}

absl::StatusOr<int> ProcessesPerNode(const FlagReader& flags, const HostResources& host) {
  const std::string& text = flags.Text("nproc-per-node");
  if (text == "cpu") return host.cpus;
  if (text == "auto") return host.gpus > 0 ? host.gpus : host.cpus;
  if (text == "gpu") {
    if (host.gpus > 0) return host.gpus;
    return flags.BadValue(
        "nproc-per-node",
        "this host shows no GPU (/dev/nvidia0, ..., narrowed by CUDA_VISIBLE_DEVICES);"
        " give a number, cpu or auto");
  }
  if (text == "xpu") {
    return flags.BadValue("nproc-per-node",
                          "ddprun counts NVIDIA GPUs only; give a number, cpu, gpu or auto");
  }
  int64_t value = 0;
  if (!ParseInteger(text, &value) || value < 1 || value > kMaxProcessesPerNode) {
    return flags.BadValue(
        "nproc-per-node",
        absl::StrCat("expected a number from 1 to ", kMaxProcessesPerNode, ", cpu, gpu or auto"));
  }
  return static_cast<int>(value);
}

absl::StatusOr<ProgramKind> KindOfProgram(const FlagReader& flags) {
  const auto conflict = [&](const char* a, const char* b) {
    return absl::InvalidArgumentError(absl::StrCat(flags.NameOf(a), " and ", flags.NameOf(b),
                                                   " contradict each other: give one of them"));
  };
  if (flags.IsOn("run-path") && flags.IsOn("module")) return conflict("run-path", "module");
  if (flags.IsOn("run-path")) return ProgramKind::kPythonScript;
  if (flags.IsOn("no-python") && flags.IsOn("module")) return conflict("no-python", "module");
  if (flags.IsOn("no-python")) return ProgramKind::kExecutable;
  if (flags.IsOn("module")) return ProgramKind::kPythonModule;
  return ProgramKind::kByName;
}

absl::StatusOr<StreamMap> StreamsFlag(const FlagReader& flags, const std::string& name) {
  absl::StatusOr<StreamMap> map = ParseStreamMap(flags.Text(name));
  if (!map.ok()) return flags.BadValue(name, std::string(map.status().message()));
  return map;
}

// Returns the index in `names` of the flag's value.
absl::StatusOr<int> OneOf(const FlagReader& flags, const std::string& name,
                          const std::vector<std::string>& names) {
  const auto found = std::find(names.begin(), names.end(), flags.Text(name));
  if (found != names.end()) return static_cast<int>(found - names.begin());
  return flags.BadValue(name, absl::StrCat("expected ", absl::StrJoin(names, ", ")));
}

absl::Status ReadProgram(const FlagReader& flags, const HostResources& host,
                         LaunchOptions& options) {
  DDP_ASSIGN_OR_RETURN(options.program_kind, KindOfProgram(flags));
  options.virtual_local_rank = flags.IsOn("virtual-local-rank");
  if (options.virtual_local_rank && host.named_devices.has_value() &&
      *host.named_devices < options.nproc_per_node) {
    return absl::InvalidArgumentError(absl::StrCat(
        flags.NameOf("virtual-local-rank"), " gives each of the ", options.nproc_per_node,
        " workers a device of its own, and CUDA_VISIBLE_DEVICES names ", *host.named_devices));
  }
  if (flags.IsGiven("numa-binding")) {
    DDP_ASSIGN_OR_RETURN(const int binding, OneOf(flags, "numa-binding",
                                                  {"node", "socket", "exclusive", "core-complex"}));
    options.numa_binding = static_cast<NumaBinding>(binding + 1);
  }
  return OneOf(flags, "start-method", {"spawn", "fork", "forkserver"}).status();
}

// Reads --rdzv-conf. An error of one key becomes an error of the whole flag, behind its name and
// value.
absl::Status ReadConf(const FlagReader& flags, RendezvousConf& conf, LaunchOptions& options) {
  absl::StatusOr<RendezvousConf> parsed = ParseRendezvousConf(flags.Text("rdzv-conf"));
  if (!parsed.ok()) return flags.BadValue("rdzv-conf", std::string(parsed.status().message()));
  conf = *std::move(parsed);
  if (!conf.without_meaning.empty()) {
    options.notices.push_back(absl::StrCat(flags.NameOf("rdzv-conf"), ": ",
                                           absl::StrJoin(conf.without_meaning, ", "),
                                           " means nothing here and is left out of account"));
  }
  return absl::OkStatus();
}

// Reads lease and heartbeat. torchrun's pair of interval and count corresponds to heartbeat and
// lease.
absl::Status ReadLease(const FlagReader& flags, const RendezvousConf& conf,
                       LaunchOptions& options) {
  constexpr int kHeartbeatsPerLease = elastic::RendezvousRules::kHeartbeatsPerLease;
  elastic::RendezvousRules& rules = options.job.rules;
  const FlagReader::Range range = {kMinLeaseMs, kMaxMilliseconds};
  DDP_ASSIGN_OR_RETURN(rules.lease, flags.Milliseconds("lease-ms", range));
  std::optional<absl::Duration> heartbeat = conf.keep_alive_interval;
  if (flags.IsGiven("heartbeat-ms")) {
    DDP_ASSIGN_OR_RETURN(heartbeat, flags.Milliseconds("heartbeat-ms", {1, kMaxMilliseconds}));
  }
  const bool has_conf = conf.keep_alive_interval || conf.keep_alive_max_attempt;
  if (has_conf && !flags.IsGiven("lease-ms")) {
    rules.lease = heartbeat.value_or(rules.lease / kHeartbeatsPerLease) *
                  conf.keep_alive_max_attempt.value_or(kHeartbeatsPerLease);
    if (rules.lease < absl::Milliseconds(range.min) ||
        rules.lease > absl::Milliseconds(range.max)) {
      return flags.BadValue(
          "rdzv-conf", absl::StrCat("keep_alive_interval times keep_alive_max_attempt is the lease,"
                                    " which must be between ",
                                    range.min, " and ", range.max, " ms"));
    }
  }
  rules.heartbeat = heartbeat.value_or(rules.HeartbeatInterval(rules.lease));
  if (rules.heartbeat * 2 > rules.lease) {
    return flags.BadValue(
        flags.IsGiven("heartbeat-ms") ? "heartbeat-ms" : "rdzv-conf",
        absl::StrCat("a heartbeat every ", absl::FormatDuration(rules.heartbeat),
                     " is too rare for a lease of ", absl::FormatDuration(rules.lease),
                     ": expected half of the lease or less"));
  }
  options.rendezvous.heartbeat_timeout =
      std::min(conf.heartbeat_timeout.value_or(rules.lease), rules.lease);
  return absl::OkStatus();
}

// Returns the value of --node-rank or of its other name; -1 when neither is given.
absl::StatusOr<int> GivenNodeRank(const FlagReader& flags, const RendezvousConf& conf) {
  constexpr int64_t kMaxRank = 1'000'000;
  if (!flags.IsGiven("node-rank")) return conf.rank.value_or(-1);
  DDP_ASSIGN_OR_RETURN(const int64_t rank, flags.Integer("node-rank", {0, kMaxRank}));
  return static_cast<int>(rank);
}

absl::Status ReadNodeRank(const FlagReader& flags, const RendezvousConf& conf,
                          LaunchOptions& options) {
  DDP_ASSIGN_OR_RETURN(const int rank, GivenNodeRank(flags, conf));
  const RendezvousKind kind = options.rendezvous.kind;
  const int max_nodes = options.job.limits.max_nodes;
  if (kind == RendezvousKind::kPrivate) return absl::OkStatus();  // a single node ignores its rank
  const std::string flag = flags.IsGiven("node-rank") ? "node-rank" : "rdzv-conf";
  const std::string range =
      absl::StrCat("0 to ", max_nodes - 1, ", as ", flags.NameOf("nnodes"), " says");
  options.node_rank = rank;
  if (kind == RendezvousKind::kStatic) {
    options.node_rank = std::max(rank, 0);
    if (rank < max_nodes) return absl::OkStatus();
    return flags.BadValue(flag, absl::StrCat("expected a rank from ", range));
  }
  if (rank < max_nodes) return absl::OkStatus();
  // The node is a spare, or the cluster numbers all nodes that it starts.
  options.node_rank = -1;
  options.notices.push_back(absl::StrCat(flags.NameOf(flag), ": ranks of nodes go from ", range,
                                         ": this node takes any that is free"));
  return absl::OkStatus();
}

// Returns `address` without brackets: code that takes address and port separately expects "::1",
// not "[::1]".
std::string WithoutBrackets(const std::string& address) {
  if (address.size() < 2 || address.front() != '[' || address.back() != ']') return address;
  return address.substr(1, address.size() - 2);
}

absl::Status ReadStaticEndpoint(const FlagReader& flags, LaunchOptions& options) {
  DDP_RETURN_IF_ERROR(flags.CheckName("rdzv-endpoint", kMaxAddressLength));
  const std::string& text = flags.Text("rdzv-endpoint");
  const size_t colon = text.rfind(':');
  int64_t port = kStaticPort;
  const bool has_port = colon != std::string::npos && text.find(']', colon) == std::string::npos;
  const std::string host = has_port ? text.substr(0, colon) : text;
  if (host.empty() ||
      (has_port && (!ParseInteger(text.substr(colon + 1), &port) || port < 0 || port > kMaxPort))) {
    return flags.BadValue("rdzv-endpoint", "expected HOST or HOST:PORT for the static rendezvous");
  }
  options.master_addr = WithoutBrackets(host);
  options.master_port = static_cast<int>(port);
  return absl::OkStatus();
}

absl::Status ReadMaster(const FlagReader& flags, LaunchOptions& options) {
  const RendezvousKind kind = options.rendezvous.kind;
  const bool is_static = kind == RendezvousKind::kStatic;
  if (flags.IsGiven("local-addr"))
    DDP_RETURN_IF_ERROR(flags.CheckName("local-addr", kMaxAddressLength));
  options.local_addr = WithoutBrackets(flags.Text("local-addr"));
  if (is_static) options.master_port = kStaticPort;
  // Variables that a cluster sets on every node are not meant for a job of this node alone.
  const auto is_meant = [&](const char* name) {
    return kind == RendezvousKind::kPrivate ? flags.IsGivenAsFlag(name) : flags.IsGiven(name);
  };
  if (is_meant("master-addr")) {
    DDP_RETURN_IF_ERROR(flags.CheckName("master-addr", kMaxAddressLength));
    options.master_addr = WithoutBrackets(flags.Text("master-addr"));
  }
  if (is_meant("master-port")) {
    DDP_ASSIGN_OR_RETURN(const int64_t port, flags.Integer("master-port", {0, kMaxPort}));
    options.master_port = static_cast<int>(port);
  }
  if (is_static && flags.IsGiven("rdzv-endpoint")) {
    DDP_RETURN_IF_ERROR(ReadStaticEndpoint(flags, options));
  }
  if (is_static && options.job.limits.max_nodes > 1 && options.master_port == 0) {
    return flags.BadValue("master-port", "the other nodes must know it: expected 1 to 65535");
  }
  if (kind != RendezvousKind::kRedis) return absl::OkStatus();
  for (const char* name : {"master-addr", "master-port"}) {
    if (!flags.IsGivenAsFlag(name)) continue;
    options.notices.push_back(
        absl::StrCat(flags.NameOf(name), ": means nothing with --rdzv-endpoint, where MASTER_ADDR",
                     " and MASTER_PORT are those of the node with rank 0"));
  }
  options.master_addr = options.local_addr;
  options.master_port = 0;
  return absl::OkStatus();
}

// Returns true for endpoints such as "localhost:0", which torchrun's documentation has for several
// jobs on one node. Any free port is meant, so only this node can know the place.
bool HasPortZero(const FlagReader& flags) {
  const std::string& endpoint = flags.Text("rdzv-endpoint");
  return absl::EndsWith(endpoint, ":0") && !absl::StartsWith(endpoint, "unix:");
}

absl::StatusOr<RendezvousChoice> Choose(const FlagReader& flags, const RendezvousConf& conf,
                                        const LaunchOptions& options) {
  return ChooseRendezvous(
      {.min_nodes = options.job.limits.min_nodes,
       .max_nodes = options.job.limits.max_nodes,
       .nodes_flag = flags.NameOf("nnodes"),
       .standalone = flags.IsOn("standalone"),
       .standalone_flag = flags.NameOf("standalone"),
       .backend = flags.Text("rdzv-backend"),
       .backend_flag = flags.NameOf("rdzv-backend"),
       .has_endpoint = flags.IsGiven("rdzv-endpoint") && !HasPortZero(flags),
       .has_node_rank = flags.IsGiven("node-rank") || conf.rank.has_value(),
       .has_master = flags.IsGiven("master-addr") || flags.IsGiven("master-port")});
}

absl::Status ReadRendezvous(const FlagReader& flags, LaunchOptions& options) {
  RendezvousOptions& rendezvous = options.rendezvous;
  elastic::JobSpec& job = options.job;
  RendezvousConf conf;
  DDP_RETURN_IF_ERROR(ReadConf(flags, conf, options));
  if (HasPortZero(flags) && job.limits.max_nodes > 1 && !flags.IsOn("standalone")) {
    return flags.BadValue("rdzv-endpoint", "the other nodes must know the port: expected another");
  }
  DDP_ASSIGN_OR_RETURN(const RendezvousChoice choice, Choose(flags, conf, options));
  rendezvous.kind = choice.kind;
  rendezvous.default_port = choice.default_port;
  if (!choice.notice.empty()) options.notices.push_back(choice.notice);
  if (choice.kind == RendezvousKind::kPrivate) job.limits.max_nodes = 1;
  if (choice.kind == RendezvousKind::kRedis) rendezvous.endpoint = flags.Text("rdzv-endpoint");
  // torchrun's default would be a name like any other, and would make all jobs one.
  if (flags.IsGiven("rdzv-id") && flags.Text("rdzv-id") != "none" && !flags.IsOn("standalone")) {
    DDP_RETURN_IF_ERROR(flags.CheckName("rdzv-id"));
    job.run_id = flags.Text("rdzv-id");
  }
  DDP_RETURN_IF_ERROR(ReadLease(flags, conf, options));
  DDP_RETURN_IF_ERROR(ReadNodeRank(flags, conf, options));
  DDP_RETURN_IF_ERROR(ReadMaster(flags, options));
  DDP_ASSIGN_OR_RETURN(job.times.store_outage_timeout, flags.Seconds("store-outage-timeout"));
  job.times.rendezvous_timeout = conf.join_timeout.value_or(job.times.rendezvous_timeout);
  job.times.farewell_timeout = conf.close_timeout.value_or(job.times.farewell_timeout);
  job.rules.last_call = conf.last_call_timeout.value_or(job.rules.last_call);
  rendezvous.read_timeout = conf.read_timeout.value_or(job.times.rendezvous_timeout);
  // torchrun's 0 stands for no pause. Nodes that all try again at once would harm a server that
  // comes back, so here it stands for the default.
  const absl::Duration backoff = conf.cas_backoff_max.value_or(absl::ZeroDuration());
  rendezvous.retry_pause_max = backoff > absl::ZeroDuration() ? backoff : absl::InfiniteDuration();
  rendezvous.is_host = conf.is_host;
  rendezvous.tls_files = conf.tls_files;
  rendezvous.any_program = conf.any_program.value_or(false);
  return absl::OkStatus();
}

// Returns the number of a signal that the agent may wait for. Signals are refused that cannot be
// caught, that a crash raises, or that the agent itself needs.
absl::StatusOr<int> SignalNumber(const std::string& name) {
  const std::string full = name.rfind("SIG", 0) == 0 ? name : absl::StrCat("SIG", name);
  for (const int number :
       {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGTERM, SIGTSTP, SIGCONT, SIGTTIN,
        SIGTTOU, SIGURG, SIGXCPU, SIGXFSZ, SIGVTALRM, SIGPROF, SIGWINCH, SIGIO, SIGPWR}) {
    if (full == elastic::SignalName(number)) return number;
  }
  return absl::InvalidArgumentError(name);
}

absl::StatusOr<std::vector<int>> ReadSignals(const FlagReader& flags) {
  std::vector<int> signals;
  const std::vector<std::string> names = absl::StrSplit(flags.Text("signals-to-handle"), ',');
  for (const std::string& entry : names) {
    const absl::StatusOr<int> number = SignalNumber(std::string(absl::StripAsciiWhitespace(entry)));
    if (!number.ok()) {
      return flags.BadValue("signals-to-handle",
                            "expected names such as SIGTERM,SIGINT,SIGUSR1 of signals that a"
                            " program may handle");
    }
    if (std::find(signals.begin(), signals.end(), *number) == signals.end()) {
      signals.push_back(*number);
    }
  }
  return signals;
}

absl::Status ReadFailures(const FlagReader& flags, LaunchOptions& options) {
  elastic::JobSpec& job = options.job;
  DDP_ASSIGN_OR_RETURN(const int64_t restarts, flags.Integer("max-restarts", {0, kMaxInt}));
  job.limits.max_restarts = static_cast<int>(restarts);
  DDP_ASSIGN_OR_RETURN(job.rules.scale_up_delay, flags.Seconds("scale-up-delay"));
  DDP_ASSIGN_OR_RETURN(const int64_t unit, flags.Integer("node-unit", {1, elastic::kNodesMax}));
  job.rules.node_unit = static_cast<int>(unit);
  if (job.limits.min_nodes % unit != 0 || job.limits.max_nodes % unit != 0) {
    return flags.BadValue("node-unit", "expected a number that divides MIN and MAX of --nnodes");
  }
  DDP_ASSIGN_OR_RETURN(const int64_t losses, flags.Integer("max-node-losses", {0, kMaxInt}));
  job.rules.max_node_losses = static_cast<int>(losses);
  DDP_ASSIGN_OR_RETURN(const int64_t limit, flags.Integer("no-progress-limit", {0, kMaxInt}));
  job.rules.no_progress_limit = static_cast<int>(limit);
  DDP_ASSIGN_OR_RETURN(const int64_t strikes, flags.Integer("quarantine-strikes", {0, kMaxInt}));
  job.rules.quarantine_strikes = static_cast<int>(strikes);
  DDP_ASSIGN_OR_RETURN(job.hangs.floor, flags.Seconds("hang-timeout"));
  DDP_ASSIGN_OR_RETURN(options.signals_to_handle, ReadSignals(flags));
  DDP_ASSIGN_OR_RETURN(const int style, OneOf(flags, "exit-code", {"default", "worker", "reason"}));
  options.exit_code = static_cast<ExitCodeStyle>(style);
  if (!flags.IsGiven("monitor-interval")) return absl::OkStatus();
  options.notices.push_back(absl::StrCat(
      flags.NameOf("monitor-interval"),
      ": means nothing here: ddprun is told by the kernel when a worker ends and does not poll"));
  return flags.Seconds("monitor-interval").status();
}

absl::Status ReadWatching(const FlagReader& flags, LaunchOptions& options) {
  double factor = 0;
  if (!absl::SimpleAtod(flags.Text("straggler-factor"), &factor) ||
      !(factor == 0 || (factor > 1 && factor <= kMaxStragglerFactor))) {
    return flags.BadValue(
        "straggler-factor",
        absl::StrCat("expected 0 (no report) or a number above 1, up to ", kMaxStragglerFactor));
  }
  options.job.stragglers.factor = factor;
  if (flags.IsGiven("metrics-port")) {
    DDP_ASSIGN_OR_RETURN(const int64_t port, flags.Integer("metrics-port", {0, kMaxPort}));
    options.metrics_port = static_cast<int>(port);
  }
  options.event_log_file = flags.Text("event-log-file");
  DDP_ASSIGN_OR_RETURN(const int handler, OneOf(flags, "event-log-handler",
                                                {"null", "console", "dynamic_rendezvous"}));
  options.events_to_console = handler == 1;
  return absl::OkStatus();
}

absl::StatusOr<std::set<int>> LocalRanks(const FlagReader& flags) {
  std::set<int> ranks;
  const std::string& text = flags.Text("local-ranks-filter");
  if (text.empty()) return ranks;
  const std::vector<std::string> entries = absl::StrSplit(text, ',');
  for (const std::string& entry : entries) {
    int64_t rank = 0;
    const std::string number(absl::StripAsciiWhitespace(entry));
    if (!ParseInteger(number, &rank) || rank < 0 || rank >= kMaxProcessesPerNode) {
      return flags.BadValue("local-ranks-filter",
                            "expected local ranks with commas between, such as 0,1,2");
    }
    ranks.insert(static_cast<int>(rank));
  }
  return ranks;
}

absl::Status ReadOutput(const FlagReader& flags, LaunchOptions& options) {
  OutputOptions& output = options.output;
  output.log_dir = flags.Text("log-dir");
  DDP_ASSIGN_OR_RETURN(output.redirects, StreamsFlag(flags, "redirects"));
  DDP_ASSIGN_OR_RETURN(output.tee, StreamsFlag(flags, "tee"));
  DDP_ASSIGN_OR_RETURN(output.local_ranks_filter, LocalRanks(flags));
  output.filters_of_stdout = SplitFilters(flags.Text("duplicate-stdout-filters"));
  output.filters_of_stderr = SplitFilters(flags.Text("duplicate-stderr-filters"));
  for (const auto& [name, stream] : {std::pair("duplicate-stdout-filters", kStdout),
                                     std::pair("duplicate-stderr-filters", kStderr)}) {
    if (!flags.IsGiven(name) || output.tee.Contains(stream)) continue;
    options.notices.push_back(absl::StrCat(
        flags.NameOf(name), ": means nothing without --tee: only teed lines are looked at"));
  }
  output.prefix_template = flags.Text("log-line-prefix-template");
  if (output.prefix_template.find('\n') != std::string::npos) {
    return flags.BadValue("log-line-prefix-template", "expected one line");
  }
  if (flags.Text("logs-specs") != "default") {
    return flags.BadValue("logs-specs", "ddprun has no plug-ins for output: expected default");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StreamMap> ParseStreamMap(const std::string& text) {
  const std::string expected =
      "expected 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), or a list by local rank such as"
      " 0:1,1:3";
  const auto stream_bits = [](const std::string& bits, int* value) {
    if (bits.size() != 1 || bits[0] < '0' || bits[0] > '3') return false;
    *value = bits[0] - '0';
    return true;
  };
  StreamMap map;
  if (stream_bits(text, &map.all)) return map;
  const std::vector<std::string> pairs = absl::StrSplit(text, ',');
  for (const std::string& pair : pairs) {
    const size_t colon = pair.find(':');
    int64_t local_rank = 0;
    int bits = 0;
    if (colon == std::string::npos || !ParseInteger(pair.substr(0, colon), &local_rank) ||
        local_rank < 0 || local_rank > std::numeric_limits<int>::max() ||
        !stream_bits(pair.substr(colon + 1), &bits)) {
      return absl::InvalidArgumentError(expected);
    }
    if (!map.by_local_rank.emplace(static_cast<int>(local_rank), bits).second) {
      return absl::InvalidArgumentError(absl::StrCat("local rank ", local_rank, " is named twice"));
    }
  }
  return map;
}

std::vector<std::string> SplitFilters(const std::string& text) {
  std::vector<std::string> result;
  std::string filter;
  for (size_t i = 0; i <= text.size(); ++i) {
    const bool is_escape = i + 1 < text.size() && text[i] == ',' && text[i + 1] == ',';
    if (is_escape) ++i;
    if (i < text.size() && (text[i] != ',' || is_escape)) {
      filter += text[i];
    } else {
      if (!filter.empty()) result.push_back(std::move(filter));
      filter.clear();
    }
  }
  return result;
}

absl::StatusOr<LaunchOptions> ParseLaunchOptions(const FlagReader& flags,
                                                 const HostResources& host) {
  LaunchOptions options;
  DDP_RETURN_IF_ERROR(ReadNodes(flags, options));
  DDP_ASSIGN_OR_RETURN(options.nproc_per_node, ProcessesPerNode(flags, host));
  DDP_RETURN_IF_ERROR(flags.CheckName("role"));
  options.job.role = flags.Text("role");
  DDP_RETURN_IF_ERROR(ReadProgram(flags, host, options));
  DDP_RETURN_IF_ERROR(ReadRendezvous(flags, options));
  DDP_RETURN_IF_ERROR(ReadStopTimes(flags, host, options.job.times));
  DDP_RETURN_IF_ERROR(ReadFailures(flags, options));
  DDP_RETURN_IF_ERROR(ReadWatching(flags, options));
  DDP_RETURN_IF_ERROR(ReadOutput(flags, options));
  return options;
}

}  // namespace ddp::launcher
