#include "elastic/rendezvous/redis_rendezvous.h"

#include <glog/logging.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "elastic/rendezvous/round.h"
#include "elastic/rendezvous/script_channel.h"
#include "elastic/rendezvous/scripts.h"
#include "store/percent_encoding.h"
#include "store/redis_connection.h"
#include "store/redis_reply.h"
#include "store/redis_script.h"

namespace ddp::elastic {
namespace {

using store::RedisReply;
using store::RedisScript;

constexpr absl::Duration kKeysTimeToLive = absl::Hours(24);
// For how long a request to open an instance may be sent again.
constexpr absl::Duration kOpenRequestTimeToLive = absl::Minutes(10);

// Pauses between tries double from the first to the second.
constexpr absl::Duration kRetryPauseMin = absl::Milliseconds(20);
constexpr absl::Duration kRetryPauseMax = absl::Seconds(1);
constexpr int kRetryDoublingsMax = 6;
constexpr int kFailuresBeforeOutOfReach = 3;

// A node that waits for others asks again this often, or with its heartbeats if those are more
// often.
constexpr absl::Duration kJoinPollMax = absl::Milliseconds(200);

std::string RandomHex() {
  uint64_t bits = 0;
  CHECK_EQ(getrandom(&bits, sizeof(bits), 0), static_cast<ssize_t>(sizeof(bits)));
  return absl::StrFormat("%016x", bits);
}

// Unique for every agent that ever was.
std::string NodeName() {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  return absl::StrCat(host.data(), "-", getpid(), "-", RandomHex());
}

std::string Milliseconds(absl::Duration duration) {
  return absl::StrCat(absl::ToInt64Milliseconds(duration));
}

RedisScript Transition(const char* script) {
  return RedisScript(absl::StrCat(embedded::scripts::kPrelude, script));
}

struct Scripts {
  RedisScript join = Transition(embedded::scripts::kJoin);
  RedisScript heartbeat = Transition(embedded::scripts::kHeartbeat);
  RedisScript report_failure = Transition(embedded::scripts::kReportFailure);
  RedisScript complete = Transition(embedded::scripts::kComplete);
  RedisScript leave = Transition(embedded::scripts::kLeave);
};

absl::Status BadReply(const std::string& what) {
  return absl::InternalError(absl::StrCat("the rendezvous answers nonsense: ", what));
}

// What every transition answers: {outcome, generation, nonce, restarts, ...}.
struct Outcome {
  std::string name;
  GenerationId generation;
  int restarts = 0;
  std::vector<RedisReply> rest;

