#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// What the job decided about a failure.
struct FailureVerdict {
  enum class Decision {
    kRestart,  // join again; whether it is charged is decided when the next round is complete
    kEnded,    // the job has: `end` says how
    kStale,    // that generation was over already: join again
  };
  Decision decision = Decision::kRestart;
  JobEnd end;
};

// What comes of joining: a place in a round, or the news that there will be none.
using JoinAnswer = std::variant<Round, JobEnd>;

// What a node is told unasked: at once where the push arrives, by the next heartbeat where it was
// lost. Told once each.
struct News {
  enum class Kind {
    // `generation` is over: another node failed or was lost. Stop the workers, join again.
    kGenerationOver,
    // Membership is about to change: the workers stop after step `stop_at_step`, then join again.
    // Until all nodes have, the generation goes on.
    kDrain,
    kJobEnded,  // `end`
    // The store does not count this node to its generation any more. Its workers must die now; it
    // may join again.
    kEvicted,
    kOutOfReach,   // the store is; `cause` says why. Training goes on, membership is frozen
    kBackInReach,  // the store answers again
    // Join has not ended yet: `cause` says for what it waits: "1 of 2 nodes have joined", "as a
    // spare: all 3 seats are taken". Told when the text changes.
    kWaiting,
  };
  Kind kind = Kind::kGenerationOver;
  GenerationId generation;
  std::string cause;
  int64_t stop_at_step = -1;  // -1: at once
  JobEnd end;
};

// What a node says of itself with its next heartbeat.
struct NodeReport {
  int64_t step = -1;            // the highest that a local rank has committed; -1: none
  double steps_per_second = 0;  // 0: unknown
  int64_t busy_us = -1;         // own, not waiting, time per step of its slowest rank; -1: unknown
  std::string row;              // JSON for people who watch the job; sent only when it changed
};

// Where the agents of a job agree on who takes part. The job's life, as Redis holds it:
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
//                          |        no_progress, closed         |
//                          +------------------------------------+
//
// Every arrow is one script: it either happens entirely or not at all, and the same request sent
// again changes nothing. All but join carry their generation and are refused once it is over; a
// node may leave in any state. A run id never inherits: a job lives in an instance of its run id.
// An agent presents the highest generation that it has seen, and a store that lost its memory
// adopts it, so a generation's number never goes back. docs/rendezvous-protocol.md has the rules.
//
// The interface is event-shaped: a request returns at once and its reply comes to `done` on the
// same thread, later, from the agent's event loop; never from within the request. One request may
// be outstanding: Cancel() it before the next. A request that finds the store out of reach is tried
// again until its timeout.
// Errors of all requests: kUnavailable (out of reach for all of the timeout: says how long and
// where), kUnauthenticated or kPermissionDenied (the store refuses us), kFailedPrecondition
// (another job has taken this one's place in the store), kInternal (a reply that makes no sense).
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  // Takes part in the next round. Also errors: kDeadlineExceeded (members are missing: says how
  // many). The timeout does not run while this node waits as a spare of a running job.
  using JoinDone = std::function<void(absl::StatusOr<JoinAnswer>)>;
  virtual void Join(const NodeOffer& offer, absl::Duration timeout, JoinDone done) = 0;

  // States that a worker of `generation` failed.
  struct Failure {
    GenerationId generation;
    int rank = 0;
    std::string cause;       // one line: "rank 1 was killed by SIGKILL"
    bool is_victim = false;  // its own error says that a peer failed first
    int64_t step = -1;       // the highest that a local rank has committed in this generation
    bool progress_known =
        false;          // whether the workers commit steps at all; else `step` says nothing
    int exit_code = 1;  // of that worker, as a shell has it: 128 + N for signals
    // The rank whose failure this node has reported before, and which this one preceded by the
    // clock of the host: it is no root cause any more. -1: none.
    int instead_of = -1;
  };
  using FailureDone = std::function<void(absl::StatusOr<FailureVerdict>)>;
  virtual void ReportFailure(const Failure& failure, absl::Duration timeout, FailureDone done) = 0;

  // States that all workers of this node have succeeded in `generation`. The news kJobEnded or
  // kGenerationOver follow. Also errors: kAborted (the generation is over).
  using Done = std::function<void(absl::Status)>;
  virtual void Complete(const GenerationId& generation, absl::Duration timeout, Done done) = 0;

  // Announces that this node will leave (preemption, a user's SIGTERM): free of charge. All nodes
  // get the news kDrain, this one too. Also errors: kAborted (the generation is over already).
  virtual void Drain(const GenerationId& generation, const std::string& cause,
                     absl::Duration timeout, Done done) = 0;

  // This node goes down with its agent, and the failure that it has just reported in `generation`
  // was that: it is lost, and what the report was charged is given back, also where the next
  // generation has begun. A job that has ended stays ended. The last request.
  virtual void TakeBack(const GenerationId& generation, absl::Duration timeout, Done done) = 0;

  // Gives this node's lease back, so that nobody waits for it. The last request.
  virtual void Leave(absl::Duration timeout, Done done) = 0;

  // Ends the job for all nodes, unless it has ended already.
  virtual void Close(const JobEnd& end, absl::Duration timeout, Done done) = 0;

  // Drops the outstanding request, if there is one: its `done` is not called.
  virtual void Cancel() = 0;

  virtual void SetReport(const NodeReport& report) = 0;

  // Over the job's nodes, as of the last heartbeat; -1: unknown.
  virtual int64_t median_busy_us() const = 0;

  // Who is told the news, from the event loop; nullptr: nobody.
  virtual void Watch(std::function<void(const News&)> on_news) = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_
