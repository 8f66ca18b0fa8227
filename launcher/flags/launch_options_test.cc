#include "launcher/flags/launch_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "elastic/agent/launch_config.h"
#include "elastic/job/job_spec.h"
#include "launcher/flags/exit_code.h"
#include "launcher/flags/flag_default.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/flag_table.h"
#include "launcher/flags/rendezvous_choice.h"
#include "launcher/process/numa_plan.h"

namespace ddp::launcher {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

constexpr HostResources kHost = {.cpus = 8, .gpus = 2};

using Values = std::map<std::string, std::string>;

// Parses the values as main() does when the user gave `values`, each as a flag unless `spelled`
// names a variable.
absl::StatusOr<LaunchOptions> Parse(const Values& values, const HostResources& host = kHost,
                                    const Values& spelled = {}) {
  GivenFlags given;
  for (const auto& [name, value] : values) {
    given[name] = {.value = value, .spelled = "--" + name};
    if (spelled.contains(name)) given[name].spelled = spelled.at(name);
  }
  return ParseLaunchOptions(FlagReader(given), host);
}

LaunchOptions Options(const Values& given) {
  const absl::StatusOr<LaunchOptions> options = Parse(given);
  EXPECT_TRUE(options.ok()) << options.status();
  return options.ok() ? *options : LaunchOptions();
}

std::string Error(const Values& given, const HostResources& host = kHost) {
  const absl::StatusOr<LaunchOptions> options = Parse(given, host);
  return options.ok() ? "no error" : std::string(options.status().message());
}

// The table takes its defaults from JobSpec and LaunchConfig; the parser must lead each back to the
// field that it came from.
TEST(LaunchOptionsTest, Defaults) {
  const LaunchOptions options = Options({});
  elastic::JobSpec job;
  job.rules.heartbeat = job.rules.lease / 6;
  EXPECT_TRUE(options.job == job);
  const elastic::LaunchConfig config;
  EXPECT_EQ(options.nproc_per_node, config.nproc_per_node);
  EXPECT_EQ(options.node_rank, config.node_rank);
  EXPECT_EQ(options.master_addr, config.master_addr);
  EXPECT_EQ(options.master_port, config.master_port);
  EXPECT_EQ(options.virtual_local_rank, config.virtual_local_rank);
  EXPECT_EQ(options.signals_to_handle, config.signals_to_handle);
  EXPECT_EQ(options.program_kind, ProgramKind::kByName);
  EXPECT_EQ(options.numa_binding, NumaBinding::kNone);
  EXPECT_EQ(options.rendezvous.kind, RendezvousKind::kPrivate);
  EXPECT_EQ(options.rendezvous.heartbeat_timeout, job.rules.lease);
  EXPECT_EQ(options.rendezvous.read_timeout, job.times.rendezvous_timeout);
  EXPECT_EQ(options.exit_code, ExitCodeStyle::kDefault);
  EXPECT_FALSE(options.metrics_port.has_value());
  EXPECT_EQ(options.event_log_file, "");
  EXPECT_TRUE(options.output.tee.empty());
  EXPECT_EQ(options.output.prefix_template, "[${role_name}${local_rank}]:");
  EXPECT_THAT(options.notices, IsEmpty());
}

TEST(LaunchOptionsTest, ProcessesPerNode) {
  const auto count = [](const std::string& text, const HostResources& host) {
    const auto options = Parse({{"nproc-per-node", text}}, host);
    return options.ok() ? options->nproc_per_node : -1;
  };
  EXPECT_EQ(count("3", kHost), 3);
  EXPECT_EQ(count("cpu", kHost), 8);
  EXPECT_EQ(count("gpu", kHost), 2);
  EXPECT_EQ(count("auto", kHost), 2);
  EXPECT_EQ(count("auto", {.cpus = 8, .gpus = 0}), 8);
  EXPECT_EQ(count("gpu", {.cpus = 8, .gpus = 0}), -1);
  for (const char* bad : {"0", "-1", "", "two", "2x", " 2", "+2", "2.0", "99999999999", "xpu"}) {
    EXPECT_EQ(count(bad, kHost), -1) << bad;
  }
  EXPECT_THAT(Error({{"nproc-per-node", "xpu"}}), HasSubstr("NVIDIA GPUs only"));
}

TEST(LaunchOptionsTest, Nodes) {
  const auto nodes = [](const std::string& text) {
    const LaunchOptions options = Options({{"nnodes", text}, {"rdzv-endpoint", "h"}});
    return std::pair(options.job.limits.min_nodes, options.job.limits.max_nodes);
  };
  EXPECT_EQ(nodes("1"), std::pair(1, 1));
  EXPECT_EQ(nodes("3"), std::pair(3, 3));
  EXPECT_EQ(nodes("2:16"), std::pair(2, 16));
  for (const char* bad : {"0", "", "a", "1:1:1", "2:1", ":", "1:", "0:2", "-1", "1:99999999"}) {
    EXPECT_THAT(Error({{"nnodes", bad}}),
                HasSubstr(std::string("--nnodes=") + bad + ": expected N or MIN:MAX"))
        << bad;
  }
}

TEST(LaunchOptionsTest, WithAnEndpointNodesMeetInRedis) {
  const LaunchOptions options = Options({{"nnodes", "2"},
                                         {"rdzv-endpoint", "host"},
                                         {"rdzv-id", "digits"},
                                         {"node-rank", "1"},
                                         {"local-addr", "10.0.0.7"}});
  EXPECT_EQ(options.rendezvous.kind, RendezvousKind::kRedis);
  EXPECT_EQ(options.rendezvous.endpoint, "host");
  EXPECT_EQ(options.rendezvous.default_port, 6379);
  EXPECT_EQ(options.job.run_id, "digits");
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.local_addr, "10.0.0.7");
  EXPECT_EQ(options.master_addr, "10.0.0.7");
  EXPECT_EQ(options.master_port, 0);
  EXPECT_THAT(options.notices, IsEmpty());
}