  absl::StatusOr<std::string> Text(size_t index) const {
    if (index >= rest.size()) return BadReply(absl::StrCat(name, " is too short"));
    return rest[index].AsString();
  }
};

constexpr char kForeign[] = "foreign";

absl::Status ForeignInstance() {
  return absl::FailedPreconditionError(
      "Redis lost its memory, and another job with the same run id has taken this job's place; "
      "give "
      "each job its own --rdzv-id");
}

absl::StatusOr<Outcome> ParseOutcome(RedisReply reply) {
  DDP_ASSIGN_OR_RETURN(std::vector<RedisReply> parts, std::move(reply).AsArray());
  if (parts.size() < 4) return BadReply("fewer than four parts");
  Outcome outcome;
  DDP_ASSIGN_OR_RETURN(outcome.name, parts[0].AsString());
  DDP_ASSIGN_OR_RETURN(const int64_t generation, parts[1].AsInteger());
  DDP_ASSIGN_OR_RETURN(outcome.generation.nonce, parts[2].AsString());
  DDP_ASSIGN_OR_RETURN(const int64_t restarts, parts[3].AsInteger());
  if (generation < 0) return BadReply(absl::StrCat("generation ", generation));
  if (restarts < 0 || restarts > std::numeric_limits<int>::max()) {
    return BadReply(absl::StrCat(restarts, " restarts"));
  }
  outcome.generation.number = static_cast<uint64_t>(generation);
  outcome.restarts = static_cast<int>(restarts);
  outcome.rest.assign(std::make_move_iterator(parts.begin() + 4),
                      std::make_move_iterator(parts.end()));
  return outcome;
}

// A round as join.lua answers it, in the eyes of `node`.
absl::StatusOr<Round> ParseRound(const Outcome& outcome, const std::string& node) {
  if (outcome.rest.empty()) return BadReply("a round without members");
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> parts, outcome.rest[0].AsArray());
  if (parts.size() % 3 != 0) return BadReply("a round with half a member");
  Round round;
  round.generation = outcome.generation;
  round.restarts = outcome.restarts;
  std::map<int64_t, std::pair<std::string, NodeOffer>> members;
  for (size_t i = 0; i < parts.size(); i += 3) {
    std::pair<std::string, NodeOffer> member;
    DDP_ASSIGN_OR_RETURN(member.first, parts[i].AsString());
    DDP_ASSIGN_OR_RETURN(const int64_t group_rank, parts[i + 1].AsInteger());
    DDP_ASSIGN_OR_RETURN(const std::string offer, parts[i + 2].AsString());
    DDP_ASSIGN_OR_RETURN(member.second, ParseOffer(offer));
    members[group_rank] = std::move(member);
  }
  NodePlacement& placement = round.placement;
  placement.group_rank = -1;
  std::string own_role;
  for (const auto& [rank, member] : members) {
    if (member.first != node) continue;
    placement.group_rank = static_cast<int>(rank);
    own_role = member.second.role;
  }
  placement.group_world_size = static_cast<int>(members.size());
  for (const auto& [rank, member] : members) {
    const NodeOffer& offer = member.second;
    if (rank == placement.group_rank) placement.local_world_size = offer.nproc;
    if (rank < placement.group_rank) placement.first_rank += offer.nproc;
    placement.world_size += offer.nproc;
    if (offer.role != own_role) continue;
    if (rank < placement.group_rank) placement.first_role_rank += offer.nproc;
    placement.role_world_size += offer.nproc;
  }
  placement.master_addr = members.begin()->second.second.master_addr;
  placement.master_port = members.begin()->second.second.master_port;
  round.masters = placement.group_rank == 0;
  DDP_RETURN_IF_ERROR(ValidatePlacement(placement));
  return round;
}

std::string RunPrefix(const std::string& run_id) {
  return absl::StrCat("ddp:{", store::EncodeRunIdForKey(run_id), "}:");
}

// One job under a run id. The token tells it from another job that was given the same number by a
// server that had lost its memory.
struct Instance {
  int64_t number = 0;
  std::string token;
};

absl::StatusOr<Instance> OpenInstance(const RedisRendezvous::Options& options,
                                      store::RedisConnection& connection) {
  const RedisScript open(embedded::scripts::kOpenInstance);
  const std::string prefix = RunPrefix(options.run_id);
  const std::string token = RandomHex();
  DDP_ASSIGN_OR_RETURN(
      const RedisReply reply,
      connection.Eval(open, {prefix + "instance", absl::StrCat(prefix, "opened:", token)},
                      {prefix, absl::StrCat(options.instance), token, Milliseconds(kKeysTimeToLive),
                       Milliseconds(kOpenRequestTimeToLive)},
                      {.idempotent = true}));
  DDP_ASSIGN_OR_RETURN(const absl::Span<const RedisReply> parts, reply.AsArray());
  if (parts.size() != 2) return BadReply("an instance in other than two parts");
  Instance instance;
  DDP_ASSIGN_OR_RETURN(instance.number, parts[0].AsInteger());
  DDP_ASSIGN_OR_RETURN(instance.token, parts[1].AsString());
  if (instance.token.empty()) {
    return absl::NotFoundError(absl::StrCat("run ", options.run_id, " has no instance ",
                                            options.instance, " at Redis at ",
                                            options.endpoint.DebugString()));
  }
  return instance;
}

// Whether trying again could help.
bool IsPassing(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsResourceExhausted(status);
}

}  // namespace

