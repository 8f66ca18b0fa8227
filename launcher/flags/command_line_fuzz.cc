// Fuzz target for ddprun's command line and PET_* variables, up to checked options. The program's
// arguments stay as they are. Parsed flags can be written down and parsed again. Options are in
// range. An error is one line.
#include "launcher/flags/command_line.h"

#include <glog/logging.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "elastic/job/job_spec.h"
#include "launcher/flags/flag_default.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/flag_table.h"
#include "launcher/flags/host_resources.h"
#include "launcher/flags/launch_options.h"
#include "store/redis/redis_endpoint.h"
#include "testing/fuzz_target.h"

namespace ddp::launcher {
namespace {

using Words = std::vector<std::string>;

void CheckError(const absl::Status& status) {
  CHECK(absl::IsInvalidArgument(status)) << status;
  CHECK(testing::IsOneLine(status.message())) << status;
}

absl::StatusOr<CommandLine> Parse(const Words& arguments, const Words& environment) {
  return ParseCommandLine(arguments, [&](const std::string& name) -> std::optional<std::string> {
    for (const std::string& entry : environment) {
      if (entry.rfind(name + "=", 0) == 0) return entry.substr(name.size() + 1);
    }
    return std::nullopt;
  });
}

// Switches that a variable turns off are not written: no flag turns one off.
void CheckWrittenDown(const CommandLine& command_line) {
  Words arguments;
  std::map<std::string, std::string> expected;
  for (const auto& [name, flag] : command_line.flags) {
    const FlagSpec* const spec = FindFlag(name);
    CHECK(spec != nullptr) << name;
    if (!spec->takes_value && flag.value != "true") continue;
    arguments.push_back(absl::StrCat("--", name, spec->takes_value ? "=" + flag.value : ""));
    expected[name] = flag.value;
  }
  arguments.emplace_back("--");
  arguments.insert(arguments.end(), command_line.program.begin(), command_line.program.end());
  const absl::StatusOr<CommandLine> again = Parse(arguments, {});
  CHECK(again.ok()) << again.status();
  std::map<std::string, std::string> read;
  for (const auto& [name, flag] : again->flags) read[name] = flag.value;
  CHECK(read == expected) << absl::StrJoin(arguments, " ");
  CHECK(again->program == command_line.program);
}

void CheckOptions(const LaunchOptions& options) {
  const elastic::JobLimits& limits = options.job.limits;
  const elastic::RendezvousRules& rules = options.job.rules;
  const elastic::AgentTimes& times = options.job.times;
  CHECK(1 <= limits.min_nodes && limits.min_nodes <= limits.max_nodes);
  CHECK_GE(options.nproc_per_node, 1);
  CHECK(options.node_rank >= -1 && options.node_rank < limits.max_nodes) << options.node_rank;
  CHECK(options.master_port >= 0 && options.master_port <= 65535) << options.master_port;
  CHECK(options.metrics_port.value_or(0) >= 0 && options.metrics_port.value_or(0) <= 65535);
  const RendezvousOptions& rendezvous = options.rendezvous;
  for (const absl::Duration time :
       {times.rendezvous_timeout, rules.last_call, rules.lease, rules.heartbeat,
        rendezvous.heartbeat_timeout, rendezvous.read_timeout, times.farewell_timeout,
        times.kill_timeout}) {
    CHECK(time > absl::ZeroDuration() && time < absl::Hours(24 * 8)) << time;
  }
  CHECK_LE(rules.heartbeat * 2, rules.lease);
  CHECK(!options.signals_to_handle.empty());
  for (const std::string& name :
       {options.job.role, options.master_addr, options.local_addr, options.job.run_id}) {
    CHECK(name.empty() || testing::IsOneLine(name)) << name;
  }
  for (const std::string& notice : options.notices) CHECK(testing::IsOneLine(notice)) << notice;
  if (rendezvous.kind != RendezvousKind::kRedis) return;
  const auto endpoint = store::ParseRedisEndpoint(rendezvous.endpoint, rendezvous.default_port);
  if (!endpoint.ok()) return CheckError(endpoint.status());
  CHECK(endpoint->is_unix() || (endpoint->port >= 1 && endpoint->port <= 65535));
  CHECK(testing::IsOneLine(endpoint->DebugString())) << endpoint->DebugString();
}

void CheckWords(const Words& arguments, const Words& environment) {
  const absl::StatusOr<CommandLine> command_line = Parse(arguments, environment);
  if (!command_line.ok()) return CheckError(command_line.status());
  if (command_line->help || command_line->version || !command_line->completion.empty()) return;
  CHECK(!command_line->program.empty() && command_line->program.size() <= arguments.size());
  CHECK(
      std::equal(command_line->program.rbegin(), command_line->program.rend(), arguments.rbegin()));
  CheckWrittenDown(*command_line);
  const auto options = ParseLaunchOptions(FlagReader(command_line->flags),
                                          {.cpus = 8, .gpus = 2, .named_devices = {}});
  if (!options.ok()) return CheckError(options.status());
  CheckOptions(*options);
}

std::string Seed(const Words& environment, const Words& arguments) {
  std::string text(1, static_cast<char>(environment.size()));
  for (const std::string& word : environment) text += word + '\0';
  return text + absl::StrJoin(arguments, std::string(1, '\0'));
}

}  // namespace
}  // namespace ddp::launcher

namespace ddp::testing {

// The first byte says how many of the words that follow are variables. Words end with zeros.
void FuzzOne(absl::string_view bytes) {
  FuzzInput input(bytes);
  const size_t variables = input.TakeByte() % 8;
  launcher::Words words = absl::StrSplit(input.rest(), '\0');
  const auto end = words.begin() + static_cast<std::ptrdiff_t>(std::min(variables, words.size()));
  const launcher::Words environment(words.begin(), end);
  words.erase(words.begin(), end);
  launcher::CheckWords(words, environment);
}

std::vector<std::string> FuzzSeeds() {
  return {
      launcher::Seed({}, {"--nproc-per-node", "2", "./train", "--nproc-per-node=9", "-t", "--"}),
      launcher::Seed({"PET_NNODES=1:4", "PET_STANDALONE=0", "PET_TEE=3"},
                     {"--rdzv-endpoint=redis://h:1/2", "-t3", "-r=0:1,1:3", "--", "p"}),
      launcher::Seed({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT="},
                     {"--nnodes=2", "--node_rank=1", "--master-addr=[::1]", "--master_port", "1",
                      "-m", "module", "arg"}),
      launcher::Seed({}, {"--rdzv-backend=static", "--rdzv-endpoint=host:9", "--nnodes=3",
                          "--rdzv-conf=rank=2,timeout=5,store_type=x", "p"}),
      launcher::Seed({}, {"--rdzv-endpoint=unix:///run/a.sock", "--rdzv-id=x", "--lease-ms=1000",
                          "--heartbeat-ms=100", "--rdzv-conf=keep_alive_interval=1", "p"}),
      launcher::Seed({}, {"--signals-to-handle=SIGTERM,USR1", "--exit-code=reason",
                          "--metrics-port=0", "--straggler-factor=2.5", "--numa-binding=socket",
                          "--duplicate-stdout-filters=a,,b,c", "--local-ranks-filter=0,1", "p"}),
      launcher::Seed({}, {"--print-completion", "bash"}),
      launcher::Seed({}, {"-h"}),
      launcher::Seed({}, {"--max-restarts", "-1", "--monitor-interval=1", "--log-dir", "/x", "p"})};
}

}  // namespace ddp::testing