TEST(LaunchOptionsTest, C10dIsRedisAtItsOwnPortAndSaysSoOnce) {
  const LaunchOptions options =
      Options({{"nnodes", "2"}, {"rdzv-backend", "c10d"}, {"rdzv-endpoint", "host"}});
  EXPECT_EQ(options.rendezvous.kind, RendezvousKind::kRedis);
  EXPECT_EQ(options.rendezvous.default_port, 29400);
  EXPECT_THAT(options.notices, ElementsAre(HasSubstr("--rdzv-backend=c10d: ")));
}

TEST(LaunchOptionsTest, APortOfZeroIsAPlaceOfThisNodesOwn) {
  // torchrun's documentation has this form for several jobs on one node.
  const Values given = {{"rdzv-backend", "c10d"}, {"rdzv-endpoint", "localhost:0"}};
  EXPECT_EQ(Options(given).rendezvous.kind, RendezvousKind::kPrivate);
  EXPECT_EQ(Options({{"rdzv-endpoint", "localhost:0"}}).rendezvous.kind, RendezvousKind::kPrivate);
  EXPECT_THAT(Error({{"rdzv-endpoint", "host:0"}, {"nnodes", "2"}}),
              AllOf(HasSubstr("--rdzv-endpoint=host:0: "), HasSubstr("must know the port")));
}

TEST(LaunchOptionsTest, MasterFlagsWithAnEndpointAreLeftOutOfAccount) {
  const Values given = {
      {"rdzv-endpoint", "h"}, {"master-addr", "10.0.0.1"}, {"master-port", "2000"}};
  EXPECT_THAT(Options(given).notices,
              ElementsAre(HasSubstr("--master-addr: "), HasSubstr("--master-port: ")));
  EXPECT_EQ(Options(given).master_port, 0);
  // Operators of clusters set the variables everywhere: no notice is due.
  const auto options =
      Parse(given, kHost, {{"master-addr", "PET_MASTER_ADDR"}, {"master-port", "PET_MASTER_PORT"}});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_THAT(options->notices, IsEmpty());
}

