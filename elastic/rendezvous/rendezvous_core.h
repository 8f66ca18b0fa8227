#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CORE_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CORE_H_

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/rendezvous/heartbeat_plan.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/rendezvous_messages.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "elastic/rendezvous/round.h"
#include "store/redis_endpoint.h"
#include "store/redis_reply.h"

namespace ddp::elastic {

// One agent's side of the rendezvous: pure, holds no clock and does no I/O. Given what happened and
// when, it says which script to run next, what to answer the agent and what to tell it.
//
//   Agent's requests, replies, pushed messages, time  --Step()-->  actions
//
// It runs one script at a time and keeps trying: a script that fails is sent again after a pause
// with full jitter, a sixth of the lease at most. While this node is in a round it is heard once
// per heartbeat: in a large job mostly by a light one, a plain command that renews its lease, and
// every so often in full. While it waits for a round it says so as often, or once per quarter of
// the lease where many wait. See docs/rendezvous-protocol.md.
//
// Thread-compatible.
class RendezvousCore {
 public:
  struct Options {
    std::string node;               // unique for every agent that ever was
    store::RedisEndpoint endpoint;  // for the workers' store, and for messages
    std::string run_id;
    std::string fingerprint;  // not empty: agents meet by it too, and a full job takes nobody in

    // Of the job; those of the node that opens it count.
    int max_restarts = 0;
    int min_nodes = 1;
    int max_nodes = 1;
    absl::Duration last_call = absl::Seconds(30);
    int no_progress_limit = 3;
    int quarantine_strikes = 3;
    absl::Duration quarantine_cooldown = absl::Seconds(60);
    absl::Duration lease = absl::Seconds(3);

    absl::Duration heartbeat;  // zero: a sixth of the lease; never more than a third of it
    int full_heartbeats = 32;  // of all nodes per interval, half at least; the others may be light
    int64_t instance = 0;      // takes part in this one, which must exist; 0: by the rules
    uint64_t seed = 0;         // of nonces, tokens and pauses
  };

  // Events.
  // Find or make the job, before anything is asked. Not needed: the first request does so too.
  struct Open {};
  // A request must not be made while another one is outstanding.
  struct JoinRequest {
    NodeOffer offer;
    absl::Duration timeout;
  };
  struct FailureRequest {
    Rendezvous::Failure failure;
    absl::Duration timeout;
  };
  struct CompleteRequest {
    GenerationId generation;
    absl::Duration timeout;
  };
  struct DrainRequest {
    GenerationId generation;
    std::string cause;
    absl::Duration timeout;
  };
  struct TakeBackRequest {
    GenerationId generation;
    absl::Duration timeout;
  };
  struct LeaveRequest {
    absl::Duration timeout;
  };
  struct CloseRequest {
    JobEnd end;
    absl::Duration timeout;
  };
  struct CancelRequest {};
  // Answers the last CallScript or CallCommand. A status: it failed, and may or may not have been
  // applied.
  struct Replied {
    absl::StatusOr<store::RedisReply> reply;
  };
  // The last Subscribe has worked; has failed or ended (each is told once).
  struct Subscribed {};
  struct SubscriptionEnded {};
  struct Pushed {
    std::string text;
  };
  // The time that next_deadline() named has come.
  struct Tick {};
  using Event = std::variant<Open, JoinRequest, FailureRequest, CompleteRequest, DrainRequest,
                             TakeBackRequest, LeaveRequest, CloseRequest, CancelRequest, Replied,
                             Subscribed, SubscriptionEnded, Pushed, Tick>;

  // Actions.
  struct CallScript {
    ScriptName script = ScriptName::kJoin;
    std::vector<std::string> keys;
    std::vector<std::string> args;
  };
  struct CallCommand {
    std::vector<std::string> words;
  };
  // In place of an earlier subscription.
  struct Subscribe {
    std::string channel;
  };
  // Answers to the outstanding request.
  struct AnswerJoin {
    absl::StatusOr<JoinAnswer> answer;
  };
  struct AnswerFailure {
    absl::StatusOr<FailureVerdict> verdict;
  };
  struct AnswerDone {
    absl::Status status;
  };
  struct Tell {
    News news;
  };
  using Action =
      std::variant<CallScript, CallCommand, Subscribe, AnswerJoin, AnswerFailure, AnswerDone, Tell>;

  explicit RendezvousCore(Options options);

  // `now` never goes back.
  std::vector<Action> Step(const Event& event, absl::Time now);

  // When Step(Tick) is due; infinite: never.
  absl::Time next_deadline() const;

  // What the next heartbeats say.
  void SetReport(const NodeReport& report) { heartbeats_.SetReport(report); }
  int64_t median_busy_us() const { return median_busy_us_; }

  // Why the job could not be opened the last time.
  const absl::Status& open_status() const { return open_status_; }
  // The job that this node belongs to, by its number; 0: not known yet.
  int64_t instance() const { return opened_.has_value() ? opened_->number : 0; }
  // What the job is called, as Round::run_id has it; the user's until the job is opened.
  std::string run_id() const;
  // Our own until the job is opened.
  JobLimits limits() const {
    if (opened_.has_value()) return opened_->limits;
    return {options_.max_restarts, options_.min_nodes, options_.max_nodes};
  }
  const std::string& node() const { return options_.node; }