struct RedisRendezvous::State {
  // A request of the agent until it is answered.
  struct Request {
    const RedisScript* script = nullptr;
    std::vector<std::string> args;  // after the common ones
    absl::Time started;
    absl::Duration timeout;
    int tries = 0;
    absl::Status last_error;  // why it is still open
    // Takes the answer; false: ask again later, `last_error` says why.
    std::function<bool(Request&, const Outcome&)> on_outcome;
    std::function<void(absl::Status)> on_error;
  };

  State(const Options& given, EventLoop* event_loop, const Instance& opened_instance)
      : options(given),
        loop(*event_loop),
        instance(opened_instance),
        node(NodeName()),
        key_prefix(absl::StrCat(RunPrefix(given.run_id), "i", opened_instance.number, ":")) {}
  ~State();

  std::vector<std::string> Keys() const;
  std::vector<std::string> Args(const std::vector<std::string>& more) const;
  std::string StoreUrl(const GenerationId& generation) const;

  void Start(Request new_request);
  void Pump();
  void PumpIn(absl::Duration delay);
  void SendRequest();
  void SendHeartbeat();
  void OnRequestReply(uint64_t serial, absl::StatusOr<RedisReply> reply);
  void OnHeartbeatReply(absl::StatusOr<RedisReply> reply);
  void OnCallFailed(const absl::Status& status);
  void OnContact(const absl::Status& status);
  void OnRequestTimeout();
  void FailRequest(absl::Status status);
  void EndRequest();
  void ScheduleHeartbeat();

  bool OnJoinOutcome(Request& asked, const Outcome& outcome, const JoinDone& done);

  const Options options;
  EventLoop& loop;
  const Instance instance;
  const std::string node;
  const std::string key_prefix;
  const Scripts scripts;
  const MonotonicClock clock;
  std::mt19937_64 jitter{std::random_device()()};

  std::optional<ScriptChannel> channel;

  GenerationId seen;  // the highest generation that this node took part in
  int restarts_seen = 0;
  std::string root_cause;

  std::optional<Request> request;
  uint64_t request_serial = 0;  // of `request`; an answer to an earlier one is dropped
  EventLoop::TimerId request_timer = 0;

  bool in_job = false;  // has joined and not left: the lease is renewed
  bool heartbeat_due = false;
  EventLoop::TimerId heartbeat_timer = 0;

  EventLoop::TimerId pump_timer = 0;
  int failures_in_a_row = 0;
  bool in_contact = true;
  std::function<void(const News&)> on_news;
};

RedisRendezvous::RedisRendezvous(std::unique_ptr<State> state) : state_(std::move(state)) {}
RedisRendezvous::~RedisRendezvous() = default;

int64_t RedisRendezvous::instance() const { return state_->instance.number; }

absl::StatusOr<std::unique_ptr<RedisRendezvous>> RedisRendezvous::Open(const Options& options,
                                                                       EventLoop* loop) {
  store::RedisConnectionOptions connection_options;
  connection_options.connect_timeout = std::min(options.reconnect_timeout, options.connect_timeout);
  connection_options.command_timeout = options.reply_timeout;
  connection_options.total_timeout = options.connect_timeout;
  connection_options.client_name = "ddprun";
  DDP_ASSIGN_OR_RETURN(std::unique_ptr<store::RedisConnection> connection,
                       store::RedisConnection::Connect(options.endpoint, connection_options));
  DDP_ASSIGN_OR_RETURN(const Instance instance, OpenInstance(options, *connection));
  auto state = std::make_unique<State>(options, loop, instance);
  state->channel.emplace(std::move(connection), loop, options.reply_timeout);
  return std::unique_ptr<RedisRendezvous>(new RedisRendezvous(std::move(state)));
}

RedisRendezvous::State::~State() {
  loop.CancelTimer(request_timer);
  loop.CancelTimer(heartbeat_timer);
  loop.CancelTimer(pump_timer);
}