TEST(LaunchOptionsTest, StaticRendezvous) {
  const LaunchOptions options = Options(
      {{"nnodes", "2"}, {"node-rank", "1"}, {"master-addr", "[fd00::7]"}, {"master-port", "2000"}});
  EXPECT_EQ(options.rendezvous.kind, RendezvousKind::kStatic);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master_addr, "fd00::7");
  EXPECT_EQ(options.master_port, 2000);
  // Values that are not given are as in torchrun.
  const LaunchOptions first = Options({{"nnodes", "2"}, {"master-addr", "node-0"}});
  EXPECT_EQ(first.node_rank, 0);
  EXPECT_EQ(first.master_port, 29500);
  EXPECT_EQ(Options({{"node-rank", "0"}}).master_addr, "127.0.0.1");
  // torchrun has a second form for the same.
  const LaunchOptions endpoint =
      Options({{"nnodes", "2"}, {"rdzv-backend", "static"}, {"rdzv-endpoint", "node-0:3000"}});
  EXPECT_EQ(endpoint.rendezvous.kind, RendezvousKind::kStatic);
  EXPECT_EQ(endpoint.master_addr, "node-0");
  EXPECT_EQ(endpoint.master_port, 3000);
  EXPECT_THAT(Error({{"nnodes", "2"}, {"rdzv-backend", "static"}, {"rdzv-endpoint", "a\nb:1"}}),
              HasSubstr("--rdzv-endpoint=a?b:1: expected 1 to 300 printable characters"));
}

TEST(LaunchOptionsTest, ARankBeyondTheSeatsIsASpares) {
  const LaunchOptions options =
      Options({{"nnodes", "1:2"}, {"rdzv-endpoint", "h"}, {"node-rank", "2"}});
  EXPECT_EQ(options.node_rank, -1);
  EXPECT_THAT(options.notices, ElementsAre(AllOf(HasSubstr("--node-rank: "), HasSubstr("0 to 1"))));
}

TEST(LaunchOptionsTest, VariablesOfAClusterDoNotReachAStandaloneJob) {
  const auto options = Parse({{"standalone", "true"},
                              {"node-rank", "3"},
                              {"master-addr", "10.0.0.1"},
                              {"master-port", "29500"}},
                             kHost,
                             {{"node-rank", "PET_NODE_RANK"},
                              {"master-addr", "PET_MASTER_ADDR"},
                              {"master-port", "PET_MASTER_PORT"}});
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->node_rank, -1);
  EXPECT_EQ(options->master_addr, "127.0.0.1");
  EXPECT_EQ(options->master_port, 0);
  EXPECT_EQ(Options({{"standalone", "true"}, {"master-port", "2000"}}).master_port, 2000);
}

TEST(LaunchOptionsTest, AnEmptyVariableIsNotGiven) {
  const LaunchOptions options = Options({{"rdzv-endpoint", ""},
                                         {"rdzv-backend", ""},
                                         {"rdzv-id", ""},
                                         {"node-rank", ""},
                                         {"master-addr", ""},
                                         {"master-port", ""}});
  EXPECT_EQ(options.rendezvous.kind, RendezvousKind::kPrivate);
}

TEST(LaunchOptionsTest, StandaloneOverridesWhatSaysWhereNodesMeet) {
  const LaunchOptions options = Options({{"standalone", "true"},
                                         {"nnodes", "1:4"},
                                         {"rdzv-backend", "c10d"},
                                         {"rdzv-endpoint", "elsewhere:1"},
                                         {"rdzv-id", "x"}});
  EXPECT_EQ(options.rendezvous.kind, RendezvousKind::kPrivate);
  EXPECT_EQ(options.rendezvous.endpoint, "");
  EXPECT_EQ(options.job.run_id, "");
  EXPECT_EQ(options.job.limits.max_nodes, 1);
  EXPECT_THAT(options.notices, IsEmpty());
}

