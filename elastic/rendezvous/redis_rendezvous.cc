#include "elastic/rendezvous/redis_rendezvous.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "elastic/rendezvous/rendezvous_connection.h"
#include "elastic/rendezvous/rendezvous_core.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "glog/logging.h"
#include "store/redis/redis_connection.h"
#include "store/redis/redis_errors.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::elastic {
namespace {

using Core = RendezvousCore;
using store::RedisReply;

// A server that does not answer an attempt to connect may be far away. Attempts grow up to this
// limit.
constexpr absl::Duration kLongestAttempt = absl::Seconds(4);

// Bounds the log lines about refusals: a server may word each refusal differently.
constexpr size_t kMaxRefusalsLogged = 10;

uint64_t RandomBits() {
  uint64_t bits = 0;
  CHECK_EQ(getrandom(&bits, sizeof(bits), 0), static_cast<ssize_t>(sizeof(bits)));
  return bits;
}

// Returns a name that is unique among all agents that ever ran.
std::string NodeName() {
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host[0] = '?';
  return absl::StrCat(host.data(), "-", getpid(), "-", absl::StrFormat("%016x", RandomBits()));
}

Core::Options CoreOptions(const RedisRendezvous::Options& given) {
  Core::Options options;
  options.job = given.job;
  options.node = NodeName();
  options.endpoint = given.endpoint;
  options.instance = given.instance;
  options.pause_max = given.retry_pause_max;
  options.seed = RandomBits();
  return options;
}

store::RedisConnectionOptions ConnectionOptions(const RedisRendezvous::Options& options) {
  store::RedisConnectionOptions connection;
  connection.first_connect_timeout = options.first_attempt;
  connection.connect_timeout =
      std::min(std::max(kLongestAttempt, options.first_attempt), options.connect_timeout);
  connection.command_timeout = options.reply_timeout;
  connection.total_timeout = options.connect_timeout;
  connection.resp3 = true;
  connection.client_name = "ddprun";
  return connection;
}

}  // namespace

// Passes events to the core and carries out its actions. Events that arrive meanwhile are queued:
// the core handles one event at a time.
struct RedisRendezvous::State {
  State(const Options& given, EventLoop* event_loop)
      : options(given),
        loop(*event_loop),
        core(CoreOptions(given)),
        connection(given.endpoint, ConnectionOptions(given), event_loop,
                   {.on_subscribed = [this] { Post(Core::Subscribed{}); },
                    .on_push = [this](std::string text) { Post(Core::Pushed{std::move(text)}); },
                    .on_end =
                        [this](const absl::Status& why) {
                          LogRefusal(why);
                          Post(Core::SubscriptionEnded{});
                        }}) {}
  ~State() {
    loop.CancelTimer(deadline_timer);
    loop.CancelTimer(request_timer);
  }

  absl::Status Open();

  // Handles an event from the loop.
  void Post(Core::Event event);
  // Queues a request of the agent, which is answered later.
  void Request(Core::Ask request, Done request_done);
  void Run();
  void ArmDeadline();
  void LogRefusal(const absl::Status& why);

  void Do(const Core::CallScript& action);
  void Do(const Core::Subscribe& action) { connection.Listen(action.channel); }
  void Do(const Core::Answer& action);
  void Do(const Core::Notify& action) {
    // A copy, because the callback may replace on_news.
    const auto notify = on_news;
    if (notify) notify(action.news);
  }

  const Options options;
  EventLoop& loop;
  const MonotonicClock clock;
  const RendezvousScripts scripts;
  Core core;
  RendezvousConnection connection;

  struct Pending {
    Core::Event event;
    uint64_t request = 0;  // serial of a request; 0: another event
  };
  std::deque<Pending> events;
  bool running = false;
  EventLoop::TimerId request_timer = 0;
  EventLoop::TimerId deadline_timer = 0;
  absl::Time armed_deadline = absl::InfiniteFuture();

  std::optional<Done> done;     // of the outstanding request
  uint64_t request_serial = 0;  // of the last request that was made
  uint64_t core_serial = 0;     // of the last request that the core has seen
  std::function<void(const News&)> on_news;
  std::set<std::string> refusals_logged;
};

namespace {

// The server accepted the user, whose rules do not allow this job's keys.
absl::Status NotOurKeys(const RedisRendezvous::Options& options, const absl::Status& refused) {
  const std::string& user = options.endpoint.user;
  return absl::PermissionDeniedError(absl::StrCat(
      std::string(refused.message()), ": the rules of user '", user.empty() ? "default" : user,
      "' do not allow a job with id '", options.job.run_id,
      "': give the --rdzv-id that they name (~ddp:{ID}:*), or DDP_REDIS_USER another user, or the "
      "user "
      "the rules of docs/rendezvous-protocol.md"));
}

}  // namespace

