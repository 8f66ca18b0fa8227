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

  // Returns the failure to report now, or null. The first failure is reported, and, if it is a
  // victim's, the first that is not: the user wants to read that cause. A failure of a worker in
  // `unended` is reported after the worker's end, when its exit status is known; later failures
  // wait too, as they may be its consequence. After the cause, a failure whose error file is older
  // is reported. The returned failure counts as reported.
  const WorkerFailure* TakeNextToTell(const std::set<int>& unended);
  // The rank that was reported as the cause and that the last returned failure preceded; -1: none.
  int told_instead_of() const { return told_instead_of_; }
  // Stops all further reports.
  void TellNone() { told_ = Told::kNoMore; }

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
  enum class Told { kNothing, kVictim, kCause, kNoMore };

  const WorkerFailure* TakeEarlierThanTold(size_t known);

  std::vector<WorkerFailure> failures_;
  std::vector<WorkerFailure> stopped_;
  Told told_ = Told::kNothing;
  int told_rank_ = -1;  // reported as the cause
  int told_instead_of_ = -1;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_FAILED_WORKERS_H_
