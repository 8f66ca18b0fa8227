#ifndef DDP_LAUNCHER_FLAGS_FLAG_TABLE_H_
#define DDP_LAUNCHER_FLAGS_FLAG_TABLE_H_

#include <string_view>

#include "elastic/agent/launch_config.h"
#include "elastic/health/hang_detector.h"
#include "elastic/health/straggler_detector.h"
#include "elastic/job/job_spec.h"
#include "launcher/flags/flag_default.h"

namespace ddp::launcher {

// Table of all flags of ddprun. Made from it are:
// - the parser of the command line and of PET_* variables (launcher/flags/command_line.h),
// - the defaults (launcher/flags/flag_reader.h),
// - the help text and the shell completion.

// The parser itself answers those of kOther; they have no PET_* variable.
enum class HelpGroup { kJob, kProgram, kRendezvous, kFailures, kWatching, kOutput, kOther };

// A flag of ddprun. Its texts live as long as the program.
struct FlagSpec {
  const char* name;  // "nproc-per-node"; a user may write `_` for `-`
  char short_name;   // 'm' for -m; 0: none
  bool takes_value;  // false: a switch
  HelpGroup group;
  FlagDefault default_value;  // "" for switches and for flags without one
  const char* value_name;     // "N|cpu|gpu|auto": words in lower case are values; "" for switches
  const char* help;
  // Variable of torchrun with the same meaning; read when PET_<NAME> is unset.
  const char* other_variable = nullptr;
};

// Flags in the order of the help text.
inline constexpr FlagSpec kFlagTable[] = {
    {"nnodes", 0, true, HelpGroup::kJob,
     NodeRange{elastic::JobLimits{}.min_nodes, elastic::JobLimits{}.max_nodes}, "N|MIN:MAX",
     "Nodes of the job. With MIN:MAX it starts and goes on with any number of nodes between; more"
     " than MAX wait as spares."},
    {"nproc-per-node", 0, true, HelpGroup::kJob, elastic::LaunchConfig::kDefaultNprocPerNode,
     "N|cpu|gpu|auto",
     "Workers on this node: a number, one per CPU, one per GPU, or auto: GPUs where there are any,"
     " else CPUs. Nodes may differ."},
    {"node-unit", 0, true, HelpGroup::kJob, elastic::RendezvousRules{}.node_unit, "N",
     "The number of nodes is always a multiple of N; it divides MIN and MAX. The others wait as"
     " spares."},
    {"scale-up-delay", 0, true, HelpGroup::kJob,
     InSeconds{elastic::RendezvousRules{}.scale_up_delay}, "SECONDS",
     "Nodes that come while the job runs are taken in together, so long after the last of them, "
     "when"
     " they fill all seats, or after 5 minutes; 0: each at once."},
    {"role", 0, true, HelpGroup::kJob, elastic::JobSpec::kDefaultRole, "NAME",
     "ROLE_NAME of the workers and the start of their log prefix."},
    {"node-rank", 0, true, HelpGroup::kJob, "", "N",
     "Rank that this node wants among the nodes, from 0. Without --rdzv-endpoint: 0 is the node"
     " where the others meet."},
    {"master-addr", 0, true, HelpGroup::kJob, "", "ADDRESS",
     "Where node 0 is, for a job without --rdzv-endpoint; MASTER_ADDR of the workers. Default:"
     " 127.0.0.1."},
    {"master-port", 0, true, HelpGroup::kJob, "", "PORT",
     "Port on node 0 where the nodes of a job without --rdzv-endpoint meet, and MASTER_PORT of the"
     " workers. Default: 29500; elsewhere a free port for each generation."},
    {"local-addr", 0, true, HelpGroup::kJob, "", "ADDRESS",
     "Where other nodes reach this one. Default: the address from which this host would reach the"
     " endpoint; names of hosts are never guessed."},

    {"module", 'm', false, HelpGroup::kProgram, "", "",
     "PROGRAM is the name of a Python module, run as by python -m."},
    {"no-python", 0, false, HelpGroup::kProgram, "", "",
     "Execute PROGRAM itself, also when its name ends in .py."},
    {"run-path", 0, false, HelpGroup::kProgram, "", "",
     "PROGRAM is a Python script, whatever its name ends in; counts over --no-python."},
    {"start-method", 0, true, HelpGroup::kProgram, "spawn", "spawn|fork|forkserver",
     "How Python starts workers that are functions. ddprun runs programs, so all are the same"
     " here."},
    {"virtual-local-rank", 0, false, HelpGroup::kProgram, "", "",
     "Each worker has LOCAL_RANK 0 and sees one device only (CUDA_VISIBLE_DEVICES)."},
    {"numa-binding", 0, true, HelpGroup::kProgram, "", "node|socket|exclusive|core-complex",
     "Run each worker only on CPUs near its GPU, or where there is none, on its share of the NUMA"
     " nodes: all CPUs of the node; of the socket; a share of the node's cores for each worker; the"
     " cores of one shared cache."},

    {"standalone", 0, false, HelpGroup::kRendezvous, "", "",
     "A job of this node only, with a private Redis server that lives as long as it; the other"
     " --rdzv-* flags but --rdzv-conf are ignored. The same happens with --nnodes=1 and nothing"
     " that says where nodes meet."},
    {"rdzv-backend", 0, true, HelpGroup::kRendezvous, "", "redis|c10d|static",
     "redis (default with --rdzv-endpoint): in the Redis server there. c10d: the same, at port"
     " 29400 where the endpoint names none. static (default with --node-rank, --master-addr or"
     " --master-port): at --master-addr, where node 0 starts all that is needed."},
    {"rdzv-endpoint", 0, true, HelpGroup::kRendezvous, "", "HOST[:PORT]|URL",
     "The Redis server: HOST, HOST:PORT (6379), [IPv6]:PORT, redis://HOST[:PORT][/DATABASE],"
     " rediss://... (TLS), redis+sentinel://HOST:PORT,.../MASTER or unix:///PATH. Where HOST is an "
     "address of this node and nobody serves "
     "there, ddprun does."
     " User and password come from DDP_REDIS_USER, DDP_REDIS_PASSWORD or"
     " DDP_REDIS_PASSWORD_FILE."},
    {"rdzv-id", 0, true, HelpGroup::kRendezvous, "", "ID",
     "Name of the job. Agents without it meet when they agree on --nnodes, --role, PROGRAM and its"
     " arguments; two such jobs at once need it."},
    {"rdzv-conf", 0, true, HelpGroup::kRendezvous, "", "KEY=VALUE,...",
     "Seconds for join_timeout (600), last_call_timeout (30), close_timeout (2), read_timeout (as"
     " join_timeout), heartbeat_timeout, keep_alive_interval, timeout (join_timeout's other name);"
     " keep_alive_max_attempt (its product with the interval is the lease);"
     " cas_backoff_max_seconds, the longest random pause before a failed request is sent again;"
     " is_host=true|false;"
     " any_program=true: nodes of one --rdzv-id may run different programs or arguments;"
     " tls_ca_cert_file, tls_cert_file, tls_key_file: PEM files for rediss://;"
     " rank (--node-rank's other name); store_type, which means nothing here."},
    {"lease-ms", 0, true, HelpGroup::kRendezvous, InMilliseconds{elastic::RendezvousRules{}.lease},
     "MS", "A node that Redis has not heard of for so long is taken for dead."},
    {"heartbeat-ms", 0, true, HelpGroup::kRendezvous, "", "MS",
     "How often a node says that it lives. Default: a sixth of the lease."},
    {"store-outage-timeout", 0, true, HelpGroup::kRendezvous,
     InSeconds{elastic::AgentTimes{}.store_outage_timeout}, "SECONDS",
     "Without the Redis server and without a step for so long, a job ends. Training goes on as "
     "long as it"
     " makes steps."},

    {"max-restarts", 0, true, HelpGroup::kFailures, elastic::JobLimits{}.max_restarts, "N",
     "Failures of the whole job after which all workers are started again; one more ends the job."
     " Lost and joining nodes are free."},
    {"max-node-losses", 0, true, HelpGroup::kFailures, elastic::RendezvousRules{}.max_node_losses,
     "N",
     "How often the loss of a node may make the whole job start its workers again; one more ends "
     "the"
     " job."},
    {"no-progress-limit", 0, true, HelpGroup::kFailures,
     elastic::RendezvousRules{}.no_progress_limit, "N",
     "Failures in a row without a step committed that end the job; 0: never. The loss of a host "
     "that"
     " was lost before without a step counts too. Counts for programs that commit steps."},
    {"quarantine-strikes", 0, true, HelpGroup::kFailures,
     elastic::RendezvousRules{}.quarantine_strikes, "N",
     "Failures and losses (halved every 10 minutes) after which a host that caused most of the "
     "job's"
     " waits"
     " for 60 s while others suffice; 0: never."},
    {"hang-timeout", 0, true, HelpGroup::kFailures,
     InSeconds{elastic::HangDetector::Options{}.floor}, "SECONDS",
     "A worker without a step for so long, and for 5 times its longest step, has failed; 0: never."
     " Counts for programs that commit steps."},
    {"fault-grace-ms", 0, true, HelpGroup::kFailures,
     InMilliseconds{elastic::AgentTimes{}.fault_grace}, "MS",
     "After a failure: time from SIGTERM to SIGKILL for the other workers."},
    {"shutdown-timeout", 0, true, HelpGroup::kFailures,
     InSeconds{elastic::AgentTimes{}.shutdown_timeout}, "SECONDS",
     "After a signal to ddprun, which the workers get too, and when nodes come or go: time until"
     " SIGKILL. Progress of the workers extends it, up to 10 times. In a Kubernetes pod: 28. A"
     " second SIGTERM or SIGINT kills at once.",
     "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"},
    {"termination-grace", 0, true, HelpGroup::kFailures, "", "SECONDS",
     "From a signal to ddprun until its sender kills it, such as terminationGracePeriodSeconds of a"
     " pod: the workers get 2 s less, instead of --shutdown-timeout. Default: unknown."},
    {"kill-timeout", 0, true, HelpGroup::kFailures, InSeconds{elastic::AgentTimes{}.kill_timeout},
     "SECONDS",
     "How long the kernel may take to end a process by SIGKILL. After it ddprun tells what a worker"
     " waits for, and no longer waits for what workers left behind."},
    {"stuck-timeout", 0, true, HelpGroup::kFailures, InSeconds{elastic::AgentTimes{}.stuck_timeout},
     "SECONDS",
     "After SIGKILL, time until a node leaves whose worker the kernel has not ended. A worker that"
     " gives back memory gets more."},
    {"uninterruptible-timeout", 0, true, HelpGroup::kFailures, "0", "SECONDS",
     "A node leaves when a worker of it is in uninterruptible sleep (state D) for so long; 0: "
     "never."
     " The kernel may still hold its GPU or network card, so it is not started again there.",
     "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"},
    {"exit-barrier-timeout", 0, true, HelpGroup::kFailures,
     InSeconds{elastic::AgentTimes{}.exit_barrier_timeout}, "SECONDS",
     "A node that is done waits for the others so long, to take part in a restart.",
     "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT"},
    {"signals-to-handle", 0, true, HelpGroup::kFailures,
     SignalList{elastic::LaunchConfig::kDefaultSignals}, "NAME,...",
     "Signals to ddprun that are passed on to the workers and then end the job in order."},
    {"exit-code", 0, true, HelpGroup::kFailures, "default", "default|worker|reason",
     "What ddprun exits with when the job failed: 1; the failed worker's code (128 + N after signal"
     " N); or a code for the reason (below)."},
    {"monitor-interval", 0, true, HelpGroup::kFailures, "", "SECONDS",
     "torchrun looks at its workers so often. ddprun is told by the kernel at once; the value is"
     " checked and means nothing."},

    {"straggler-factor", 0, true, HelpGroup::kWatching,
     elastic::StragglerDetector::Options{}.factor, "FACTOR",
     "Report a worker whose own time per step is so many times the median; 0: never."},
    {"metrics-port", 0, true, HelpGroup::kWatching, "", "PORT",
     "Serve Prometheus metrics there (/metrics); 0: at a free port, which is printed."},
    {"event-log-file", 0, true, HelpGroup::kWatching, "", "FILE",
     "Append what happens to the job to FILE, as JSON lines."},
    {"event-log-handler", 0, true, HelpGroup::kWatching, "null", "null|console|dynamic_rendezvous",
     "console: events go to stderr too, as JSON lines. The others write nothing, as in torchrun."},

    {"log-dir", 0, true, HelpGroup::kOutput, "", "FOLDER",
     "Workers' files go to FOLDER/<id>_<random>/attempt_<n>/<local rank>/{stdout,stderr}.log and"
     " error.json. Without it: a temporary folder, which outlives ddprun only with output of -r or"
     " -t in it, or with error files that the report names. /dev/null: no files."},
    {"redirects", 'r', true, HelpGroup::kOutput, "0", "WHAT",
     "Send workers' output to their files only: 0 nothing, 1 stdout, 2 stderr, 3 both; or by local"
     " rank: 0:1,1:3."},
    {"tee", 't', true, HelpGroup::kOutput, "0", "WHAT",
     "Send workers' output to their files and to the console, there with a prefix like"
     " [default0]:. WHAT as for -r."},
    {"local-ranks-filter", 0, true, HelpGroup::kOutput, "", "N,...",
     "Only these local ranks reach the console; files are as without it."},
    {"duplicate-stdout-filters", 0, true, HelpGroup::kOutput, "", "TEXT,...",
     "Lines of teed stdout that contain one of the texts go to attempt_<n>/filtered_stdout.log"
     " too. ,, stands for a comma."},
    {"duplicate-stderr-filters", 0, true, HelpGroup::kOutput, "", "TEXT,...",
     "The same for stderr and filtered_stderr.log."},
    {"log-line-prefix-template", 0, true, HelpGroup::kOutput,
     "[${role_name}${local_rank}]:", "TEXT",
     "What a teed line begins with; ${role_name}, ${local_rank}, ${rank} and ${hostname} are"
     " replaced.",
     "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"},
    {"logs-specs", 0, true, HelpGroup::kOutput, "default", "default",
     "torchrun's plug-ins for output. ddprun has none but the default."},

    {"print-completion", 0, true, HelpGroup::kOther, "", "bash|zsh",
     "Print a script that makes the shell complete ddprun's flags."},
    {"help", 'h', false, HelpGroup::kOther, "", "", "Show this text."},
    {"version", 0, false, HelpGroup::kOther, "", "", "Show the version."},
};

// Returns the flag called `name`; nullptr: the table has none.
constexpr const FlagSpec* FindFlag(std::string_view name) {
  for (const FlagSpec& flag : kFlagTable) {
    if (name == flag.name) return &flag;
  }
  return nullptr;
}

// The same at compile time. Does not compile for a name that the table lacks.
consteval const FlagSpec& FlagOf(const char* name) { return *FindFlag(name); }

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_FLAG_TABLE_H_