// Blocks, so that the starter of a job sees at once what is wrong with the server.
absl::Status RedisRendezvous::State::Open() {
  DDP_ASSIGN_OR_RETURN(
      std::unique_ptr<store::RedisConnection> opener,
      store::RedisConnection::Connect(options.endpoint, ConnectionOptions(options)));
  const std::vector<Core::Action> asked = core.Step(Core::Open{}, clock.Now());
  CHECK_EQ(asked.size(), 1u);
  const auto& call = std::get<Core::CallScript>(asked.front());
  absl::StatusOr<RedisReply> reply =
      opener->Eval(scripts[call.script], call.keys, call.args, {.idempotent = true});
  if (absl::IsPermissionDenied(reply.status())) return NotOurKeys(options, reply.status());
  DDP_RETURN_IF_ERROR(reply.status());
  const std::vector<Core::Action> actions =
      core.Step(Core::Replied{*std::move(reply)}, clock.Now());
  DDP_RETURN_IF_ERROR(core.open_status());
  connection.Adopt(opener->Release());
  running = true;
  for (const Core::Action& action : actions) {
    std::visit([this](const auto& a) { Do(a); }, action);
  }
  running = false;
  return absl::OkStatus();
}

void RedisRendezvous::State::Post(Core::Event event) {
  events.push_back({std::move(event)});
  Run();
}

void RedisRendezvous::State::Request(Core::Ask request, Done request_done) {
  CHECK(!done.has_value()) << "one request at a time";
  done = std::move(request_done);
  events.push_back({std::move(request), ++request_serial});
  if (request_timer != 0) return;
  request_timer = loop.AddTimer(absl::ZeroDuration(), [this] {
    request_timer = 0;
    Run();
  });
}

void RedisRendezvous::State::Run() {
  if (running) return;
  running = true;
  while (!events.empty()) {
    const Pending next = std::move(events.front());
    events.pop_front();
    if (next.request != 0) core_serial = next.request;
    for (const Core::Action& action : core.Step(next.event, clock.Now())) {
      std::visit([this](const auto& a) { Do(a); }, action);
    }
  }
  running = false;
  ArmDeadline();
}

void RedisRendezvous::State::ArmDeadline() {
  const absl::Time deadline = core.next_deadline();
  if (deadline == armed_deadline) return;
  armed_deadline = deadline;
  loop.CancelTimer(std::exchange(deadline_timer, 0));
  if (deadline == absl::InfiniteFuture()) return;
  const absl::Duration delay = std::max(absl::ZeroDuration(), deadline - clock.Now());
  deadline_timer = loop.AddTimer(delay, [this] {
    deadline_timer = 0;
    armed_deadline = absl::InfiniteFuture();
    Post(Core::Tick{});
  });
}

// Without pushes this node learns of the others only by its heartbeats, which is slower. Only the
// administrator of the server can change the rules.
void RedisRendezvous::State::LogRefusal(const absl::Status& why) {
  // A new connection may succeed where one broke (kInternal: by a reply that made no sense).
  const bool broke = store::IsTransient(why) || absl::IsInternal(why);
  if (broke || refusals_logged.size() >= kMaxRefusalsLogged) return;
  if (!refusals_logged.insert(std::string(why.message())).second) return;
  LOG(WARNING) << "the rendezvous sends this node no news: " << why.message()
               << (absl::IsPermissionDenied(why)
                       ? absl::StrCat("; allow its user +subscribe &ddp:{", options.job.run_id,
                                      "}:*")
                       : "");
}

void RedisRendezvous::State::Do(const Core::CallScript& action) {
  connection.Call(
      scripts[action.script], action.keys, action.args,
      [this](absl::StatusOr<RedisReply> reply) { Post(Core::Replied{std::move(reply)}); });
}

void RedisRendezvous::State::Do(const Core::Answer& action) {
  // The agent may have cancelled the request, and made another one, in the meantime.
  if (!done.has_value() || core_serial != request_serial) return;
  (*std::exchange(done, std::nullopt))(action.answer);
}

RedisRendezvous::RedisRendezvous(std::unique_ptr<State> state) : state_(std::move(state)) {}
RedisRendezvous::~RedisRendezvous() = default;

int64_t RedisRendezvous::instance() const { return state_->core.instance(); }
JobLimits RedisRendezvous::limits() const { return state_->core.limits(); }

absl::StatusOr<std::unique_ptr<RedisRendezvous>> RedisRendezvous::Open(const Options& options,
                                                                       EventLoop* loop) {
  auto state = std::make_unique<State>(options, loop);
  DDP_RETURN_IF_ERROR(state->Open());
  return std::unique_ptr<RedisRendezvous>(new RedisRendezvous(std::move(state)));
}

void RedisRendezvous::Ask(const RendezvousRequest& request, absl::Duration timeout, Done done) {
  state_->Request({request, timeout}, std::move(done));
}

void RedisRendezvous::Cancel() {
  if (!state_->done.has_value()) return;
  state_->done.reset();
  state_->events.push_back({Core::CancelRequest{}});
}

void RedisRendezvous::SetReport(const NodeReport& report) { state_->core.SetReport(report); }

std::optional<RankAtWork> RedisRendezvous::at_work() const { return state_->core.at_work(); }

int64_t RedisRendezvous::median_busy_us() const { return state_->core.median_busy_us(); }

void RedisRendezvous::Watch(std::function<void(const News&)> on_news) {
  state_->on_news = std::move(on_news);
}

}  // namespace ddp::elastic