std::vector<std::string> RedisRendezvous::State::Keys() const {
  std::vector<std::string> keys;
  for (const char* name :
       {"job", "leases", "joined", "members", "ranks", "completed", "failures"}) {
    keys.push_back(absl::StrCat(key_prefix, name));
  }
  keys.push_back(RunPrefix(options.run_id) + "instance");
  return keys;
}

std::vector<std::string> RedisRendezvous::State::Args(const std::vector<std::string>& more) const {
  std::vector<std::string> args = {node,
                                   Milliseconds(options.lease),
                                   Milliseconds(kKeysTimeToLive),
                                   absl::StrCat(seen.number),
                                   seen.nonce,
                                   absl::StrCat(restarts_seen),
                                   absl::StrCat(instance.number),
                                   instance.token};
  args.insert(args.end(), more.begin(), more.end());
  return args;
}

std::string RedisRendezvous::State::StoreUrl(const GenerationId& generation) const {
  return store::FormatStoreAddress({.endpoint = options.endpoint,
                                    .prefix = absl::StrCat(key_prefix, "g", generation.number, ".",
                                                           generation.nonce, ":store:")});
}

void RedisRendezvous::State::Start(Request new_request) {
  CHECK(!request.has_value()) << "one request at a time";
  request = std::move(new_request);
  request->started = clock.Now();
  ++request_serial;
  request_timer = loop.AddTimer(request->timeout, [this] { OnRequestTimeout(); });
  failures_in_a_row = 0;
  PumpIn(absl::ZeroDuration());
}

void RedisRendezvous::State::PumpIn(absl::Duration delay) {
  loop.CancelTimer(pump_timer);
  pump_timer = loop.AddTimer(delay, [this] { Pump(); });
}

// Sends what is next, if anything is.
void RedisRendezvous::State::Pump() {
  pump_timer = 0;
  if (channel->busy()) return;  // its answer calls again
  if (request.has_value()) {
    SendRequest();
  } else if (heartbeat_due && in_job) {
    SendHeartbeat();
  }
}

void RedisRendezvous::State::SendRequest() {
  ++request->tries;
  const uint64_t serial = request_serial;
  channel->Call(*request->script, Keys(), Args(request->args),
                [this, serial](absl::StatusOr<RedisReply> reply) {
                  OnRequestReply(serial, std::move(reply));
                });
}

void RedisRendezvous::State::SendHeartbeat() {
  channel->Call(scripts.heartbeat, Keys(), Args({}),
                [this](absl::StatusOr<RedisReply> reply) { OnHeartbeatReply(std::move(reply)); });
}

void RedisRendezvous::State::OnRequestReply(uint64_t serial, absl::StatusOr<RedisReply> reply) {
  const bool is_current = request.has_value() && serial == request_serial;
  if (!reply.ok()) {
    if (is_current) request->last_error = reply.status();
    if (is_current && !IsPassing(reply.status())) {
      FailRequest(reply.status());
    } else {
      OnCallFailed(reply.status());
    }
    return;
  }
  OnContact(absl::OkStatus());
  if (!is_current) {
    PumpIn(absl::ZeroDuration());
    return;
  }
  absl::StatusOr<Outcome> outcome = ParseOutcome(*std::move(reply));
  if (!outcome.ok()) {
    FailRequest(outcome.status());
    return;
  }
  if (outcome->name == kForeign) {
    FailRequest(ForeignInstance());
    return;
  }
  restarts_seen = std::max(restarts_seen, outcome->restarts);
  // A copy: an answer ends the request, and may start the next one.
  const auto on_outcome = request->on_outcome;
  if (!on_outcome(*request, *outcome)) {
    PumpIn(std::min(kJoinPollMax, options.lease / 3));
  }
}

void RedisRendezvous::State::OnHeartbeatReply(absl::StatusOr<RedisReply> reply) {
  if (!reply.ok()) {
    OnCallFailed(reply.status());
    return;
  }
  const absl::StatusOr<Outcome> outcome = ParseOutcome(*std::move(reply));
  OnContact(outcome.ok() && outcome->name == kForeign ? ForeignInstance() : outcome.status());
  heartbeat_due = false;
  ScheduleHeartbeat();
  if (request.has_value()) PumpIn(absl::ZeroDuration());
}