 private:
  using Requested = std::variant<JoinRequest, FailureRequest, CompleteRequest, DrainRequest,
                                 TakeBackRequest, LeaveRequest, CloseRequest>;
  // What the agent has asked for, until it is answered.
  struct Request {
    Requested what;
    absl::Duration timeout;
    absl::Time deadline;
    absl::Time send_at;  // not before
    int tries = 0;
    absl::Status last_error;  // of the last try
    std::string waiting_for;  // of a join
    int times_waited = 0;
    absl::Duration pace;                            // of a join's signs of life
    absl::Time brief_until = absl::InfinitePast();  // ask only whether anything is new
    std::optional<absl::Duration> rest;             // of the timeout, while a spare's stands still
  };
  // The round that this node is in.
  struct Membership {
    GenerationId generation;
    std::string row;
    bool completed = false;  // its workers have succeeded, and the server has said that it knows
    bool told_over = false;
    bool told_drain = false;
  };
  struct InFlight {
    ScriptName script;
    uint64_t request = 0;   // serial of the request that it is for; 0: none
    bool is_light = false;  // a light heartbeat, no script
  };

  void On(const Open&) { wants_open_ = true; }
  void On(const JoinRequest& request);
  void On(const FailureRequest& request) { Start(request, request.timeout); }
  void On(const CompleteRequest& request) { Start(request, request.timeout); }
  void On(const DrainRequest& request) { Start(request, request.timeout); }
  void On(const TakeBackRequest& request);
  void On(const LeaveRequest& request);
  void On(const CloseRequest& request) { Start(request, request.timeout); }
  void On(const CancelRequest&) { request_.reset(); }
  void On(const Replied& event);
  void On(const Subscribed&);
  void On(const SubscriptionEnded&);
  void On(const Pushed& event);
  void On(const Tick&);

  void Start(Requested what, absl::Duration timeout);
  void Pump();
  absl::Time NextSend() const;
  bool Beats() const;
  bool GoesForGood() const;
  void SendOpen();
  void SendRequest();
  void SendHeartbeat();
  void BeatInFullNow();
  void Send(ScriptName script, const GenerationId& about, std::vector<std::string> more);
  std::vector<std::string> ArgsOf(const Requested& what, ScriptName& script, GenerationId& about);

  void OnOpened(const store::RedisReply& reply);
  void OnFailedCall(const absl::Status& status);
  void OnContact(const absl::Status& status);
  void OnTransition(const InFlight& call, const ScriptReply& reply);
  void OnHeartbeat(const ScriptReply& reply);
  void OnLightHeartbeat(const store::RedisReply& reply);
  void OnAnswer(const JoinRequest& asked, const ScriptReply& reply);
  void OnAnswer(const FailureRequest& asked, const ScriptReply& reply);
  void OnAnswer(const CompleteRequest& asked, const ScriptReply& reply);
  void OnAnswer(const DrainRequest& asked, const ScriptReply& reply);
  void OnAnswer(const TakeBackRequest& asked, const ScriptReply& reply);
  void OnAnswer(const LeaveRequest& asked, const ScriptReply& reply);
  void OnAnswer(const CloseRequest& asked, const ScriptReply& reply);
  void OnRound(const ScriptReply& reply);
  void OnWaiting(const ScriptReply& reply, bool is_spare);
  void OnReplaced();
  void OpenAnother();
  void OnRequestTimeout();

  void Finish(absl::Status status);
  void FailRequest(absl::Status status);
  void TellOver(const std::string& cause);
  void TellDrain(int64_t stop_at_step, const std::string& cause);
  void TellEnd(const JobEnd& end);
  void TellNews(News news);
  template <typename A>
  void Do(A action);

  absl::Duration lease() const;
  absl::Duration heartbeat() const;
  absl::Time NextSignOfLife();
  absl::Duration PaceOfWaiting(int64_t nodes) const;
  absl::Duration Pause(int failures);
  double Share() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  std::string RandomHex();
  std::string RunPrefix() const;
  std::string KeyPrefix() const;

  const Options options_;
  std::mt19937_64 random_;
  absl::Time now_ = absl::InfinitePast();  // of the current Step
  std::vector<Action> actions_;            // of the current Step

  std::string open_token_;  // of the request to open, while there is no job
  bool wants_open_ = false;
  absl::Status open_status_;
  std::optional<OpenedInstance> opened_;
  bool forgotten_ = false;  // the server does not know the job that we have opened

  GenerationId seen_;  // the highest that was heard of
  int restarts_seen_ = 0;
  std::optional<Membership> mine_;
  std::string host_;  // as it was offered last
  bool left_ = false;
  bool ended_ = false;

  std::optional<Request> request_;
  uint64_t request_serial_ = 0;
  std::optional<InFlight> in_flight_;
  bool ask_again_ = false;  // something was pushed while a script was on its way

  HeartbeatPlan heartbeats_;  // while this node is in a round
  absl::Time pause_until_ = absl::InfinitePast();
  int failures_in_a_row_ = 0;
  bool in_contact_ = true;

  absl::Time subscribe_at_ = absl::InfiniteFuture();
  int failed_subscriptions_ = 0;
  bool subscribed_ = false;
  bool was_heard_ = false;  // a script was answered, so a push may have been missed

  int64_t median_busy_us_ = -1;
};

// One line, for traces.
std::string DebugString(const RendezvousCore::Action& action);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CORE_H_
