#include "launcher/watch/status_command.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/environment.h"
#include "base/status_macros.h"
#include "elastic/agent/job_status.h"
#include "elastic/agent/say_line.h"
#include "elastic/rendezvous/job_reader.h"
#include "launcher/flags/flag_reader.h"
#include "launcher/flags/rendezvous_choice.h"
#include "launcher/output/printable.h"
#include "launcher/subcommands/status_flags.h"
#include "launcher/watch/job_marker.h"
#include "launcher/watch/status_report.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_endpoint.h"

namespace ddp::launcher {
namespace {

using elastic::JobStatus;

constexpr char kDefaultRunId[] = "none";
constexpr int kUsageError = 2;
constexpr int kError = 1;
// Times are short: the user wants an answer, even "it cannot be reached".
constexpr absl::Duration kConnectTimeout = absl::Seconds(3);
constexpr absl::Duration kReplyTimeout = absl::Seconds(5);
// Maximum of rows of nodes and of ranks, without --all.
constexpr size_t kRowsMax = 40;
// Limit above any real job: the store's claims are trusted up to here.
constexpr size_t kNodesMax = 20'000;

constexpr char kHelp[] =
    R"(Usage: ddprun status [--rdzv-endpoint HOST[:PORT]|URL] [--rdzv-backend redis|c10d|static]
                     [--rdzv-id ID] [--instance N] [--json] [--all]

Shows nodes, ranks, generation, step, speed and the last failures of a job. Without an endpoint: all
jobs of this user on this host (of --rdzv-id, where it is given).