// Whatever was sent is sent again after a pause.
void RedisRendezvous::State::OnCallFailed(const absl::Status& status) {
  const int doublings = std::min(failures_in_a_row++, kRetryDoublingsMax);
  const absl::Duration longest = std::min(kRetryPauseMax, kRetryPauseMin * (1 << doublings));
  std::uniform_real_distribution<double> share(0.25, 1.0);
  PumpIn(longest * share(jitter));
  OnContact(status);
}

void RedisRendezvous::State::OnContact(const absl::Status& status) {
  if (status.ok()) failures_in_a_row = 0;
  if (status.ok() == in_contact) return;
  // A connection that was cut and is mended at once is no news.
  if (!status.ok() && IsPassing(status) && failures_in_a_row < kFailuresBeforeOutOfReach) return;
  in_contact = status.ok();
  if (!on_news) return;
  News news;
  news.kind = status.ok() ? News::Kind::kBackInReach : News::Kind::kOutOfReach;
  news.cause = std::string(status.message());
  on_news(news);
}

void RedisRendezvous::State::OnRequestTimeout() {
  request_timer = 0;
  const std::string waited = absl::FormatDuration(request->timeout);
  if (IsPassing(request->last_error) || request->last_error.ok()) {
    FailRequest(absl::UnavailableError(absl::StrCat(
        "no answer from Redis at ", options.endpoint.DebugString(), " in ", waited, " and ",
        request->tries, request->tries == 1 ? " try: " : " tries: ",
        request->last_error.ok() ? "none came yet" : std::string(request->last_error.message()))));
  } else {
    FailRequest(absl::DeadlineExceededError(
        absl::StrCat(std::string(request->last_error.message()), " after ", waited)));
  }
}

void RedisRendezvous::State::FailRequest(absl::Status status) {
  const auto on_error = std::move(request->on_error);
  EndRequest();
  on_error(std::move(status));
}

void RedisRendezvous::State::EndRequest() {
  loop.CancelTimer(std::exchange(request_timer, 0));
  request.reset();
  PumpIn(absl::ZeroDuration());
}

void RedisRendezvous::State::ScheduleHeartbeat() {
  loop.CancelTimer(heartbeat_timer);
  heartbeat_timer = loop.AddTimer(options.lease / 3, [this] {
    heartbeat_due = true;
    // A pause after a failure ends by itself.
    if (pump_timer == 0) PumpIn(absl::ZeroDuration());
  });
}

bool RedisRendezvous::State::OnJoinOutcome(Request& asked, const Outcome& outcome,
                                           const JoinDone& done) {
  if (outcome.name == "waiting") {
    const absl::StatusOr<std::string> present = outcome.Text(0);
    asked.last_error = absl::FailedPreconditionError(absl::StrCat(
        "only ", present.value_or("some"), " of ", options.max_nodes, " nodes have joined"));
    return false;
  }
  if (outcome.name == "ended") {
    const std::string state = outcome.Text(0).value_or("");
    JobEnd end;
    end.kind = state == "succeeded" ? JobEnd::Kind::kSucceeded : JobEnd::Kind::kBudgetSpent;
    EndRequest();
    done(JoinAnswer(end));
    return true;
  }
  absl::StatusOr<Round> round = BadReply(absl::StrCat("outcome ", outcome.name));
  if (outcome.name == "round") round = ParseRound(outcome, node);
  if (round.ok()) {
    round->store_url = StoreUrl(round->generation);
    round->charged = round->restarts > 0;
    round->reason = root_cause;
    seen = round->generation;
    in_job = true;
    ScheduleHeartbeat();
  }
  EndRequest();
  if (!round.ok()) {
    done(round.status());
  } else {
    done(JoinAnswer(*std::move(round)));
  }
  return true;
}

