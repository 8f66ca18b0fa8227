#ifndef DDP_ELASTIC_AGENT_FAILED_WORKERS_H_
#define DDP_ELASTIC_AGENT_FAILED_WORKERS_H_

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "elastic/agent/process_spawner.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::elastic {

// The failed workers of this node in one generation. The class chooses three things: the failure to
// report next to the rendezvous, the root cause as far as this node knows, and the order in which
// people see the failures. It also keeps workers that ended as requested. Pure; owned by AgentCore.
//
// A victim is a worker whose error file says that a peer failed first.
//
// Thread-compatible. Pointers to failures are valid until the next Add().
class FailedWorkers {
 public:
  // Adds a failure; call in the order in which failures are seen. `was_stopped` marks a failure
  // that was seen after the end of the generation. The rendezvous may still name it the root cause.
  void Add(WorkerFailure failure) { failures_.push_back(std::move(failure)); }
  // Adds a worker that ended as requested. It is never a root cause.
  void AddStopped(WorkerFailure failure) { stopped_.push_back(std::move(failure)); }

  // Returns true when the error file of `failure`, which is not added yet, has an earlier time than
  // the failure that made this node stop its workers. Error files have a resolution of one second.
  bool CameFirst(const WorkerFailure& failure) const;

  // Sets the exit status of a worker that was added because it hung. Returns false if none was.
  bool Complete(int local_rank, const ExitStatus& status);

  bool empty() const { return failures_.empty() && stopped_.empty(); }

  // A failure to report to the rendezvous.
  struct Report {
    const WorkerFailure* failure = nullptr;  // null: none
    int instead_of = -1;                     // as in FailureRequest
  };

  // Returns the report to make now, if any, and counts it as made. At most three are made in a
  // generation:
  // 1. The first failure. If a peer caused it (a victim), then also
  // 2. the first failure that no peer caused: the user wants to read that cause.
  // 3. A failure whose error file is older than the cause that was reported, instead of it.
  // Workers in `unended` failed while they still run (they hang): such a failure waits for the exit
  // status, and later failures wait with it, as they may be its consequence.
  Report TakeNextReport(const std::set<int>& unended);
  // Makes no further report.
  void StopReports() { reported_ = Reported::kNoMore; }

  // Returns this node's failure that `cause` ("rank 3 exited with code 1") describes; null: none.
  const WorkerFailure* CalledBy(const std::string& cause) const;

  // Returns the first failure that neither a peer nor the agent caused, or null. Error files decide
  // the order where they have times; else the order of Add() does.
  const WorkerFailure* FirstOwn() const;
  const WorkerFailure* First() const { return failures_.empty() ? nullptr : &failures_.front(); }

  // Returns all failures: `root` first, with `was_stopped` cleared; then the others in the order
  // seen; then victims; then the stopped workers. `root`: one of these failures, or null.
  std::vector<WorkerFailure> InOrder(const WorkerFailure* root) const;

 private:
  enum class Reported { kNothing, kVictim, kCause, kNoMore };

  Report TakeEarlierThanReported(size_t known);

  std::vector<WorkerFailure> failures_;
  std::vector<WorkerFailure> stopped_;
  Reported reported_ = Reported::kNothing;
  int cause_rank_ = -1;  // the rank that was reported last as the cause; valid in kCause
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_FAILED_WORKERS_H_