TEST(LaunchOptionsTest, TheIdThatTorchrunGivesByDefaultIsNone) {
  EXPECT_EQ(Options({{"rdzv-endpoint", "h"}, {"rdzv-id", "none"}}).job.run_id, "");
}

TEST(LaunchOptionsTest, LeaseAndHeartbeat) {
  const auto lease = [](const Values& given) {
    const LaunchOptions options = Options(given);
    return std::pair(absl::ToInt64Milliseconds(options.job.rules.lease),
                     absl::ToInt64Milliseconds(options.job.rules.heartbeat));
  };
  EXPECT_EQ(lease({{"lease-ms", "1200"}}), std::pair(int64_t{1200}, int64_t{200}));
  EXPECT_EQ(lease({{"lease-ms", "1200"}, {"heartbeat-ms", "100"}}),
            std::pair(int64_t{1200}, int64_t{100}));
  // torchrun's pair of keys gives the same lease.
  EXPECT_EQ(lease({{"rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4"}}),
            std::pair(int64_t{8000}, int64_t{2000}));
  EXPECT_EQ(lease({{"rdzv-conf", "keep_alive_max_attempt=4"}}),
            std::pair(int64_t{2000}, int64_t{333}));
  // ddprun's own flags override it.
  EXPECT_EQ(lease({{"rdzv-conf", "keep_alive_interval=2,keep_alive_max_attempt=4"},
                   {"lease-ms", "6000"}}),
            std::pair(int64_t{6000}, int64_t{2000}));
  EXPECT_THAT(Error({{"heartbeat-ms", "1501"}}),
              AllOf(HasSubstr("--heartbeat-ms=1501: "), HasSubstr("half of the lease")));
  EXPECT_THAT(Error({{"rdzv-conf", "keep_alive_interval=5,keep_alive_max_attempt=1"}}),
              AllOf(HasSubstr("--rdzv-conf="), HasSubstr("half of the lease")));
}

TEST(LaunchOptionsTest, TheBackoffOfTorchrunLimitsThePausesOfRequests) {
  const auto pause = [](const std::string& conf) {
    return Options({{"rdzv-conf", conf}}).rendezvous.retry_pause_max;
  };
  EXPECT_EQ(pause("cas_backoff_max_seconds=0.25"), absl::Milliseconds(250));
  EXPECT_EQ(pause("cas_backoff_max_seconds=0"), absl::InfiniteDuration()) << "ddprun's own";
  EXPECT_EQ(pause(""), absl::InfiniteDuration());
}

TEST(LaunchOptionsTest, ThePlaceIsWaitedForAsLongAsForNodesUnlessItsOwnTimeIsGiven) {
  const auto timeout = [](const std::string& conf) {
    return Options({{"nnodes", "2"}, {"rdzv-endpoint", "h"}, {"rdzv-conf", conf}})
        .rendezvous.read_timeout;
  };
  EXPECT_EQ(timeout("join_timeout=60"), absl::Seconds(60));
  EXPECT_EQ(timeout("join_timeout=60,read_timeout=4"), absl::Seconds(4));
  EXPECT_EQ(timeout("read_timeout=90,join_timeout=60"), absl::Seconds(90));
}

TEST(LaunchOptionsTest, EveryKeyOfRdzvConfArrives) {
  const LaunchOptions options =
      Options({{"nnodes", "9"},
               {"rdzv-endpoint", "h"},
               {"rdzv-conf",
                "join_timeout=60,last_call_timeout=1,close_timeout=3,read_timeout=4,"
                "heartbeat_timeout=2,is_host=0,store_type=file,rank=3"}});
  EXPECT_EQ(options.job.times.rendezvous_timeout, absl::Seconds(60));
  EXPECT_EQ(options.job.rules.last_call, absl::Seconds(1));
  EXPECT_EQ(options.job.times.farewell_timeout, absl::Seconds(3));
  EXPECT_EQ(options.rendezvous.read_timeout, absl::Seconds(4));
  EXPECT_EQ(options.rendezvous.heartbeat_timeout, absl::Seconds(2));
  EXPECT_EQ(options.rendezvous.is_host, false);
  EXPECT_EQ(options.node_rank, 3);
  EXPECT_THAT(options.notices,
              ElementsAre(AllOf(HasSubstr("--rdzv-conf: "), HasSubstr("store_type"))));
}

