#ifndef DDP_ELASTIC_WORKER_WORKER_SESSION_H_
#define DDP_ELASTIC_WORKER_WORKER_SESSION_H_

#include <cstdint>
#include <string>

#include "elastic/health/phase.h"

namespace ddp::elastic {

class HealthPage;

// Who this process is within the job, and its line to the agent that started it.
//
//   WorkerSession session = WorkerSession::from_environment();
//   ... restore the newest checkpoint ...
//   while (auto batch = sampler.next_batch()) {
//     {
//       auto phase = session.phase(Phase::kForward);
//       loss = model.forward(batch);
//     }
//     ...
//     optimizer.step();
//     session.commit(++step);  // "the optimizer step `step` is done on this rank"
//     if (session.should_stop()) {
//       checkpointer.save(state);
//       return 0;
//     }
//   }
//
// Under ddprun the agent sees commits and phases: how far the rank has come, whether it hangs, and
// what makes it slower than the others. Under another launcher that sets RANK, WORLD_SIZE, ...
// (torchrun) the session tells the same facts, commits and phases go nowhere, and should_stop()
// knows of SIGTERM only (handle_sigterm). With none of these variables set, the process is a job of
// its own: rank 0 of 1, generation 0.
//
// Threads: commit() and phases from one thread at a time; everything else from any. A small value:
// copies speak for the same process. A session does not touch the process group or the store; it
// may be made before them.
class WorkerSession {
 public:
  // The time until it goes out of scope is spent in a phase; then the one before it goes on. On the
  // stack, of the thread that commits.
  class PhaseScope {
   public:
    PhaseScope(const PhaseScope&) = delete;
    PhaseScope& operator=(const PhaseScope&) = delete;
    ~PhaseScope();

   private:
    friend class WorkerSession;
    PhaseScope(HealthPage* page, Phase phase);

    HealthPage* const page_;  // null where no agent listens
    Phase previous_ = Phase::kOther;
  };

  // Reads the environment. Throws std::runtime_error, with one line that names the variable and
  // its value, when a variable of the launcher's contract is missing while others are set, is not a
  // number or is out of range, or when DDP_HEALTH_FD is not the page of an agent. Call it on the
  // main thread: under ddprun the agent takes the end of the calling thread for the end of the
  // worker.
  static WorkerSession from_environment();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }
  int local_world_size() const { return local_world_size_; }

  // Counts the memberships that the job has had: higher after every restart, never reused. 0 when
  // the launcher does not count them. The nonce tells two memberships with one number apart (of
  // two starts of a job); empty under the same condition.
  uint64_t generation() const { return generation_; }
  const std::string& generation_nonce() const { return generation_nonce_; }

  // How often the job was restarted after a failure, equal on all ranks: 0 in the first attempt.
  // And how often it may be.
  int64_t restart_count() const { return restart_count_; }
  int64_t max_restarts() const { return max_restarts_; }

  // Whether the job has run before this generation, so that its checkpoints are there to go on
  // from: after a failure, and after nodes have come or gone, which restart_count() does not count.
  bool is_restart() const { return restart_count_ > 0 || generation_ > 1; }

  const std::string& run_id() const { return run_id_; }

  // The address of this generation's store, as DDP_STORE has it; empty under other launchers.
  const std::string& store_url() const { return store_url_; }

  // States that optimizer step `step` is complete on this rank. Costs no system call and never
  // fails. Call it after every step; the numbering is the trainer's, the same on all ranks, and
  // goes on after a restore.
  void commit(int64_t step);

  // Whether this process shall end now, because the membership of the job is about to change: nodes
  // come, or this one has to leave. It answers true on all ranks after the commit of the same step,
  // and from then on. Ask after every commit. A trainer that is told so saves a checkpoint and
  // returns 0 from main; the job goes on from there in a new generation, with nothing lost. A
  // program that never asks is stopped by SIGTERM. Costs no system call.
  //
  // Without an agent: whether SIGTERM has come since handle_sigterm(). The ranks may then see it
  // after different steps: let them agree (an all-reduce of the answer) before they act on it.
  bool should_stop();

  // From now on SIGTERM does not end the process but is an answer to should_stop(). Under ddprun
  // only the agent's does so: one that a scheduler sends to every process reaches the agent as
  // well, which then asks all ranks to end after the same step. Replaces the handler that was
  // there. Throws std::runtime_error when the system refuses.
  void handle_sigterm();

  // `auto phase = session.phase(Phase::kData);`: what this rank does until the end of the scope.
  // Time outside of all scopes is startup until the first commit, and Phase::kOther after it; the
  // collectives of a ddp::ProcessGroup are in Phase::kSynchronize by themselves while they wait on
  // this thread. Costs no system call.
  [[nodiscard]] PhaseScope phase(Phase phase) { return {page_, phase}; }

  // States that the work of this phase gets on, for work that is no part of a step and may take
  // long: a rank in kCheckpoint or kEvaluation that tells so again and again is not called hung,
  // nor is a rank of its node that waits for it. Checkpointer tells so by itself. On the thread
  // that commits. Costs no system call.
  void progress();

  // Tells the agent that a checkpoint was saved (`error` is empty), or that it was not and why. The
  // agent counts the failed ones for `ddprun status` and the metrics. Checkpointer calls it after
  // each save. On the thread that commits. Costs no system call and never fails.
  void report_save(const std::string& error);

 private:
  WorkerSession() = default;

  int rank_ = 0;
  int world_size_ = 1;
  int local_rank_ = 0;
  int local_world_size_ = 1;
  uint64_t generation_ = 0;
  std::string generation_nonce_;
  int64_t restart_count_ = 0;
  int64_t max_restarts_ = 0;
  std::string run_id_;
  std::string store_url_;
  HealthPage* page_ = nullptr;  // this process's, for its whole life; null where no agent listens
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_WORKER_SESSION_H_