  --rdzv-endpoint HOST[:PORT]|URL
      The Redis server of the job, as ddprun was given it (PET_RDZV_ENDPOINT). User and password
      come from DDP_REDIS_USER, DDP_REDIS_PASSWORD or DDP_REDIS_PASSWORD_FILE.
  --rdzv-backend redis|c10d|static
      As ddprun was given it (PET_RDZV_BACKEND). c10d: the port of an endpoint that names none is
      29400, not 6379. static: PET_RDZV_ENDPOINT is no Redis server and does not count.
  --rdzv-id ID
      The job there (PET_RDZV_ID). Default: none.
  --instance N
      Which of the jobs that had this id, from 1. Default: the newest one that runs, or else the
      newest.
  --json
      As JSON, every node and rank.
  --all
      Every node and rank in the tables, not only 40, those that something is wrong with first.

Exit code: 0 when a job was shown, 1 when there was none or it could not be read, 2 for a mistake on
the command line. A program named status is started by: ddprun -- status
)";

absl::Status UsageError(const std::string& text) { return absl::InvalidArgumentError(text); }

// A value that the user gave, and the name under which it was given: a flag's or a variable's.
struct Given {
  std::string name;
  std::string value;
};
// Values by flag, without its dashes.
using GivenValues = std::map<std::string, Given>;

GivenValues ReadVariables(const VariableGetter& environment) {
  GivenValues given;
  for (const auto& [flag, variable] :
       {std::pair{"rdzv-endpoint", "PET_RDZV_ENDPOINT"}, std::pair{"rdzv-id", "PET_RDZV_ID"},
        std::pair{"rdzv-backend", "PET_RDZV_BACKEND"}}) {
    const std::optional<std::string> value = environment(variable);
    if (value.has_value() && !value->empty()) given[flag] = {variable, *value};
  }
  return given;
}

// Sets what the backend says about the endpoint.
absl::Status ApplyBackend(const Given& backend, StatusRequest& request) {
  if (backend.value == "c10d") {
    request.default_port = kC10dPort;
  } else if (backend.value == "static") {
    // The endpoint is the address of node 0's store. Its Redis server has another port.
    if (request.endpoint.has_value() && absl::StartsWith(request.endpoint_name, "--")) {
      return UsageError(absl::StrCat(request.endpoint_name, ": no Redis server is there with ",
                                     backend.name,
                                     "=static: call ddprun status on a host of the job, without"
                                     " an endpoint"));
    }
    request.endpoint.reset();
  } else if (backend.value != "redis") {
    return UsageError(
        absl::StrCat(backend.name, "=", Shown(backend.value), ": expected redis, c10d or static"));
  }
  return absl::OkStatus();
}

absl::Status Apply(const GivenValues& given, StatusRequest& request) {
  for (const auto& [flag, by_user] : given) {
    const auto& [name, value] = by_user;
    if (flag == "rdzv-endpoint") {
      request.endpoint = value;
      request.endpoint_name = name;
    } else if (flag == "rdzv-id") {
      request.run_id = value;
    } else if (flag == "instance" &&
               (!absl::SimpleAtoi(value, &request.instance) || request.instance < 1)) {
      return UsageError(absl::StrCat("--instance: ", Shown(value), " is not a number from 1"));
    }
  }
  const auto backend = given.find("rdzv-backend");
  return backend == given.end() ? absl::OkStatus() : ApplyBackend(backend->second, request);
}

bool TakesValue(const std::string& name) {
  return std::any_of(kStatusFlags.begin(), kStatusFlags.end(), [&name](const StatusFlag& flag) {
    return flag.takes_value && flag.name == name;
  });
}

bool SetSwitch(const std::string& name, StatusRequest& request) {
  if (name == "json") {
    request.json = true;
  } else if (name == "all") {
    request.all = true;
  } else if (name == "help") {
    request.help = true;
  } else {
    return false;
  }
  return true;
}

// Place of one job.
struct Place {
  std::string endpoint;
  std::string endpoint_name = "endpoint";  // for messages
  int default_port = store::RedisEndpoint::kDefaultPort;
  bool with_credentials = true;
  std::string password;  // random one of the job; empty: the environment has the credentials
  std::string run_id;
  int64_t instance = 0;
};

// Returns the jobs to show; several agents of one job count once.
std::vector<Place> PlacesOf(const StatusRequest& request) {
  if (request.endpoint.has_value()) {
    return {{.endpoint = *request.endpoint,
             .endpoint_name = request.endpoint_name,
             .default_port = request.default_port,
             .run_id = request.run_id.value_or(kDefaultRunId),
             .instance = request.instance}};
  }
  std::vector<Place> places;
  for (const JobMarker& marker : FindJobMarkers(RuntimeFolderParents())) {
    if (request.run_id.has_value() && *request.run_id != marker.run_id) continue;
    if (request.instance > 0 && request.instance != marker.instance) continue;
    const bool is_known = std::any_of(places.begin(), places.end(), [&](const Place& place) {
      return place.endpoint == marker.endpoint && place.run_id == marker.run_id &&
             place.instance == marker.instance;
    });
    if (is_known) continue;
    places.push_back({.endpoint = marker.endpoint,
                      .with_credentials = marker.with_credentials,
                      .password = marker.password,
                      .run_id = marker.run_id,
                      .instance = marker.instance});
  }
  return places;
}

elastic::NodeStatus NodeStatusOf(elastic::NodeRecord record, uint64_t generation) {
  elastic::NodeStatus node;
  node.node = std::move(record.node);
  node.is_member = record.is_member;
  node.has_lease = record.has_lease;
  node.lease_left_s = record.lease_left_s;
  absl::StatusOr<elastic::NodeRow> row = elastic::ParseNodeRow(record.row);
  node.row_known = row.ok();
  if (row.ok()) node.row = *std::move(row);
  // Ranks of another generation are not shown as ranks of this one.
  if (node.row.generation != generation) node.row.ranks.clear();
  node.row.host = std::move(record.host);
  node.row.role = std::move(record.role);
  node.row.group_rank = record.group_rank;
  if (!node.is_member) node.row.state = "waiting";
  return node;
}

JobStatus JobStatusOf(const std::string& run_id, elastic::JobRecord record) {
  JobStatus status;
  status.run_id = run_id;
  status.instance = record.instance;
  status.state = std::move(record.state);
  status.end_reason = std::move(record.end_reason);
  status.generation = record.generation;
  status.nonce = std::move(record.nonce);
  status.reason = std::move(record.reason);
  status.restarts = record.restarts;
  status.max_restarts = record.max_restarts;
  status.min_nodes = record.min_nodes;
  status.max_nodes = record.max_nodes;
  status.world_size = record.world_size;
  status.unix_time_s = record.unix_time_s;
  status.nodes_total = record.nodes_total;
  for (elastic::NodeRecord& node : record.nodes) {
    status.nodes.push_back(NodeStatusOf(std::move(node), status.generation));
  }
  for (elastic::FailureRecord& failure : record.failures) {
    status.failures.push_back({.unix_time_s = failure.unix_time_s,
                               .generation = failure.generation,
                               .rank = failure.rank,
                               .host = std::move(failure.host),
                               .cause = std::move(failure.cause),
                               .charged = failure.charged});
  }
  return status;
}

struct Reading {
  JobStatus status;
  std::vector<int64_t> other_running;
};

absl::StatusOr<Reading> Read(const Place& place) {
  absl::StatusOr<store::RedisEndpoint> endpoint =
      store::ParseRedisEndpoint(place.endpoint, place.default_port);
  if (!endpoint.ok()) {
    return UsageError(
        absl::StrCat(place.endpoint_name, ": ", std::string(endpoint.status().message())));
  }
  if (!place.password.empty()) {
    endpoint->password = place.password;
  } else if (place.with_credentials) {
    DDP_RETURN_IF_ERROR(store::ApplyRedisCredentialsFromEnvironment(*endpoint));
  }
  store::RedisConnectionOptions options;
  options.connect_timeout = kConnectTimeout;
  options.command_timeout = kReplyTimeout;
  options.total_timeout =
      absl::ZeroDuration();  // a server that refuses us is an answer: no repeats
  options.client_name = "ddprun-status";
  DDP_ASSIGN_OR_RETURN(const std::unique_ptr<store::RedisConnection> connection,
                       store::RedisConnection::Connect(*endpoint, options));
  DDP_ASSIGN_OR_RETURN(elastic::JobRecord record,
                       elastic::ReadJob(*connection, place.run_id, place.instance, kNodesMax));
  Reading reading;
  reading.other_running = std::move(record.other_running);
  reading.status = JobStatusOf(place.run_id, std::move(record));
  return reading;
}

void SayHere(const std::string& line) { elastic::SayLine(absl::StrCat("ddprun status: ", line)); }

int Complain(const absl::Status& status) {
  SayHere(Printable(std::string(status.message())));
  return absl::IsInvalidArgument(status) ? kUsageError : kError;
}

int ComplainOfNothing(const StatusRequest& request) {
  return Complain(absl::NotFoundError(absl::StrCat(
      "no job of this user",
      request.run_id.has_value() ? absl::StrCat(" with id ", *request.run_id) : std::string(),
      " runs on this host; --rdzv-endpoint (and --rdzv-id) name one that runs elsewhere")));
}

}  // namespace