TEST(LaunchOptionsTest, FailuresAndWatching) {
  const LaunchOptions options = Options({{"max-restarts", "7"},
                                         {"max-node-losses", "9"},
                                         {"nnodes", "2:4"},
                                         {"rdzv-endpoint", "head"},
                                         {"node-unit", "2"},
                                         {"scale-up-delay", "1.5"},
                                         {"no-progress-limit", "0"},
                                         {"quarantine-strikes", "5"},
                                         {"hang-timeout", "0"},
                                         {"exit-code", "worker"},
                                         {"signals-to-handle", "SIGTERM, USR1,SIGUSR2,SIGTERM"},
                                         {"straggler-factor", "0"},
                                         {"metrics-port", "0"},
                                         {"event-log-handler", "console"}});
  EXPECT_EQ(options.job.limits.max_restarts, 7);
  EXPECT_EQ(options.job.rules.max_node_losses, 9);
  EXPECT_EQ(options.job.rules.node_unit, 2);
  EXPECT_EQ(options.job.rules.scale_up_delay, absl::Seconds(1.5));
  EXPECT_EQ(options.job.rules.no_progress_limit, 0);
  EXPECT_EQ(options.job.rules.quarantine_strikes, 5);
  EXPECT_EQ(options.job.hangs.floor, absl::ZeroDuration());
  EXPECT_EQ(options.exit_code, ExitCodeStyle::kWorker);
  EXPECT_THAT(options.signals_to_handle, ElementsAre(SIGTERM, SIGUSR1, SIGUSR2));
  EXPECT_EQ(options.job.stragglers.factor, 0);
  EXPECT_EQ(options.metrics_port, 0);
  EXPECT_TRUE(options.events_to_console);
  EXPECT_EQ(Options({{"exit-code", "reason"}}).exit_code, ExitCodeStyle::kReason);
}

TEST(LaunchOptionsTest, WhatMeansNothingHereIsCheckedAndSaidOnce) {
  const LaunchOptions options = Options({{"monitor-interval", "5"},
                                         {"start-method", "forkserver"},
                                         {"logs-specs", "default"},
                                         {"event-log-handler", "dynamic_rendezvous"}});
  EXPECT_THAT(options.notices, ElementsAre(HasSubstr("--monitor-interval: means nothing here")));
}

TEST(LaunchOptionsTest, Output) {
  const LaunchOptions options = Options({{"log-dir", "/logs"},
                                         {"redirects", "3"},
                                         {"tee", "0:1"},
                                         {"local-ranks-filter", "0, 11"},
                                         {"duplicate-stdout-filters", "loss,a,,b"},
                                         {"duplicate-stderr-filters", "Error"},
                                         {"log-line-prefix-template", "${rank}> "}});
  EXPECT_EQ(options.output.log_dir, "/logs");
  EXPECT_EQ(options.output.redirects.Get(5), kBothStreams);
  EXPECT_EQ(options.output.tee.Get(0), kStdout);
  EXPECT_THAT(options.output.local_ranks_filter, ElementsAre(0, 11));
  EXPECT_THAT(options.output.filters_of_stdout, ElementsAre("loss", "a,b"));
  EXPECT_THAT(options.output.filters_of_stderr, ElementsAre("Error"));
  EXPECT_EQ(options.output.prefix_template, "${rank}> ");
}

