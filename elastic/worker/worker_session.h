#ifndef DDP_ELASTIC_WORKER_WORKER_SESSION_H_
#define DDP_ELASTIC_WORKER_WORKER_SESSION_H_

#include <cstdint>
#include <string>

#include "elastic/health/phase.h"

namespace ddp::elastic {

class HealthPage;

// Holds this process's place in the job (rank, world size, generation) and reports its progress to
// the agent that started it.
//
//   WorkerSession session = WorkerSession::from_environment();
//   ... restore the newest checkpoint ...
//   while (auto batch = sampler.next_batch()) {
//     ... forward, backward, optimizer.step() ...
//     session.commit(++step);  // the optimizer step `step` is done on this rank
//     if (session.should_stop()) {
//       checkpointer.save(state);
//       return 0;
//     }
//   }
//
// Under ddprun the agent reads commits and phases from the health page of this process. They show
// the agent the rank's step, whether the rank hangs, and why it is slower than the others. Under
// another launcher that sets RANK, WORLD_SIZE, ... (torchrun) commits and phases have no effect,
// and should_stop() reports SIGTERM only (see handle_sigterm). Without any of these variables the
// process is a job of its own: rank 0 of 1, generation 0.
//
// Threads: from_environment() from the main thread; commit(), phase(), progress() and report_save()
// from one thread at a time; all else from any thread. A session is a small value: all copies act
// on the same process. A session does not use the process group or the store, and may be made
// before them.
class WorkerSession {
 public:
  // Keeps the process in a phase until the end of the scope; then restores the previous phase. Make
  // it on the stack of the thread that commits.
  class PhaseScope {
   public:
    PhaseScope(const PhaseScope&) = delete;
    PhaseScope& operator=(const PhaseScope&) = delete;
    ~PhaseScope();

   private:
    friend class WorkerSession;
    PhaseScope(HealthPage* page, Phase phase);

    HealthPage* const page_;  // null without an agent
    Phase previous_ = Phase::kOther;
  };

  // Reads the environment.
  // Throws std::runtime_error, with one line that names the variable and its value, when:
  // - a variable of the launcher's contract is missing while others are set;
  // - a variable is not a number, or is out of range;
  // - DDP_HEALTH_FD is not the page of an agent.
  // Thread: the main thread. Under ddprun the end of the thread that made the first call counts as
  // the end of the worker.
  static WorkerSession from_environment();

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int local_rank() const { return local_rank_; }
  // 0: the launcher does not say.
  int local_world_size() const { return local_world_size_; }

  // Returns the number of the job's generation: of its set of workers between two restarts. Within
  // one start of the job each restart increases the number. 0: the launcher counts no generations.
  uint64_t generation() const { return generation_; }
  // Returns the generation's nonce. It differs between two generations of the same number, which
  // two starts of a job may have. Empty when the launcher sets none.
  const std::string& generation_nonce() const { return generation_nonce_; }

  // Returns the number of restarts of the job after a failure: 0 in the first attempt.
  // max_restarts() is its limit. Equal on all ranks under ddprun. Under torchrun each agent counts
  // the failures of its own workers only, so the ranks of two agents may have different counts:
  // let the ranks agree before they act on it. Training does.
  int64_t restart_count() const { return restart_count_; }
  int64_t max_restarts() const { return max_restarts_; }

  // Returns true when the job has run before this generation, so that it may have checkpoints. A
  // change of nodes is a restart too, and restart_count() does not count it. Equal on all ranks
  // under ddprun. Under torchrun this is restart_count() > 0: it may differ between the ranks of
  // two agents, and does not show a change of nodes.
  bool is_restart() const { return restart_count_ > 0 || generation_ > 1; }

  const std::string& run_id() const { return run_id_; }

  // Returns the address of this generation's store, as in DDP_STORE; empty under other launchers.
  const std::string& store_url() const { return store_url_; }

  // Tells the agent that optimizer step `step` is complete on this rank. Call it after every step.
  // The trainer numbers the steps: the same on all ranks, and continued after a restore. Costs no
  // system call and never fails.
  void commit(int64_t step);

  // Returns true when this process must end, because the membership of the job is about to change:
  // nodes join, or a node has to leave. Returns true on all ranks after the commit of the same
  // step, and from then on. After handle_sigterm() also returns true once the agent has sent this
  // process SIGTERM; then the step may differ between ranks. Costs no system call before a SIGTERM.
  // Call it after every commit. When it returns true, save a checkpoint and return 0 from main. The
  // job then continues in a new generation and loses nothing. The agent stops a program that never
  // calls should_stop() by SIGTERM.
  // The process must end within --shutdown-timeout (30 s) of the agent's request, or twice the
  // longest step. The steps up to the common step are part of that time, and so is the save. Each
  // of these steps, each block of the save and each progress() gives that time anew, up to ten
  // times --shutdown-timeout. Then the agent sends SIGKILL.
  //
  // Without an agent: returns true when SIGTERM has arrived since handle_sigterm(). Ranks may see
  // SIGTERM after different steps, so all-reduce the answer before acting on it.
  bool should_stop();

  // Makes SIGTERM set should_stop() instead of ending the process. Replaces the installed handler.
  // Under ddprun only a SIGTERM from the agent counts. A scheduler that signals every process
  // signals the agent too, and the agent asks all ranks to end after the same step.
  // Throws std::runtime_error when the system refuses.
  void handle_sigterm();

  // Puts this rank into `phase` until the end of the scope:
  // `auto phase = session.phase(Phase::kData);`. Costs no system call.
  // Outside of all scopes the phase is kStartup until the first commit, and kOther after it.
  // Collectives of a ddp::ProcessGroup enter kSynchronize while they block this thread, except in
  // kStartup, kCheckpoint and kEvaluation.
  [[nodiscard]] PhaseScope phase(Phase phase) { return {page_, phase}; }

  // Tells the agent that the work of this phase makes progress. A rank in kCheckpoint or
  // kEvaluation that calls progress() repeatedly does not count as hung. Nor does a rank of its
  // node that waits for it. Call it in long work outside of steps; Checkpointer does. Costs no
  // system call.
  void progress();

  // Tells the agent the most ranks with which this program can run, >= 1. While it runs, a node
  // with which there would be more waits as a spare. Training calls it. Costs no system call.
  void set_max_world_size(int64_t ranks);

  // Tells the agent that a checkpoint was saved (`error` is empty), or the reason why it was not.
  // The agent counts failed saves for `ddprun status` and the metrics. Checkpointer calls it after
  // each save that it has tried. Costs no system call and never fails.
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
  HealthPage* page_ = nullptr;  // of this process, for its whole life; null without an agent
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_WORKER_SESSION_H_