absl::StatusOr<StatusRequest> ParseStatusArguments(const std::vector<std::string>& arguments,
                                                   const VariableGetter& environment) {
  StatusRequest request;
  GivenValues given = ReadVariables(environment);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "-h") {
      request.help = true;
      continue;
    }
    if (argument.compare(0, 2, "--") != 0) {
      return UsageError(absl::StrCat("unexpected ", Shown(argument), "; see ddprun status --help"));
    }
    const size_t equals = argument.find('=');
    const std::string name =
        absl::StrReplaceAll(argument.substr(2, equals - std::min<size_t>(2, equals)), {{"_", "-"}});
    if (TakesValue(name)) {
      std::string value;
      if (equals != std::string::npos) {
        value = argument.substr(equals + 1);
      } else if (++i < arguments.size()) {
        value = arguments[i];
      }
      if (value.empty()) return UsageError(absl::StrCat("--", name, ": a value is missing"));
      given[name] = {absl::StrCat("--", name), value};
    } else if (equals != std::string::npos || !SetSwitch(name, request)) {
      return UsageError(
          absl::StrCat("unknown flag ", Shown(argument), "; see ddprun status --help"));
    }
  }
  DDP_RETURN_IF_ERROR(Apply(given, request));
  return request;
}

int RunStatusCommand(const std::vector<std::string>& arguments) {
  const absl::StatusOr<StatusRequest> request = ParseStatusArguments(
      std::vector<std::string>(arguments.begin() + 1, arguments.end()), &EnvironmentVariable);
  if (!request.ok()) return Complain(request.status());
  if (request->help) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  const std::vector<Place> places = PlacesOf(*request);
  if (places.empty()) return ComplainOfNothing(*request);

  int exit_code = kError;
  std::vector<JobStatus> jobs;
  for (const Place& place : places) {
    absl::StatusOr<Reading> reading = Read(place);
    if (!reading.ok()) {
      exit_code = std::max(Complain(reading.status()), exit_code);
      continue;
    }
    for (const int64_t instance : reading->other_running) {
      SayHere(absl::StrCat("instance ", instance, " of ", Printable(place.run_id),
                           " runs too: --instance=", instance));
    }
    jobs.push_back(std::move(reading->status));
  }
  if (jobs.empty()) return exit_code;
  if (request->json) {
    std::fputs(StatusJson(jobs).c_str(), stdout);
    return 0;
  }
  const char* separator = "";
  for (const JobStatus& job : jobs) {
    std::fprintf(
        stdout, "%s%s", separator,
        StatusTable(job, request->all ? kNodesMax * elastic::kRanksOfNodeMax : kRowsMax).c_str());
    separator = "\n";
  }
  return 0;
}

}  // namespace ddp::launcher
