#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/rendezvous/round.h"
#include "glog/logging.h"

namespace ddp::elastic {

// The job's answer to a failure report.
struct FailureVerdict {
  enum class Decision {
    kRestart,  // join again; the next round decides whether the failure is charged
    kEnded,    // the job has ended: see `end`
    kStale,    // the reported generation is not this node's current one: join again
  };
  Decision decision = Decision::kRestart;
  JobEnd end;
};

// Requests of an agent to the rendezvous. ---------------------------------------------------------
// Each is declared here only: agents, the clients of the rendezvous and their tests pass it on as
// it is, and RendezvousCore gives its fields their names in the scripts.

// Takes part in the next round. Answer: Round, or JobEnd. The timeout does not run while this node
// waits as a spare of a running job. Also errors: kDeadlineExceeded (members are missing; the
// message says how many), kInvalidArgument (ValidateOffer refuses the offer).
struct JoinRequest {
  NodeOffer offer;
};

// Reports that a worker of `generation` failed. Answer: FailureVerdict.
struct FailureRequest {
  GenerationId generation;
  int rank = 0;
  std::string cause;            // one line: "rank 1 was killed by SIGKILL"
  bool is_victim = false;       // its error record says that a peer failed first
  bool is_unprompted = false;   // no signal and no stop of a drain can have caused it
  int64_t step = -1;            // highest step that a local rank has committed in this generation
  bool progress_known = false;  // whether the workers commit steps at all; if not, ignore `step`
  int exit_code = 1;            // of that worker, as a shell reports it: 128 + N for signal N
  // The rank whose failure this node reported earlier as the root cause, when the present failure
  // happened before it by the host's clock. -1: none.
  int instead_of = -1;
};

// Reports that all workers of this node have succeeded in `generation`. Answer: nothing. kJobEnded
// or kGenerationOver is notified later. Also errors: kAborted (the generation or the job is over).
struct CompleteRequest {
  GenerationId generation;
};

// Announces that this node will leave (preemption, a user's SIGTERM). Answer: nothing. The budget
// is not charged. All nodes, this one included, are notified by kDrain. Also errors: kAborted (the
// generation is over already).
struct DrainRequest {
  GenerationId generation;
  std::string cause;
};

// Declares this node lost and withdraws the failure report that it has just made in `generation`:
// the failure was the end of the node itself. Answer: nothing. The charge is given back, even if
// the next generation has begun. A job that has ended stays ended. No request may follow.
struct TakeBackRequest {
  GenerationId generation;
};

// Gives up this node's lease at once, so that no node waits for it. Answer: nothing. No request may
// follow.
struct LeaveRequest {
  // The node's workers have stopped as a drain asked, and none was killed, so no failure of another
  // node is its fault.
  bool in_order = false;
};

// Ends the job for all nodes, unless it has ended already. Answer: nothing.
struct CloseRequest {
  JobEnd end;
};

using RendezvousRequest = std::variant<JoinRequest, FailureRequest, CompleteRequest, DrainRequest,
                                       TakeBackRequest, LeaveRequest, CloseRequest>;

// The answer to a request, of the type that the request names; std::monostate: nothing.
using RendezvousAnswer =
    absl::StatusOr<std::variant<std::monostate, Round, JobEnd, FailureVerdict>>;

// Returns the answer that consists of a status alone.
inline RendezvousAnswer AnswerOf(absl::Status status) {
  if (status.ok()) return std::monostate();
  return status;
}

// Returns the answer as a T, or its error. CHECKs that the request has such answers.
template <typename T>
absl::StatusOr<T> AnswerAs(const RendezvousAnswer& answer) {
  if (!answer.ok()) return answer.status();
  CHECK(std::holds_alternative<T>(*answer));
  return std::get<T>(*answer);
}

// A notification that answers no request. Redis pushes kGenerationOver, kDrain and kJobEnded at
// once; if the push is lost, the next heartbeat delivers them. Each event is notified once.
struct News {
  enum class Kind {
    // `generation` is over: another node failed or was lost. Stop the workers, then join again.
    kGenerationOver,
    // Membership is about to change. The workers stop after step `stop_at_step`, then the node
    // joins again. The generation goes on until all its nodes have joined.
    kDrain,
    kJobEnded,  // see `end`
    // Redis no longer counts this node as a member of `generation`. Kill its workers at once; the
    // node may join again.
    kEvicted,
    kOutOfReach,   // the store does not answer, see `cause`; training goes on, membership is frozen
    kBackInReach,  // the store answers again
    kStoreWarning,  // the store may lose keys of the job, or has lost some; see `cause`
    // Join still waits. `cause` names the condition: "1 of 2 nodes have joined", "as a spare: all 3
    // seats are taken". Notified when the text changes.
    kWaiting,
  };
  Kind kind = Kind::kGenerationOver;
  GenerationId generation;
  std::string cause;
  int64_t stop_at_step = -1;  // of kDrain; -1: at once
  JobEnd end;
  bool for_good = false;  // of kOutOfReach: the store refuses this node, and waiting may not help
};

// A rank that has made no step for a while and does not wait for peers: others may wait for it.
struct RankAtWork {
  int rank = -1;
  std::string phase;  // as from PhaseName()
  absl::Duration stalled_for;
  std::string host;  // empty in a node's own report
};

// A node's progress, sent with its next heartbeats.
struct NodeReport {
  int64_t step = -1;            // highest step that a local rank has committed; -1: none
  double steps_per_second = 0;  // 0: unknown
  int64_t busy_us = -1;        // own time per step, without waits, of its slowest rank; -1: unknown
  int64_t max_world_size = 0;  // most workers that the program accepts; 0: unknown
  std::optional<RankAtWork> at_work;  // of its ranks, the one that has made no step for longest
  std::string row;  // JSON for people who watch the job; sent only when it changed
};

// The membership protocol of a job: its agents agree, through Redis, on the nodes that take part.
// ddprun owns the object and lends it to its Agent. The job's states, as Redis holds them:
//
//                 the round is complete: generation + 1, a new nonce
//      +---------+ ---------------------------------------------------> +---------+
//  --> | forming |                                                      | running |
//      +---------+ <--------------------------------------------------- +---------+
//        |           a worker failed, a node was lost, or a node comes      |
//        |           or goes and all others have stopped at a step          |
//        |                                                                  |
//        |                 +------------------------------------+           |
//        +---------------> | ended: succeeded, budget_spent,    | <---------+
//                          |   no_progress, closed, abandoned   |
//                          +------------------------------------+
//
// Every arrow is one Lua script. A script happens entirely or not at all, and the same request sent
// again changes nothing. FailureRequest, CompleteRequest and DrainRequest carry a generation number
// and nonce; a request of an older generation is refused. A node may leave in any state. A job
// lives in a numbered instance of its run id and inherits nothing from an earlier instance. An
// agent presents the highest generation that it has seen. A store that lost its memory adopts that
// generation, so the generation number of a job never goes back. docs/rendezvous-protocol.md has
// the rules.
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  // Makes a request. Returns at once. The event loop calls `done` later, on the same thread, never
  // from within this call. Only one request may be outstanding: Cancel() it before the next one. A
  // request that cannot reach the store is retried until its timeout.
  //
  // Errors of all requests: kUnavailable (no answer within the timeout; the message says how long
  // and where), kUnauthenticated or kPermissionDenied (the store refuses this user),
  // kFailedPrecondition (another job has this job's place in the store, or another program its run
  // id), kInternal (a reply that makes no sense).
  using Done = std::function<void(const RendezvousAnswer&)>;
  virtual void Ask(const RendezvousRequest& request, absl::Duration timeout, Done done) = 0;

  // Drops the outstanding request, if any: its `done` is not called.
  virtual void Cancel() = 0;

  virtual void SetReport(const NodeReport& report) = 0;

  // Median of NodeReport::busy_us over the job's nodes, as of the last heartbeat; -1: unknown.
  virtual int64_t median_busy_us() const = 0;

  // The same of the whole job, as of the last heartbeat.
  virtual std::optional<RankAtWork> at_work() const = 0;

  // Sets the receiver of notifications, called from the event loop; nullptr: none.
  virtual void Watch(std::function<void(const News&)> on_news) = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_