void RedisRendezvous::Join(const NodeOffer& offer, absl::Duration timeout, JoinDone done) {
  State* const state = state_.get();
  State::Request request;
  request.script = &state->scripts.join;
  request.args = {FormatOffer(offer), absl::StrCat(state->options.max_nodes), RandomHex(),
                  absl::StrCat(state->options.max_restarts)};
  request.timeout = timeout;
  request.on_error = done;
  request.on_outcome = [state, done](State::Request& asked, const Outcome& outcome) {
    return state->OnJoinOutcome(asked, outcome, done);
  };
  state->Start(std::move(request));
}

void RedisRendezvous::ReportFailure(const Failure& failure, absl::Duration timeout,
                                    FailureDone done) {
  State* const state = state_.get();
  State::Request request;
  request.script = &state->scripts.report_failure;
  request.args = {absl::StrCat(failure.generation.number), failure.generation.nonce,
                  absl::StrCat(failure.rank), failure.cause,
                  absl::StrCat(state->options.max_restarts)};
  request.timeout = timeout;
  request.on_error = done;
  request.on_outcome = [state, done](State::Request&, const Outcome& outcome) {
    absl::StatusOr<FailureVerdict> verdict = BadReply(absl::StrCat("outcome ", outcome.name));
    using Decision = FailureVerdict::Decision;
    if (outcome.name == "stale") {
      verdict = FailureVerdict{Decision::kStale, {}};
    } else if (outcome.name == "restart") {
      state->root_cause = outcome.Text(0).value_or("");
      verdict = FailureVerdict{Decision::kRestart, {}};
    } else if (outcome.name == "fail") {
      verdict = FailureVerdict{Decision::kEnded,
                               {JobEnd::Kind::kBudgetSpent, outcome.Text(0).value_or("")}};
    }
    state->EndRequest();
    done(std::move(verdict));
    return true;
  };
  state->Start(std::move(request));
}

void RedisRendezvous::Complete(const GenerationId& generation, absl::Duration timeout, Done done) {
  State* const state = state_.get();
  State::Request request;
  request.script = &state->scripts.complete;
  request.args = {absl::StrCat(generation.number), generation.nonce};
  request.timeout = timeout;
  request.on_error = done;
  request.on_outcome = [state, done](State::Request&, const Outcome& outcome) {
    absl::Status status;
    if (outcome.name == "stale") {
      status = absl::AbortedError(
          absl::StrCat("the generation is over, the current one is ", outcome.generation.number));
    } else if (outcome.name != "ok") {
      status = BadReply(absl::StrCat("outcome ", outcome.name));
    }
    state->EndRequest();
    done(std::move(status));
    return true;
  };
  state->Start(std::move(request));
}

void RedisRendezvous::Leave(absl::Duration timeout, Done done) {
  State* const state = state_.get();
  state->in_job = false;
  state->loop.CancelTimer(state->heartbeat_timer);
  State::Request request;
  request.script = &state->scripts.leave;
  request.timeout = timeout;
  request.on_error = done;
  request.on_outcome = [state, done](State::Request&, const Outcome&) {
    state->EndRequest();
    done(absl::OkStatus());
    return true;
  };
  state->Start(std::move(request));
}

void RedisRendezvous::Cancel() {
  if (state_->request.has_value()) state_->EndRequest();
}

void RedisRendezvous::Drain(const GenerationId&, const std::string&, absl::Duration, Done done) {
  state_->loop.AddTimer(absl::ZeroDuration(), [done] { done(absl::UnimplementedError("drain")); });
}

void RedisRendezvous::Close(const JobEnd&, absl::Duration, Done done) {
  state_->loop.AddTimer(absl::ZeroDuration(), [done] { done(absl::UnimplementedError("close")); });
}

void RedisRendezvous::SetReport(const NodeReport&) {}
int64_t RedisRendezvous::median_busy_us() const { return -1; }

void RedisRendezvous::Watch(std::function<void(const News&)> on_news) {
  state_->on_news = std::move(on_news);
}

}  // namespace ddp::elastic
