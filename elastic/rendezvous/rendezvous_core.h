#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CORE_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CORE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/job/job_spec.h"
#include "elastic/rendezvous/heartbeat_plan.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/rendezvous_messages.h"
#include "elastic/rendezvous/rendezvous_scripts.h"
#include "elastic/rendezvous/round.h"
#include "store/redis/redis_endpoint.h"
#include "store/redis/wire/redis_reply.h"

namespace ddp::elastic {

// An agent's side of the rendezvous protocol, as a pure state machine: no clock, no I/O. Given an
// event and the time, Step() returns the scripts to call, the answers to the agent and the
// notifications for it. RedisRendezvous owns the core and carries out its actions.
//
//   Agent's requests, replies, pushed messages, time  --Step()-->  actions
//
// At most one script is in flight. A failed script is retried after a pause with full
// jitter, at most a sixth of the lease. A member of a round sends one heartbeat per interval. A
// node that waits for a round sends its join again as often, or once per quarter of the lease where
// many nodes wait. Whether a node is lost is decided in the server, by scripts/leases.lua. See
// docs/rendezvous-protocol.md.
//
// Thread-compatible.
class RendezvousCore {
 public:
  struct Options {
    JobSpec job;
    std::string node;               // unique among all agents that ever ran
    store::RedisEndpoint endpoint;  // for calls, and for the URL of the workers' store
    int64_t instance = 0;           // number of an existing instance to join; 0: the server chooses
    // The longest pause before a failed script is sent again. It is never above a sixth of the
    // lease.
    absl::Duration pause_max = absl::InfiniteDuration();
    uint64_t seed = 0;  // of the random numbers for nonces, tokens and pauses
  };

  // Events.
  //
  // Finds or makes the job ahead of the first request. Optional: the first request does so too.
  struct Open {};
  // A request of the agent. Do not make one while another is outstanding: that is a CHECK failure.
  struct Ask {
    RendezvousRequest request;
    absl::Duration timeout;
  };
  struct CancelRequest {};
  // Answers the last CallScript. An error status: the call failed, and may or may not have been
  // applied.
  struct Replied {
    absl::StatusOr<store::RedisReply> reply;
  };
  // The last Subscribe has succeeded; or it has failed or ended. Each is reported once.
  struct Subscribed {};
  struct SubscriptionEnded {};
  struct Pushed {
    std::string text;
  };
  // The time of next_deadline() has come.
  struct Tick {};
  using Event =
      std::variant<Open, Ask, CancelRequest, Replied, Subscribed, SubscriptionEnded, Pushed, Tick>;

  // Actions.
  struct CallScript {
    ScriptName script = ScriptName::kJoin;
    std::vector<std::string> keys;
    std::vector<std::string> args;  // as from EncodeArguments()
  };
  // Replaces an earlier subscription.
  struct Subscribe {
    std::string channel;
  };
  // Answers the outstanding request.
  struct Answer {
    RendezvousAnswer answer;
  };
  struct Notify {
    News news;
  };
  using Action = std::variant<CallScript, Subscribe, Answer, Notify>;

  explicit RendezvousCore(Options options);

  // Handles one event and returns the actions to carry out, in order. `now` never goes back.
  std::vector<Action> Step(const Event& event, absl::Time now);

  // Returns the time at which Step(Tick) is due; infinite: never.
  absl::Time next_deadline() const;

  // Sets the report that the next heartbeats carry.
  void SetReport(const NodeReport& report) { heartbeats_.SetReport(report); }
  int64_t median_busy_us() const { return median_busy_us_; }
  const std::optional<RankAtWork>& at_work() const { return at_work_; }

  // The error of the last attempt to open the job; OK after a success.
  const absl::Status& open_status() const { return open_status_; }
  // The number of this node's job instance; 0: not known yet.
  int64_t instance() const { return opened_.has_value() ? opened_->number : 0; }
  // The job's id, as in Round::run_id. Before the job is opened: the user's run id.
  std::string run_id() const;
  // The limits of the job. Before the job is opened: this node's own.
  JobLimits limits() const { return opened_.has_value() ? opened_->limits : options_.job.limits; }
  const std::string& node() const { return options_.node; }

