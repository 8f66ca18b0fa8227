// Length: one state machine. Each reply and each push changes the request, the membership and the
// heartbeats together, so a part would need most of the fields.

#include "elastic/rendezvous/rendezvous_core.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "glog/logging.h"
#include "store/redis/percent_encoding.h"
#include "store/redis/redis_errors.h"
#include "xxhash.h"

namespace ddp::elastic {
namespace {

constexpr absl::Duration kKeysTimeToLive = absl::Hours(24);
// Time in which a request to open an instance may be sent again.
constexpr absl::Duration kOpenRequestTimeToLive = absl::Minutes(10);

// Upper bound of the pause after the first failure; it doubles with each further one.
constexpr absl::Duration kPauseMin = absl::Milliseconds(20);
constexpr int kPauseDoublingsMax = 12;
constexpr int kFailuresBeforeOutOfReach = 3;

// A waiting node asks for the text of its condition only in every fourth repeated join.
constexpr int kBriefHeartbeats = 4;
// With more waiting nodes, each repeats its join less often than a member sends heartbeats.
constexpr int kWaitingAtFullPaceMax = 32;

template <typename... Handlers>
struct Overload : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overload(Handlers...) -> Overload<Handlers...>;

std::string Milliseconds(absl::Duration duration) {
  return absl::StrCat(absl::ToInt64Milliseconds(duration));
}

// Returns true when another try may succeed. A server without memory may have some again.
bool IsTransient(const absl::Status& status) {
  return store::IsTransient(status) || absl::IsResourceExhausted(status);
}

absl::Status ForeignInstance() {
  return absl::FailedPreconditionError(
      "Redis lost its memory, and another job with the same run id has taken this job's place; "
      "give each job its own --rdzv-id");
}

absl::Status UnknownOutcome(const ScriptReply& reply) {
  return absl::InternalError(
      absl::StrCat("the rendezvous answers nonsense: outcome ", reply.outcome));
}

absl::Status GenerationIsOver(const ScriptReply& reply) {
  return absl::AbortedError(
      absl::StrCat("the generation is over, the current one is ", reply.generation.number));
}

// `known`: the program of the job's other nodes, as JobSpec::program.
absl::Status OtherProgram(const JobSpec& job, const std::string& known) {
  const auto text = [](const std::string& program) {
    return OneLine(program.substr(std::min(program.size(), program.find(' ') + 1)));
  };
  return absl::FailedPreconditionError(absl::StrCat(
      "run id ", job.run_id, " is taken by another program: its nodes run `", text(known),
      "`, this one `", text(job.program),
      "`; give each job its own --rdzv-id, or allow this by --rdzv-conf=any_program=1"));
}

std::string Step64(int64_t step) { return absl::StrCat(std::max<int64_t>(-1, step)); }

std::string Describe(std::monostate) { return "done"; }

std::string Describe(const JobEnd& end) {
  return absl::StrCat("ended, ", JobEndName(end.kind), " ", end.reason);
}

std::string Describe(const Round& round) {
  return absl::StrCat(
      "round ", round.generation.number, ", group rank ", round.placement.group_rank, " of ",
      round.placement.group_world_size, ", ranks from ", round.placement.first_rank, " of ",
      round.placement.world_size, ", restarts ", round.restarts,
      round.reason.empty() ? "" : ", after: ", round.reason, round.charged ? " (charged)" : "");
}

std::string Describe(const FailureVerdict& verdict) {
  switch (verdict.decision) {
    case FailureVerdict::Decision::kRestart:
      return "restart";
    case FailureVerdict::Decision::kStale:
      return "stale";
    case FailureVerdict::Decision::kEnded:
      break;
  }
  return Describe(verdict.end);
}

std::string Describe(const News& news) {
  switch (news.kind) {
    case News::Kind::kGenerationOver:
      return absl::StrCat("generation ", news.generation.number, " is over: ", news.cause);
    case News::Kind::kDrain:
      return absl::StrCat("stop after step ", news.stop_at_step, ": ", news.cause);
    case News::Kind::kJobEnded:
      return absl::StrCat("the job has ended, ", JobEndName(news.end.kind), " ", news.end.reason);
    case News::Kind::kEvicted:
      return absl::StrCat("evicted: ", news.cause);
    case News::Kind::kOutOfReach:
      return absl::StrCat("out of reach: ", news.cause);
    case News::Kind::kBackInReach:
      return "back in reach";
    case News::Kind::kStoreWarning:
      return news.cause;
    case News::Kind::kWaiting:
      return absl::StrCat("waiting: ", news.cause);
  }
  return "";
}

}  // namespace

std::string DebugString(const RendezvousCore::Action& action) {
  using Core = RendezvousCore;
  return std::visit(
      Overload{
          [](const Core::CallScript& a) {
            return absl::StrCat("call ", ToString(a.script), " ", absl::StrJoin(a.args, "|"));
          },
          [](const Core::Subscribe& a) { return absl::StrCat("subscribe to ", a.channel); },
          [](const Core::Answer& a) {
            if (!a.answer.ok()) return absl::StrCat("answer: ", a.answer.status().message());
            return absl::StrCat(
                "answer: ",
                std::visit([](const auto& answer) { return Describe(answer); }, *a.answer));
          },
          [](const Core::Notify& a) { return absl::StrCat("news: ", Describe(a.news)); },
      },
      action);
}

RendezvousCore::RendezvousCore(Options options)
    : options_(std::move(options)), random_(options_.seed) {
  open_token_ = RandomHex();
}

std::vector<RendezvousCore::Action> RendezvousCore::Step(const Event& event, absl::Time now) {
  now_ = now;
  actions_.clear();
  std::visit([this](const auto& e) { On(e); }, event);
  if (request_.has_value() && now_ >= request_->deadline) OnRequestTimeout();
  Pump();
  return std::exchange(actions_, {});
}

absl::Time RendezvousCore::next_deadline() const {
  absl::Time next = subscribe_at_;
  if (request_.has_value()) next = std::min(next, request_->deadline);
  // A call in flight needs no deadline here: a Replied event always follows.
  if (!in_flight_.has_value()) next = std::min(next, NextSend());
  return next;
}

template <typename A>
void RendezvousCore::Do(A action) {
  actions_.emplace_back(std::in_place_type<A>, std::move(action));
}

// Time and chance. --------------------------------------------------------------------------------

absl::Duration RendezvousCore::lease() const {
  return opened_.has_value() ? absl::Milliseconds(opened_->lease_ms) : options_.job.rules.lease;
}

absl::Duration RendezvousCore::heartbeat() const {
  const absl::Duration wanted = options_.job.rules.HeartbeatInterval(lease());
  return std::max(absl::Milliseconds(1), std::min(wanted, lease() / 3));
}

// When a waiting node sends its join again.
absl::Time RendezvousCore::NextSignOfLife() {
  return ask_again_ ? now_ : now_ + request_->pace * (0.9 + 0.2 * Share());
}

// Thousands of waiting nodes must not keep the server from those that still join. The slower pace
// is safe: a push announces the round, and a node that was given up returns with its next join.
absl::Duration RendezvousCore::PaceOfWaiting(int64_t nodes) const {
  return nodes <= kWaitingAtFullPaceMax ? heartbeat() : std::max(heartbeat(), lease() / 4);
}

// Full jitter: the clients of a server that comes back must not all call at once.
absl::Duration RendezvousCore::Pause(int failures) {
  const int doublings = std::min(failures - 1, kPauseDoublingsMax);
  const absl::Duration longest =
      std::min({kPauseMin * (1 << doublings), lease() / 6, options_.pause_max});
  return std::max(absl::Milliseconds(1), longest * Share());
}

std::string RendezvousCore::RandomHex() { return absl::StrFormat("%016x", random_()); }

// Jobs without a run id share the keys of one run; their tokens tell them apart. The name is a
// hash, which keeps the token secret.
std::string RendezvousCore::run_id() const {
  if (options_.job.fingerprint.empty() || !opened_.has_value()) return options_.job.run_id;
  const std::string& token = opened_->token;
  return absl::StrFormat("%s-%016x", options_.job.run_id, XXH3_64bits(token.data(), token.size()));
}

std::string RendezvousCore::RunPrefix() const {
  return absl::StrCat("ddp:{", store::EncodeRunIdForKey(options_.job.run_id), "}:");
}

std::string RendezvousCore::KeyPrefix() const {
  return absl::StrCat(RunPrefix(), "i", opened_->number, ":");
}

// Requests. ---------------------------------------------------------------------------------------

void RendezvousCore::On(const Ask& event) {
  CHECK(!request_.has_value()) << "one request at a time";
  ++request_serial_;
  request_ = Request();
  request_->what = event.request;
  request_->timeout = event.timeout;
  request_->deadline = now_ + event.timeout;
  request_->send_at = now_;
  request_->pace = heartbeat();
  // The agent waits for this request, so it is sent soon even after failures.
  failures_in_a_row_ = std::min(failures_in_a_row_, 1);
  pause_until_ = std::min(pause_until_, now_ + kPauseMin * Share());
  if (const auto* join = std::get_if<JoinRequest>(&event.request)) {
    host_ = join->offer.host;
    const absl::Status valid = ValidateOffer(join->offer);
    if (!valid.ok()) Finish(valid);
  } else if (GoesForGood()) {
    if (std::holds_alternative<LeaveRequest>(event.request)) mine_.reset();
    left_ = true;
    // The store does not know this node: nothing to do.
    if (!opened_.has_value() && !in_flight_.has_value()) Finish(AnswerOf(absl::OkStatus()));
  }
}

void RendezvousCore::On(const Tick&) {
  if (now_ >= subscribe_at_ && opened_.has_value()) {
    // Wait until the call that is being retried has reached the server.
    if (failures_in_a_row_ > 0) {
      subscribe_at_ = now_ + lease() / 6;
      return;
    }
    subscribe_at_ = absl::InfiniteFuture();
    Do(Subscribe{KeyPrefix() + "news"});
  }
}

void RendezvousCore::OnRequestTimeout() {
  const Request& request = *request_;
  const std::string waited = absl::FormatDuration(request.timeout);
  if (!request.waiting_for.empty() && request.last_error.ok()) {
    Finish(absl::DeadlineExceededError(absl::StrCat(request.waiting_for, " after ", waited)));
    return;
  }
  Finish(absl::UnavailableError(absl::StrCat(
      "no answer from Redis at ", options_.endpoint.DebugString(), " in ", waited, " and ",
      request.tries, request.tries == 1 ? " try: " : " tries: ",
      request.last_error.ok() ? "none came yet" : std::string(request.last_error.message()))));
}

void RendezvousCore::Finish(RendezvousAnswer answer) {
  request_.reset();
  Do(Answer{std::move(answer)});
}

// Sending. ----------------------------------------------------------------------------------------

bool RendezvousCore::SendsHeartbeats() const { return mine_.has_value() && !left_ && !ended_; }

// Returns true when the outstanding request is this node's last. Such a request has succeeded where
// the job no longer exists.
bool RendezvousCore::GoesForGood() const {
  return request_.has_value() && (std::holds_alternative<LeaveRequest>(request_->what) ||
                                  std::holds_alternative<TakeBackRequest>(request_->what));
}

// When the next call is due, if none is in flight.
absl::Time RendezvousCore::NextSend() const {
  absl::Time next = absl::InfiniteFuture();
  if (request_.has_value()) {
    next = request_->send_at;
  } else if (SendsHeartbeats()) {
    next = heartbeats_.due();
  } else if (wants_open_ && !opened_.has_value()) {
    next = absl::InfinitePast();
  }
  return std::max(next, pause_until_);
}

void RendezvousCore::Pump() {
  if (in_flight_.has_value() || now_ < NextSend()) return;
  if (!opened_.has_value() || (forgotten_ && !GoesForGood())) {
    SendOpen();
  } else if (request_.has_value()) {
    SendRequest();
  } else {
    SendHeartbeat();
  }
}

void RendezvousCore::SendOpen() {
  const std::string prefix = RunPrefix();
  const std::string& token = opened_.has_value() ? opened_->token : open_token_;
  const int64_t wanted = opened_.has_value() ? opened_->number : options_.instance;
  in_flight_ = InFlight{ScriptName::kOpenInstance, request_.has_value() ? request_serial_ : 0};
  if (request_.has_value()) ++request_->tries;
  const JobLimits& limits = options_.job.limits;
  const auto& rules = options_.job.rules;
  Do(CallScript{ScriptName::kOpenInstance,
                {prefix + "instance", absl::StrCat(prefix, "opened:", token)},
                EncodeArguments(ScriptName::kOpenInstance,
                                {{"prefix", prefix},
                                 {"wanted", absl::StrCat(wanted)},
                                 {"token", token},
                                 {"is_known", opened_.has_value() ? "1" : "0"},
                                 {"fingerprint", options_.job.fingerprint},
                                 {"ttl_ms", Milliseconds(kKeysTimeToLive)},
                                 {"request_ttl_ms", Milliseconds(kOpenRequestTimeToLive)},
                                 {"lease_ms", Milliseconds(lease())},
                                 {"heartbeat_ms", Milliseconds(heartbeat())},
                                 {"max_restarts", absl::StrCat(limits.max_restarts)},
                                 {"min_nodes", absl::StrCat(limits.min_nodes)},
                                 {"max_nodes", absl::StrCat(limits.max_nodes)},
                                 {"last_call_ms", Milliseconds(rules.last_call)},
                                 {"no_progress_limit", absl::StrCat(rules.no_progress_limit)},
                                 {"quarantine_strikes", absl::StrCat(rules.quarantine_strikes)},
                                 {"cooldown_ms", Milliseconds(rules.quarantine_cooldown)},
                                 {"max_node_losses", absl::StrCat(rules.max_node_losses)},
                                 {"scale_up_delay_ms", Milliseconds(rules.scale_up_delay)},
                                 {"node_unit", absl::StrCat(rules.node_unit)}})});
}

void RendezvousCore::Send(ScriptName script, const GenerationId& about,
                          std::vector<ScriptArgument> arguments) {
  const std::string prefix = KeyPrefix();
  const bool is_mine = mine_.has_value() && mine_->generation == about;
  arguments.insert(arguments.end(), {{"node", options_.node},
                                     {"token", opened_->token},
                                     {"seen_generation", absl::StrCat(seen_.number)},
                                     {"seen_nonce", seen_.nonce},
                                     {"seen_restarts", absl::StrCat(restarts_seen_)},
                                     {"generation", absl::StrCat(about.number)},
                                     {"nonce", about.nonce},
                                     {"row", is_mine ? mine_->row : ""},
                                     {"next_nonce", RandomHex()}});
  Do(CallScript{script, {prefix + "job", prefix + "leases"}, EncodeArguments(script, arguments)});
}

std::vector<ScriptArgument> RendezvousCore::ArgumentsOf(const RendezvousRequest& what,
                                                        ScriptName& script, GenerationId& about) {
  using Arguments = std::vector<ScriptArgument>;
  return std::visit(
      Overload{
          [&](const JoinRequest& r) -> Arguments {
            script = ScriptName::kJoin;
            return {{"offer", FormatOffer(r.offer)},
                    {"only_changes", now_ < request_->brief_until ? "1" : "0"},
                    {"program", options_.job.program}};
          },
          [&](const FailureRequest& failure) -> Arguments {
            script = ScriptName::kReportFailure;
            about = failure.generation;
            return {{"rank", absl::StrCat(failure.rank)},
                    {"host", OneLine(host_)},
                    {"cause", OneLine(failure.cause)},
                    {"is_victim", failure.is_victim ? "1" : "0"},
                    {"step", Step64(failure.step)},
                    {"progress_known", failure.progress_known ? "1" : "0"},
                    {"exit_code", absl::StrCat(failure.exit_code)},
                    {"instead_of", absl::StrCat(failure.instead_of)},
                    // Some nodes hear of a drain late, so workers may be killed before the timeout.
                    {"grace_ms", failure.is_unprompted
                                     ? Milliseconds(options_.job.times.shutdown_timeout / 2)
                                     : "0"}};
          },
          [&](const CompleteRequest& r) -> Arguments {
            script = ScriptName::kComplete;
            about = r.generation;
            return {};
          },
          [&](const DrainRequest& r) -> Arguments {
            script = ScriptName::kDrain;
            about = r.generation;
            return {{"cause", OneLine(r.cause)}};
          },
          [&](const TakeBackRequest& r) -> Arguments {
            script = ScriptName::kTakeBack;
            about = r.generation;
            return {};
          },
          [&](const LeaveRequest& r) -> Arguments {
            script = ScriptName::kLeave;
            return {{"in_order", r.in_order ? "1" : ""}};
          },
          [&](const CloseRequest& r) -> Arguments {
            script = ScriptName::kClose;
            return {{"kind", JobEndName(r.end.kind)},
                    {"exit_code", absl::StrCat(r.end.exit_code)},
                    {"reason", OneLine(r.end.reason)}};
          },
      },
      what);
}

void RendezvousCore::SendRequest() {
  ScriptName script = ScriptName::kJoin;
  GenerationId about;
  if (mine_.has_value()) about = mine_->generation;
  std::vector<ScriptArgument> arguments = ArgumentsOf(request_->what, script, about);
  ++request_->tries;
  in_flight_ = InFlight{script, request_serial_};
  ask_again_ = false;
  Send(script, about, std::move(arguments));
}

// Makes a heartbeat due at once: it fetches what this node may have missed.
void RendezvousCore::SendHeartbeatNow() {
  ask_again_ = true;
  heartbeats_.BeDueAt(now_);
}

void RendezvousCore::SendHeartbeat() {
  ask_again_ = false;
  in_flight_ = InFlight{.script = ScriptName::kHeartbeat};
  std::vector<ScriptArgument> arguments = heartbeats_.Compose(now_);
  arguments.push_back({"completed", mine_->completed ? "1" : ""});
  Send(ScriptName::kHeartbeat, mine_->generation, std::move(arguments));
}

// Replies. ----------------------------------------------------------------------------------------

void RendezvousCore::On(const Replied& event) {
  CHECK(in_flight_.has_value()) << "a reply to nothing";
  const InFlight call = *std::exchange(in_flight_, std::nullopt);
  const bool is_awaited = request_.has_value() && call.request == request_serial_;
  if (!event.reply.ok()) {
    const absl::Status& status = event.reply.status();
    if (is_awaited) request_->last_error = status;
    OnFailedCall(status);
    if (is_awaited && !IsTransient(status)) Finish(status);
    return;
  }
  if (call.script == ScriptName::kOpenInstance) return OnOpened(*event.reply);
  const absl::StatusOr<ScriptReply> reply = ParseScriptReply(*event.reply);
  if (!reply.ok()) {
    OnFailedCall(reply.status());
    if (is_awaited) Finish(reply.status());
    return;
  }
  OnTransition(call, *reply);
}

void RendezvousCore::OnOpened(const store::RedisReply& reply) {
  const absl::StatusOr<OpenedInstance> opened = ParseOpenedInstance(reply);
  absl::Status status = opened.status();
  wants_open_ = false;
  if (opened.ok() && opened->token.empty()) {
    status = absl::NotFoundError(absl::StrCat("run ", options_.job.run_id, " has no instance ",
                                              opened->number, " at Redis at ",
                                              options_.endpoint.DebugString()));
  }
  if (status.ok() && forgotten_ && opened->token != opened_->token) {
    if (options_.job.fingerprint.empty() && options_.instance == 0) return OnReplaced();
    status = ForeignInstance();
  }
  open_status_ = status;
  if (!status.ok()) {
    OnFailedCall(status);
    if (request_.has_value()) Finish(status);
    return;
  }
  OnContact(absl::OkStatus());
  const bool is_new = !opened_.has_value() || opened_->number != opened->number;
  opened_ = *opened;
  forgotten_ = false;
  if (const auto left = left_jobs_.find(opened_->token); left != left_jobs_.end()) {
    std::tie(seen_, restarts_seen_) = left->second;
    left_jobs_.erase(left);
  }
  // The server may have lost what earlier heartbeats reported.
  heartbeats_.ForgetWhatWasSaid();
  if (is_new && !opened_->evicting_policy.empty()) {
    Do(Notify{{.kind = News::Kind::kStoreWarning,
               .cause = absl::StrCat("Redis at ", options_.endpoint.DebugString(),
                                     " evicts keys when its memory is short (maxmemory-policy ",
                                     OneLine(opened_->evicting_policy),
                                     "), also those of this job: set it to noeviction")}});
  }
  if (is_new && !left_) {
    subscribe_at_ = absl::InfiniteFuture();
    was_heard_ = false;
    Do(Subscribe{KeyPrefix() + "news"});
  }
}

// The failed call is sent again after a pause.
void RendezvousCore::OnFailedCall(const absl::Status& status) {
  pause_until_ = now_ + Pause(++failures_in_a_row_);
  if (request_.has_value()) request_->brief_until = absl::InfinitePast();
  if (request_.has_value() && request_->rest.has_value()) {
    request_->deadline = now_ + *std::exchange(request_->rest, std::nullopt);
  }
  OnContact(status);
}

void RendezvousCore::OnContact(const absl::Status& status) {
  if (status.ok()) {
    // The connection works again, so subscribe at once too.
    if (failures_in_a_row_ > 0 && subscribe_at_ < absl::InfiniteFuture()) subscribe_at_ = now_;
    failures_in_a_row_ = 0;
    pause_until_ = absl::InfinitePast();
  }
  const bool for_good = !status.ok() && !IsTransient(status);
  if (status.ok() == in_contact_ && (!for_good || notified_for_good_)) return;
  // A short interruption is not notified: only the third failure in a row is.
  if (!status.ok() && IsTransient(status) && failures_in_a_row_ < kFailuresBeforeOutOfReach) return;
  in_contact_ = status.ok();
  notified_for_good_ = for_good;
  News news;
  news.for_good = for_good;
  news.kind = in_contact_ ? News::Kind::kBackInReach : News::Kind::kOutOfReach;
  news.cause = OneLine(std::string(status.message()));
  Do(Notify{std::move(news)});
}

void RendezvousCore::OnTransition(const InFlight& call, const ScriptReply& reply) {
  const bool is_awaited = request_.has_value() && call.request == request_serial_;
  if (reply.outcome == "unknown" || reply.outcome == "foreign") {
    // The job is gone, so there is nothing to leave.
    if (is_awaited && GoesForGood()) return Finish(AnswerOf(absl::OkStatus()));
    forgotten_ = true;
    // A job that has not begun is not restored: open another one.
    if (seen_.number == 0 && options_.instance == 0) OpenAnother();
    return;
  }
  OnContact(absl::OkStatus());
  was_heard_ = true;
  restarts_seen_ = std::max(restarts_seen_, reply.restarts);
  if (reply.generation.number > seen_.number) seen_ = reply.generation;
  if (call.script == ScriptName::kHeartbeat) return OnHeartbeat(reply);
  if (!is_awaited) return;
  request_->last_error = absl::OkStatus();
  const RendezvousRequest asked = request_->what;
  std::visit([&](const auto& what) { OnAnswer(what, reply); }, asked);
}

void RendezvousCore::OnHeartbeat(const ScriptReply& reply) {
  heartbeats_.OnAnswer(now_, Share());
  if (ask_again_) SendHeartbeatNow();
  if (!mine_.has_value()) return;
  if (reply.outcome == "ok") {
    median_busy_us_ = reply.number(0, -1);
    at_work_ = ParseRankAtWork(reply.text(2));
    if (!reply.text(1).empty()) {
      Do(Notify{{.kind = News::Kind::kStoreWarning, .cause = OneLine(reply.text(1))}});
    }
  } else if (reply.outcome == "drain") {
    NotifyDrain(reply.number(0, -1), reply.text(1));
  } else if (reply.outcome == "over") {
    NotifyOver(reply.text(0));
  } else if (reply.outcome == "ended") {
    NotifyEnd(ParseEndReply(reply));
  } else if (reply.outcome == "evicted" || reply.outcome == "reopen") {
    News news;
    news.kind = News::Kind::kEvicted;
    news.generation = mine_->generation;
    news.cause = reply.outcome == "reopen" ? "all nodes of the job were given up for lost"
                                           : OneLine(reply.text(0));
    mine_.reset();
    Do(Notify{std::move(news)});
    if (reply.outcome == "reopen") OpenAnother();
  } else {
    OnContact(UnknownOutcome(reply));
  }
}

void RendezvousCore::OnAnswer(const JoinRequest&, const ScriptReply& reply) {
  if (reply.outcome == "round") {
    OnRound(reply);
  } else if (reply.outcome == "waiting" || reply.outcome == "spare") {
    OnWaiting(reply, reply.outcome == "spare");
  } else if (reply.outcome == "same") {
    request_->send_at = NextSignOfLife();
  } else if (reply.outcome == "ended") {
    ended_ = true;
    Finish(ParseEndReply(reply));
  } else if (reply.outcome == "reopen" && options_.instance == 0) {
    mine_.reset();
    OpenAnother();
  } else if (reply.outcome == "reopen") {
    Finish(absl::FailedPreconditionError("all nodes of the job were lost"));
  } else if (reply.outcome == "refused") {
    Finish(OtherProgram(options_.job, reply.text(0)));
  } else {
    Finish(UnknownOutcome(reply));
  }
}

void RendezvousCore::OnRound(const ScriptReply& reply) {
  absl::StatusOr<Round> round = ParseRoundReply(reply);
  if (!round.ok()) return Finish(round.status());
  const GenerationId& generation = round->generation;
  round->run_id = run_id();
  round->store_url =
      store::FormatStoreAddress({.endpoint = options_.endpoint,
                                 .prefix = absl::StrCat(KeyPrefix(), "g", generation.number, ".",
                                                        generation.nonce, ":store:")});
  seen_ = generation;
  mine_ = Membership{.generation = generation, .row = reply.text(0)};
  median_busy_us_ = -1;
  at_work_.reset();
  const double row_share = Share();
  heartbeats_.Start(
      {.interval = heartbeat(), .lease = lease(), .nodes = round->placement.group_world_size}, now_,
      row_share, Share());
  Finish(*std::move(round));
}

void RendezvousCore::OnWaiting(const ScriptReply& reply, bool is_spare) {
  Request& request = *request_;
  request.pace = PaceOfWaiting(reply.number(1, 0));
  request.send_at = NextSignOfLife();
  request.brief_until = now_ + request.pace * kBriefHeartbeats;
  if (const int64_t held_ms = reply.number(2, 0); held_ms > 0) {
    request.send_at = std::min(request.send_at, now_ + absl::Milliseconds(held_ms));
    request.brief_until = absl::InfinitePast();
  }
  if (is_spare && !request.rest.has_value()) {
    request.rest = std::max(absl::ZeroDuration(), request.deadline - now_);
    request.deadline = absl::InfiniteFuture();
  } else if (!is_spare && request.rest.has_value()) {
    request.deadline = now_ + *std::exchange(request.rest, std::nullopt);
  }
  // The condition in the first answer often no longer holds a moment later, so it is not notified.
  const std::string text = OneLine(reply.text(0));
  const bool is_news =
      ++request.times_waited > 1 && (text != request.waiting_for || request.times_waited == 2);
  request.waiting_for = text;
  if (!is_news) return;
  News news;
  news.kind = News::Kind::kWaiting;
  news.cause = text;
  Do(Notify{std::move(news)});
}

// Other agents reached the emptied server first and opened the job of this run id again. The job
// must not run twice: this node's workers are evicted, and the node joins the others.
void RendezvousCore::OnReplaced() {
  OnContact(absl::OkStatus());
  OpenAnother();
  if (!mine_.has_value()) return;
  News news;
  news.kind = News::Kind::kEvicted;
  news.generation = mine_->generation;
  news.cause = "the store lost its memory, and the job was begun anew without this node";
  mine_.reset();
  Do(Notify{std::move(news)});
}

// The job was given up before this node was part of it. Opens another one and keeps no state.
void RendezvousCore::OpenAnother() {
  if (opened_.has_value() && seen_.number > 0) {
    left_jobs_[opened_->token] = {seen_, restarts_seen_};
  }
  opened_.reset();
  forgotten_ = false;
  subscribe_at_ = absl::InfiniteFuture();  // no channel until the next job is open
  open_token_ = RandomHex();
  seen_ = GenerationId();
  restarts_seen_ = 0;
}

void RendezvousCore::OnAnswer(const FailureRequest& asked, const ScriptReply& reply) {
  using Decision = FailureVerdict::Decision;
  RendezvousAnswer verdict = UnknownOutcome(reply);
  if (reply.outcome == "restart") {
    verdict = FailureVerdict{Decision::kRestart, {}};
  } else if (reply.outcome == "stale" || reply.outcome == "reopen") {
    verdict = FailureVerdict{Decision::kStale, {}};
  } else if (reply.outcome == "ended") {
    ended_ = true;
    verdict = FailureVerdict{Decision::kEnded, ParseEndReply(reply)};
  }
  if (mine_.has_value() && mine_->generation == asked.generation) mine_->notified_over = true;
  Finish(std::move(verdict));
}

void RendezvousCore::OnAnswer(const CompleteRequest& asked, const ScriptReply& reply) {
  if (reply.outcome == "ok") {
    if (mine_.has_value() && mine_->generation == asked.generation) mine_->completed = true;
    return Finish(AnswerOf(absl::OkStatus()));
  }
  if (reply.outcome == "stale" || reply.outcome == "reopen") {
    if (mine_.has_value()) mine_->notified_over = true;
    return Finish(GenerationIsOver(reply));
  }
  if (reply.outcome != "ended") return Finish(UnknownOutcome(reply));
  const JobEnd end = ParseEndReply(reply);
  const bool succeeded = end.kind == JobEnd::Kind::kSucceeded;
  Finish(AnswerOf(succeeded ? absl::OkStatus() : absl::AbortedError("the job has ended")));
  NotifyEnd(end);
}

void RendezvousCore::OnAnswer(const DrainRequest&, const ScriptReply& reply) {
  Finish(AnswerOf(reply.outcome == "drain" ? absl::OkStatus() : GenerationIsOver(reply)));
  if (reply.outcome == "drain") {
    NotifyDrain(reply.number(0, -1), reply.text(1));
  } else if (reply.outcome == "ended") {
    NotifyEnd(ParseEndReply(reply));
  }
}

void RendezvousCore::OnAnswer(const CloseRequest&, const ScriptReply&) {
  ended_ = true;
  Finish(AnswerOf(absl::OkStatus()));
}

// Pushed messages. --------------------------------------------------------------------------------

void RendezvousCore::On(const Subscribed&) {
  failed_subscriptions_ = 0;
  if (!was_heard_) return;
  // A message may have been published between the last answer and the subscription.
  SendHeartbeatNow();
  if (request_.has_value()) request_->send_at = now_;
}

void RendezvousCore::On(const SubscriptionEnded&) {
  if (left_ || !opened_.has_value()) return;
  subscribe_at_ = now_ + Pause(++failed_subscriptions_);
}

void RendezvousCore::On(const Pushed& event) {
  const absl::StatusOr<PushedMessage> message = ParsePushedMessage(event.text);
  // The message makes no sense or is about another job. The next heartbeat tells the state.
  if (!message.ok() || !opened_.has_value() || message->token != opened_->token) return;
  const bool joins = request_.has_value() && std::holds_alternative<JoinRequest>(request_->what);
  const bool is_mine = mine_.has_value() && mine_->generation == message->generation;
  switch (message->kind) {
    case PushedMessage::Kind::kOver:
      if (is_mine) NotifyOver(message->cause);
      return;
    case PushedMessage::Kind::kDrain:
      if (is_mine) NotifyDrain(message->stop_at_step, message->cause);
      return;
    case PushedMessage::Kind::kEnded:
      if (!request_.has_value() && mine_.has_value()) return NotifyEnd(message->end);
      break;
    case PushedMessage::Kind::kRound:
      if (is_mine) return;
      break;
    case PushedMessage::Kind::kAbandoned:
      break;
  }
  // A join's answer is ready, or a new round has begun without this node.
  SendHeartbeatNow();
  if (joins) request_->send_at = now_;
}

void RendezvousCore::NotifyOver(const std::string& cause) {
  if (!mine_.has_value() || std::exchange(mine_->notified_over, true)) return;
  // The agent that reports the failure gets the answer to its report instead.
  if (request_.has_value() && std::holds_alternative<FailureRequest>(request_->what)) return;
  News news;
  news.kind = News::Kind::kGenerationOver;
  news.generation = mine_->generation;
  news.cause = OneLine(cause);
  Do(Notify{std::move(news)});
}

void RendezvousCore::NotifyDrain(int64_t stop_at_step, const std::string& cause) {
  if (!mine_.has_value() || mine_->notified_over || std::exchange(mine_->notified_drain, true))
    return;
  News news;
  news.kind = News::Kind::kDrain;
  news.generation = mine_->generation;
  news.stop_at_step = std::max<int64_t>(-1, stop_at_step);
  news.cause = OneLine(cause);
  Do(Notify{std::move(news)});
}

void RendezvousCore::NotifyEnd(const JobEnd& end) {
  if (std::exchange(ended_, true)) return;
  News news;
  news.kind = News::Kind::kJobEnded;
  if (mine_.has_value()) news.generation = mine_->generation;
  news.end = end;
  Do(Notify{std::move(news)});
}

}  // namespace ddp::elastic
