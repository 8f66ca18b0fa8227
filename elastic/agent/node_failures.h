#ifndef DDP_ELASTIC_AGENT_NODE_FAILURES_H_
#define DDP_ELASTIC_AGENT_NODE_FAILURES_H_

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "elastic/agent/process_spawner.h"
#include "elastic/agent/worker_failure.h"

namespace ddp::elastic {

// The workers of this node that ended badly in one generation: which of them the rendezvous is told
// of next, which may be the job's root cause, and in which order people want to read of them. Pure.
//
// A victim is a worker that says itself that a peer failed first.
//
// Thread-compatible. Pointers to failures are valid until the next change.
class NodeFailures {
 public:
  // In the order in which they were seen. One whose `was_stopped` is set ended when the generation
  // was over already: the rendezvous may take it for the root cause yet.
  void Add(WorkerFailure failure) { failures_.push_back(std::move(failure)); }
  // One that ended as it was asked to. It is no cause of anything.
  void AddStopped(WorkerFailure failure) { stopped_.push_back(std::move(failure)); }

  // Whether the error file of `failure`, which is none of these yet, says that it came before all
  // failures that brought the workers of this node to their end. Error files have whole seconds.
  bool CameFirst(const WorkerFailure& failure) const;

  // How a worker ended that was added because it hung. False: none was.
  bool Complete(int local_rank, const ExitStatus& status);

  bool empty() const { return failures_.empty() && stopped_.empty(); }

  // The failure that the rendezvous is to be told of now; null: none. It is told of the first one
  // and, when that is a victim's, of the first that is not: its cause is the one that the user
  // wants to read. One of a worker in `unended` is waited for, for only then is it known how it
  // ended; those behind it may have ended because of it. After the cause it is told of one whose
  // error file says that it came before that one. What is returned counts as told.
  const WorkerFailure* TakeNextToTell(const std::set<int>& unended);
  // The rank whose failure was told as the cause, and which the one that was taken last preceded;
  // -1: none.
  int told_instead_of() const { return told_instead_of_; }
  // The rendezvous wants to hear of none any more.
  void TellNone() { told_ = Told::kNoMore; }

  // The one that `cause`, "rank 3 exited with code 1", is of; null: none of this node's.
  const WorkerFailure* CalledBy(const std::string& cause) const;

  // The first that no peer and no agent brought about: by the error files where these tell, else
  // by the order in which they were seen. Null: there is none.
  const WorkerFailure* FirstOwn() const;
  const WorkerFailure* First() const { return failures_.empty() ? nullptr : &failures_.front(); }

  // `root`, one of these or null, as one that nobody stopped; then the others in the order in which
  // they were seen, behind them victims, behind them those that were stopped.
  std::vector<WorkerFailure> InOrder(const WorkerFailure* root) const;

 private:
  enum class Told { kNothing, kVictim, kCause, kNoMore };

  const WorkerFailure* TakeEarlierThanTold(size_t known);

  std::vector<WorkerFailure> failures_;
  std::vector<WorkerFailure> stopped_;
  Told told_ = Told::kNothing;
  int told_rank_ = -1;  // of the cause
  int told_instead_of_ = -1;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_NODE_FAILURES_H_