 private:
  // The agent's outstanding request.
  struct Request {
    RendezvousRequest what;
    absl::Duration timeout;
    absl::Time deadline;
    absl::Time send_at;  // earliest time to send it
    int tries = 0;
    absl::Status last_error;  // error of the last try; OK after an answer
    std::string waiting_for;  // of a join: the condition, as News::cause of kWaiting
    int times_waited = 0;
    absl::Duration pace;                            // interval at which a join is repeated
    absl::Time brief_until = absl::InfinitePast();  // until then joins ask only for changes
    std::optional<absl::Duration> rest;  // of the timeout, which stands still for a spare
  };
  // This node's place in the current round.
  struct Membership {
    GenerationId generation;
    std::string row;
    bool completed = false;  // its workers have succeeded, and the server has acknowledged it
    bool notified_over = false;
    bool notified_drain = false;
  };
  struct InFlight {
    ScriptName script;
    uint64_t request = 0;  // serial of the request that it serves; 0: none
  };

  void On(const Open&) { wants_open_ = true; }
  void On(const Ask& event);
  void On(const CancelRequest&) { request_.reset(); }
  void On(const Replied& event);
  void On(const Subscribed&);
  void On(const SubscriptionEnded&);
  void On(const Pushed& event);
  void On(const Tick&);

  void Pump();
  absl::Time NextSend() const;
  bool SendsHeartbeats() const;
  bool GoesForGood() const;
  void SendOpen();
  void SendRequest();
  void SendHeartbeat();
  void SendHeartbeatNow();
  void Send(ScriptName script, const GenerationId& about, std::vector<ScriptArgument> arguments);
  std::vector<ScriptArgument> ArgumentsOf(const RendezvousRequest& what, ScriptName& script,
                                          GenerationId& about);

  void OnOpened(const store::RedisReply& reply);
  void OnFailedCall(const absl::Status& status);
  void OnContact(const absl::Status& status);
  void OnTransition(const InFlight& call, const ScriptReply& reply);
  void OnHeartbeat(const ScriptReply& reply);
  void OnAnswer(const JoinRequest& asked, const ScriptReply& reply);
  void OnAnswer(const FailureRequest& asked, const ScriptReply& reply);
  void OnAnswer(const CompleteRequest& asked, const ScriptReply& reply);
  void OnAnswer(const DrainRequest& asked, const ScriptReply& reply);
  void OnAnswer(const TakeBackRequest&, const ScriptReply&) { Finish(AnswerOf(absl::OkStatus())); }
  void OnAnswer(const LeaveRequest&, const ScriptReply&) { Finish(AnswerOf(absl::OkStatus())); }
  void OnAnswer(const CloseRequest& asked, const ScriptReply& reply);
  void OnRound(const ScriptReply& reply);
  void OnWaiting(const ScriptReply& reply, bool is_spare);
  void OnReplaced();
  void OpenAnother();
  void OnRequestTimeout();

  void Finish(RendezvousAnswer answer);
  void NotifyOver(const std::string& cause);
  void NotifyDrain(int64_t stop_at_step, const std::string& cause);
  void NotifyEnd(const JobEnd& end);
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

  std::string open_token_;  // token for the next attempt to open an instance
  bool wants_open_ = false;
  absl::Status open_status_;
  std::optional<OpenedInstance> opened_;
  bool forgotten_ = false;  // the server does not know the job that was opened

  GenerationId seen_;  // highest generation seen
  int restarts_seen_ = 0;
  // The same of jobs that this node has left for another one, by token. A server that goes back to
  // an earlier state may have such a job again.
  std::map<std::string, std::pair<GenerationId, int>> left_jobs_;
  std::optional<Membership> mine_;
  std::string host_;  // host of the last offer
  bool left_ = false;
  bool ended_ = false;

  std::optional<Request> request_;
  uint64_t request_serial_ = 0;
  std::optional<InFlight> in_flight_;
  bool ask_again_ = false;  // a pushed message calls for a heartbeat or a join at once

  HeartbeatPlan heartbeats_;  // schedule of heartbeats, valid in a round
  absl::Time pause_until_ = absl::InfinitePast();
  int failures_in_a_row_ = 0;
  bool in_contact_ = true;
  bool notified_for_good_ = false;  // of the last kOutOfReach

  absl::Time subscribe_at_ = absl::InfiniteFuture();
  int failed_subscriptions_ = 0;
  bool was_heard_ = false;  // a script was answered, so a push may have been missed

  int64_t median_busy_us_ = -1;
  std::optional<RankAtWork> at_work_;
};

// Returns the action as one line, for traces.
std::string DebugString(const RendezvousCore::Action& action);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_CORE_H_