TEST(LaunchOptionsTest, ProgramKinds) {
  EXPECT_EQ(Options({{"module", "true"}}).program_kind, ProgramKind::kPythonModule);
  EXPECT_EQ(Options({{"no-python", "true"}}).program_kind, ProgramKind::kExecutable);
  // torchrun's help says so.
  EXPECT_EQ(Options({{"run-path", "true"}, {"no-python", "true"}}).program_kind,
            ProgramKind::kPythonScript);
  EXPECT_THAT(Error({{"no-python", "true"}, {"module", "true"}}),
              HasSubstr("--no-python and --module contradict"));
  EXPECT_THAT(Error({{"run-path", "true"}, {"module", "true"}}),
              HasSubstr("--run-path and --module contradict"));
}

TEST(LaunchOptionsTest, FiltersWithoutTeeAreSaidToMeanNothing) {
  EXPECT_THAT(Options({{"duplicate-stdout-filters", "x"}, {"tee", "2"}}).notices,
              ElementsAre(HasSubstr("--duplicate-stdout-filters: means nothing without --tee")));
  EXPECT_THAT(Options({{"duplicate-stdout-filters", "x"}, {"tee", "3:1"}}).notices, IsEmpty());
}

TEST(LaunchOptionsTest, VirtualLocalRanksNeedADeviceEach) {
  const Values given = {{"virtual-local-rank", "true"}, {"nproc-per-node", "2"}};
  EXPECT_TRUE(Options(given).virtual_local_rank);
  EXPECT_EQ(Error(given, {.cpus = 8, .gpus = 0, .named_devices = 2}), "no error");
  EXPECT_THAT(Error(given, {.cpus = 8, .gpus = 0, .named_devices = 1}),
              AllOf(HasSubstr("--virtual-local-rank"), HasSubstr("CUDA_VISIBLE_DEVICES names 1")));
}

TEST(LaunchOptionsTest, NumaBindings) {
  EXPECT_EQ(Options({{"numa-binding", "node"}}).numa_binding, NumaBinding::kNode);
  EXPECT_EQ(Options({{"numa-binding", "socket"}}).numa_binding, NumaBinding::kSocket);
  EXPECT_EQ(Options({{"numa-binding", "exclusive"}}).numa_binding, NumaBinding::kExclusive);
  EXPECT_EQ(Options({{"numa-binding", "core-complex"}}).numa_binding, NumaBinding::kCoreComplex);
}

struct Mistake {
  const char* name;
  const char* value;
  const char* expected;
};

