#ifndef DDP_ELASTIC_HEALTH_HEALTH_PAGE_H_
#define DDP_ELASTIC_HEALTH_HEALTH_PAGE_H_

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/unique_fd.h"
#include "elastic/health/phase.h"

namespace ddp::elastic {

// The environment variable that carries the number of the inherited descriptor.
inline constexpr char kHealthFdVariable[] = "DDP_HEALTH_FD";

// One page of memory between a worker and its agent. The worker writes how far it has come, when,
// and what it is doing; the agent writes when it shall stop. Neither side ever waits for the other,
// and what is called once a step costs no system call.
//
//   agent:   Create() -> BeginGeneration(g) -> pass fd() to the worker as DDP_HEALTH_FD -> Read()
//            RequestStop(step), when the membership of the job is about to change
//   worker:  Map(fd) -> Attach() -> EnterPhase(phase), CommitStep(step), ShouldStop() in each step
//            RecordSave(error) after each save of a checkpoint
//
// The page is a sealed memfd: it cannot shrink under a reader. What a reader sees is data, never
// trusted: no size, offset or pointer is taken from the page, what is out of range is replaced, and
// Read() ends after a bounded number of tries whatever the writer does. A stamp may still be any
// number: who computes with it bounds it by what he knows himself.
//
// Threads: one writer at a time over all processes (BeginGeneration, CommitStep, EnterPhase,
// RecordSave, Attach), in the worker thus one thread; all the rest from any number of threads and
// processes. Move-only; unmaps and closes when destroyed, which does not affect the other side.
class HealthPage {
 public:
  // Whether a worker vouches for the page with its life (see Attach).
  enum class Worker { kNotAttached, kAttached, kDied };

  // Stamps are CLOCK_MONOTONIC in nanoseconds.
  struct Snapshot {
    uint64_t generation = 0;
    bool has_step = false;   // a step was committed in this generation; else what is of steps is 0
    int64_t step = 0;        // of the last commit
    int64_t first_step = 0;  // of the generation's first commit
    int64_t commits = 0;     // in this generation
    int64_t first_commit_monotonic_ns = 0;  // of the generation's first commit
    int64_t last_commit_monotonic_ns = 0;
    // From one commit to the next, without what is no part of a step (IsPartOfStep). The first
    // commit ends the startup and no step.
    int64_t longest_step_us = 0;

    Phase phase = Phase::kStartup;
    int64_t phase_start_monotonic_ns = 0;
    // Since when the current step has gone on without interruption: the last commit, the end of a
    // checkpoint or evaluation after it, or the start of the generation.
    int64_t step_start_monotonic_ns = 0;
    // By phase, from the generation's start to the last commit: of whole steps.
    std::array<int64_t, kPhaseCount> phase_total_us{};

    // Saves of checkpoints in this generation, and since the last one that succeeded; never
    // negative. `save_error`: why the newest failed save failed, of any bytes but NUL.
    int64_t failed_saves = 0;
    int64_t failed_saves_in_a_row = 0;
    std::string save_error;

    Worker worker = Worker::kNotAttached;
    bool tells_waits = false;       // enters Phase::kSynchronize whenever it waits for peers
    bool stop_aware = false;        // has called ShouldStop() at least once
    bool stopped_as_asked = false;  // ShouldStop() has said true: it is ending because it was asked
  };

  // The argument of RequestStop() that means: whatever the step.
  static constexpr int64_t kStopAtOnce = -1;

  // RecordSave() keeps this much of a text: of a longer one its begin and its end.
  static constexpr size_t kSaveErrorBytes = 256;

  // A new page of zeros in generation 0. Errors: kResourceExhausted (descriptors or memory).
  static absl::StatusOr<HealthPage> Create();

  // Maps the page behind `fd` and takes over `fd`, also on error. Errors: kInvalidArgument (not a
  // health page, or one of another version), kInternal (fstat, mmap).
  static absl::StatusOr<HealthPage> Map(int fd);

  HealthPage(HealthPage&& other) noexcept;
  HealthPage& operator=(HealthPage&& other) noexcept;
  ~HealthPage();

  // Close-on-exec; whoever passes it to a child clears that in the child.
  int fd() const { return fd_.get(); }

  // Agent: starts `generation`, in Phase::kStartup: what was written before is forgotten, a request
  // to stop too. Before the worker is started.
  void BeginGeneration(uint64_t generation);

  // Agent: asks the worker to end after it has committed step `stop_at_step` (or a later one, when
  // that is done already), so that all ranks end after the same step; kStopAtOnce: as soon as it
  // asks. Replaces an earlier request.
  void RequestStop(int64_t stop_at_step);
  // Agent: takes the request back. A worker that has seen it ends all the same.
  void ClearStop();

  // Worker: states that the optimizer step `step` is done, now.
  void CommitStep(int64_t step);

  // Worker: from now on in `phase`. After the first commit there is no startup: it counts as
  // Phase::kOther.
  void EnterPhase(Phase phase);
  Phase phase() const;

  // Worker: what it does in this phase gets on: the phase counts from now. For long work that is no
  // part of a step. Costs no system call.
  void Progress();

  // Worker: a checkpoint was saved (`error` is empty), or it was not, because of `error`.
  void RecordSave(absl::string_view error);

  // Worker: from now on it enters Phase::kSynchronize whenever it waits for peers within a step.
  void TellWaits();

  // Worker: whether the agent has asked it to end and the step to end after is committed. Once true
  // it stays true. The snapshot tells the agent that the worker asks, and what it was told.
  bool ShouldStop();

  // Worker: binds the page to the calling thread until that thread ends: takes the robust mutex in
  // the page, which the kernel marks when the owner dies, SIGKILL included. Call it once, on a
  // thread that lives as long as the process (main). Readers see kAttached, then kDied. Errors:
  // kFailedPrecondition (already attached by a thread that lives).
  absl::Status Attach();

  Snapshot Read() const;

 private:
  struct Layout;
  HealthPage(UniqueFd fd, Layout* layout);

  UniqueFd fd_;
  Layout* layout_;  // the mapping; null after a move
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_HEALTH_HEALTH_PAGE_H_
