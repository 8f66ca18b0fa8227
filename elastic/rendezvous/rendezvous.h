#ifndef DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_
#define DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/rendezvous/round.h"

namespace ddp::elastic {

// What the job decided about a failure.
struct FailureVerdict {
  enum class Decision {
    kRestart,  // the budget lasts: join again
    kFail,     // the budget is spent: the job has failed
    kStale,    // the generation was over already: join again, nothing was charged
  };
  Decision decision = Decision::kFail;
  int restarts = 0;        // charged so far, this one included
  std::string root_cause;  // of the generation's first failure, by the server's clock
};

// Where the agents of a job agree on who takes part. The job's life, as Redis holds it:
//
//                 every node of the round has joined: generation + 1, a new nonce
//      +---------+ ---------------------------------------------------> +---------+
//  --> | forming |                                                      | running |
//      +---------+ <--------------------------------------------------- +---------+
//                 first failure of the generation, the budget lasts        |   |
//                                                                          |   |
//         +--------+   first failure, the budget is spent                  |   |
//         | failed | <-----------------------------------------------------+   |
//         +--------+                                                           |
//         +-----------+   every node of the round has completed                |
//         | succeeded | <------------------------------------------------------+
//         +-----------+
//
// Every arrow is one script: it either happens entirely or not at all, and the same request sent
// again changes nothing. All but join carry their generation and are refused once it is over; a
// node may leave in any state. A run id never inherits: a job lives in an instance of its run id,
// and an agent that starts opens a new one. An agent presents the highest generation that it has
// seen, and a store that lost its memory adopts it, so a generation's number never goes back.
//
// The interface is event-shaped: a request returns at once and its reply comes to `done` on the
// same thread, later, from the agent's event loop; never from within the request. One request may
// be outstanding. A request that finds the store out of reach is tried again until its timeout.
// Errors of all requests: kUnavailable (out of reach for all of the timeout: says how long and
// where), kUnauthenticated or kPermissionDenied (the store refuses us), kInternal (a reply that
// makes no sense).
class Rendezvous {
 public:
  virtual ~Rendezvous() = default;

  // Takes part in the next generation. Also errors: kDeadlineExceeded (members are missing: says
  // how many), kFailedPrecondition (the job has ended).
  using JoinDone = std::function<void(absl::StatusOr<Round>)>;
  virtual void Join(const NodeOffer& offer, absl::Duration timeout, JoinDone done) = 0;

  // States that a worker of `generation` failed; `cause` is one line: "rank 1 was killed by
  // SIGKILL".
  struct Failure {
    GenerationId generation;
    int rank = 0;
    std::string cause;
  };
  using FailureDone = std::function<void(absl::StatusOr<FailureVerdict>)>;
  virtual void ReportFailure(const Failure& failure, absl::Duration timeout, FailureDone done) = 0;

  // States that all workers of this node have succeeded in `generation`. Also errors: kAborted (the
  // generation is over).
  using Done = std::function<void(absl::Status)>;
  virtual void Complete(const GenerationId& generation, absl::Duration timeout, Done done) = 0;

  // Gives this node's lease back, so that nobody waits for it. The last request.
  virtual void Leave(absl::Duration timeout, Done done) = 0;

  // Drops the outstanding request, if there is one: its `done` is not called.
  virtual void Cancel() = 0;

  // `on_contact` is told once when the store gets out of reach (why), and OK once when it is back.
  // Losing contact has no other consequence: training goes on, membership is frozen.
  virtual void WatchContact(Done on_contact) = 0;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_RENDEZVOUS_RENDEZVOUS_H_