TEST(LaunchOptionsTest, MistakesNameFlagValueAndWhatIsAllowed) {
  const std::vector<Mistake> mistakes = {
      {"nproc-per-node", "lots", "cpu, gpu or auto"},
      {"role", "", "printable"},
      {"role", "a\nb", "printable"},
      {"node-rank", "1", "a rank from 0 to 0"},
      {"node-rank", "-1", "a whole number"},
      {"master-port", "65536", "0 to 65535"},
      {"start-method", "thread", "spawn, fork, forkserver"},
      {"numa-binding", "core", "node, socket, exclusive, core-complex"},
      {"rdzv-backend", "etcd", "--rdzv-backend=redis"},
      {"rdzv-conf", "x=1", "unknown key x"},
      {"lease-ms", "99", "from 100 to"},
      {"heartbeat-ms", "0", "from 1 to"},
      {"store-outage-timeout", "-1", "seconds from 0"},
      {"max-restarts", "-1", "a whole number"},
      {"max-node-losses", "-1", "a whole number"},
      {"node-unit", "0", "a whole number"},
      {"node-unit", "2", "divides MIN and MAX"},
      {"scale-up-delay", "-1", "seconds from 0"},
      {"no-progress-limit", "x", "a whole number"},
      {"quarantine-strikes", "1.5", "a whole number"},
      {"hang-timeout", "-1", "seconds from 0"},
      {"fault-grace-ms", "-1", "a whole number"},
      {"shutdown-timeout", "nan", "seconds from 0"},
      {"shutdown-timeout", "-1", "seconds from 0"},
      {"termination-grace", "soon", "seconds from 0"},
      {"termination-grace", "0", "seconds above 0"},
      {"uninterruptible-timeout", "nan", "0 or less: never"},
      {"kill-timeout", "-1", "seconds from 0"},
      {"kill-timeout", "0", "seconds above 0"},
      {"stuck-timeout", "-1", "seconds from 0"},
      {"exit-barrier-timeout", "-1", "seconds from 0"},
      {"signals-to-handle", "SIGKILL", "that a program may handle"},
      {"signals-to-handle", "", "names such as"},
      {"signals-to-handle", "SIGTERM,,SIGINT", "names such as"},
      {"exit-code", "true", "default, worker, reason"},
      {"monitor-interval", "often", "seconds from 0"},
      {"straggler-factor", "1", "above 1"},
      {"straggler-factor", "inf", "above 1"},
      {"metrics-port", "http", "0 to 65535"},
      {"event-log-handler", "file", "null, console, dynamic_rendezvous"},
      {"redirects", "4", "0 (nothing)"},
      {"tee", "4", "0 (nothing)"},
      {"local-ranks-filter", "0;1", "local ranks with commas"},
      {"local-ranks-filter", "-1", "local ranks with commas"},
      {"log-line-prefix-template", "a\nb", "one line"},
      {"logs-specs", "mine", "no plug-ins"},
  };
  for (const Mistake& mistake : mistakes) {
    const std::string error = Error({{mistake.name, mistake.value}});
    const std::string flag = std::string("--") + mistake.name + "=";
    EXPECT_THAT(error, AllOf(StartsWith(flag), HasSubstr(mistake.expected)));
    EXPECT_THAT(error, Not(HasSubstr("\n")));
  }
}

TEST(LaunchOptionsTest, TheUsersOwnSpellingIsNamed) {
  const auto options =
      Parse({{"nproc-per-node", "lots"}}, kHost, {{"nproc-per-node", "PET_NPROC_PER_NODE"}});
  EXPECT_THAT(std::string(options.status().message()), HasSubstr("PET_NPROC_PER_NODE=lots: "));
}

TEST(SplitFiltersTest, ACommaIsWrittenTwice) {
  EXPECT_THAT(SplitFilters(""), IsEmpty());
  EXPECT_THAT(SplitFilters("a"), ElementsAre("a"));
  EXPECT_THAT(SplitFilters("a,b"), ElementsAre("a", "b"));
  EXPECT_THAT(SplitFilters("a,,b,c"), ElementsAre("a,b", "c"));
  EXPECT_THAT(SplitFilters(",,"), ElementsAre(","));
  EXPECT_THAT(SplitFilters("a,,,b"), ElementsAre("a,", "b"));
  EXPECT_THAT(SplitFilters("a,"), ElementsAre("a"));
}

TEST(StreamMapTest, OneValueForAll) {
  const auto map = ParseStreamMap("3");
  ASSERT_TRUE(map.ok());
  EXPECT_EQ(map->Get(0), kBothStreams);
  EXPECT_EQ(map->Get(11), kBothStreams);
  EXPECT_TRUE(ParseStreamMap("0")->empty());
}

TEST(StreamMapTest, ByLocalRankWithAnyNumberOfDigits) {
  const auto map = ParseStreamMap("0:1,11:2,103:3,5:0");
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->Get(0), kStdout);
  EXPECT_EQ(map->Get(11), kStderr);
  EXPECT_EQ(map->Get(103), kBothStreams);
  EXPECT_EQ(map->Get(1), kNoStream);
  EXPECT_FALSE(map->empty());
}

TEST(StreamMapTest, MistakesAreRefused) {
  for (const char* bad : {"", "4", "-1", "0:4", "0:", ":1", "0:1,", "0:1,0:2", "a:1", "0:1;1:2",
                          "0:11", "-1:1", "99999999999:1"}) {
    EXPECT_FALSE(ParseStreamMap(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace ddp::launcher
