#ifndef DDP_ELASTIC_WORKER_WORKER_SESSION_H_
#define DDP_ELASTIC_WORKER_WORKER_SESSION_H_

#include <cstdint>
#include <string>

namespace ddp::elastic {

class HealthPage;

// Who this process is within the job, and its line to the agent that started it.
//
//   WorkerSession session = WorkerSession::from_environment();
//   ...
//   optimizer.step();
//   session.commit(++step);  // "the optimizer step `step` is done on this rank"
//
// Under ddprun the commit is seen by the agent, which knows by it how far the rank has come. Under
// another launcher that sets RANK, WORLD_SIZE, ... (torchrun) the session tells the same facts and
// a commit goes nowhere. With none of these variables set, the process is a job of its own: rank 0
// of 1, generation 0.
//
// Threads: commit() from one thread at a time; everything else from any. A small value: copies
// speak for the same process. A session does not touch the process group or the store; it may be
// made before them.
class WorkerSession {
 public:
  // Reads the environment. Throws std::runtime_error, with one line that names the variable and
  // its value, when a variable of the launcher's contract is missing while others are set, is not a
  // number or is out of range, or when DDP_HEALTH_FD is not the page of an agent. Call it on the
  // main thread: under ddprun the agent takes the end of the calling thread for the end of the
  // worker.
  static WorkerSession from_environment();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }

  // Counts the memberships that the job has had: higher after every restart, never reused. 0 when
  // the launcher does not count them. The nonce tells two memberships with one number apart (of
  // two starts of a job); empty under the same condition.
  uint64_t generation() const { return generation_; }
  const std::string& generation_nonce() const { return generation_nonce_; }

  // How often the job was restarted after a failure: 0 in the first attempt.
  int64_t restart_count() const { return restart_count_; }
  const std::string& run_id() const { return run_id_; }

  // States that optimizer step `step` is complete on this rank. Costs no system call and never
  // fails. Call it after every step; the numbering is the trainer's and goes on after a restore.
  void commit(int64_t step);

 private:
  WorkerSession() = default;

  int rank_ = 0;
  int world_size_ = 1;
  int local_rank_ = 0;
  uint64_t generation_ = 0;
  std::string generation_nonce_;
  int64_t restart_count_ = 0;
  std::string run_id_;
  HealthPage* page_ = nullptr;  // this process's, for its whole life; null where no agent listens
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_WORKER_SESSION_H_
