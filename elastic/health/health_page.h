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

// Environment variable with the number of the inherited descriptor.
inline constexpr char kHealthFdVariable[] = "DDP_HEALTH_FD";

// A page of memory shared by a worker and its agent. The worker writes its progress, its times and
// its phase; the agent writes a request to stop. Neither side ever waits for the other. Calls that
// are made once per step cost no system call. Each side owns its own mapping.
//
//   agent:   Create() -> BeginGeneration(g) -> pass fd() to the worker as DDP_HEALTH_FD -> Read()
//            RequestStop(step), when the membership of the job is about to change
//   worker:  Map(fd) -> Attach() -> EnterPhase(phase), CommitStep(step), ShouldStop() in each step
//            RecordSave(error) after each save of a checkpoint
//
// The page is a sealed memfd: it cannot shrink under a reader. Its content is not trusted. No size,
// offset or pointer is taken from it, and values out of range are replaced. Read() retries while a
// write is in progress; after a bounded number of tries it returns fields that may not match each
// other. A stamp may be any number: bound it before computing with it.
//
// Threads: one writer at a time over all processes for BeginGeneration, CommitStep, EnterPhase,
// Progress, RecordSave and Attach, so one thread in the worker. All other methods: any number of
// threads and processes. Move-only. The destructor unmaps and closes this side only.
class HealthPage {
 public:
  // State of the worker that has attached to the page (see Attach).
  enum class Worker { kNotAttached, kAttached, kDied };

  // Stamps are CLOCK_MONOTONIC in nanoseconds.
  struct Snapshot {
    uint64_t generation = 0;
    bool has_step = false;   // a step was committed in this generation; false: step fields are 0
    int64_t step = 0;        // last committed step
    int64_t first_step = 0;  // first committed step of this generation
    int64_t commits = 0;     // number of commits in this generation
    int64_t first_commit_monotonic_ns = 0;  // time of the first commit
    int64_t last_commit_monotonic_ns = 0;
    // Longest time between two commits, without phases that are not part of a step (IsPartOfStep).
    // The time before the first commit is startup and does not count.
    int64_t longest_step_us = 0;

    Phase phase = Phase::kStartup;
    int64_t phase_start_monotonic_ns = 0;
    // Start of the uninterrupted part of the current step: the last commit, the end of a later
    // checkpoint or evaluation, or the start of the generation.
    int64_t step_start_monotonic_ns = 0;
    // Time per phase from the start of the generation to the last commit: whole steps only.
    std::array<int64_t, kPhaseCount> phase_total_us{};

    // Failed checkpoint saves in this generation, and since the last success; never negative.
    // `save_error` is the error of the newest failed save: any bytes but NUL.
    int64_t failed_saves = 0;
    int64_t failed_saves_in_a_row = 0;
    std::string save_error;

    int64_t max_world_size = 0;  // most ranks that the program accepts; 0: it has not said

    Worker worker = Worker::kNotAttached;
    bool tells_waits = false;       // enters Phase::kSynchronize whenever it waits for peers
    bool stop_aware = false;        // has called ShouldStop() at least once
    bool stopped_as_asked = false;  // ShouldStop() has returned true, so the worker is ending
  };

  // Argument of RequestStop(): stop at any step.
  static constexpr int64_t kStopAtOnce = -1;

  // Maximal size of a save error. A longer text keeps its begin and its end.
  static constexpr size_t kSaveErrorBytes = 256;

  // Creates an empty page in generation 0. Errors: kUnimplemented (the system gives no file for
  // it: names the calls and the reasons), kResourceExhausted (mmap), kInternal (no robust mutex).
  static absl::StatusOr<HealthPage> Create();

  // Maps the page of `fd` and takes ownership of `fd`, even on an error. Errors: kInvalidArgument
  // (not a health page, or another version), kInternal (fcntl, mmap).
  static absl::StatusOr<HealthPage> Map(int fd);

  HealthPage(HealthPage&& other) noexcept;
  HealthPage& operator=(HealthPage&& other) noexcept;
  ~HealthPage();

  // The descriptor, close-on-exec. The spawner must clear that flag in the child.
  int fd() const { return fd_.get(); }

  // Agent: begins `generation` in Phase::kStartup and clears all earlier data, including a request
  // to stop. Call before the worker starts.
  void BeginGeneration(uint64_t generation);

  // Agent: asks the worker to end after it has committed step `stop_at_step` or a later one, so
  // that all ranks end after the same step. kStopAtOnce: at the next ShouldStop(). Replaces an
  // earlier request.
  void RequestStop(int64_t stop_at_step);
  // Agent: withdraws the request. A worker that has seen it ends nevertheless.
  void ClearStop();

  // Worker: records that optimizer step `step` is done now.
  void CommitStep(int64_t step);

  // Worker: enters `phase`. After the first commit kStartup counts as Phase::kOther.
  void EnterPhase(Phase phase);
  Phase phase() const;

  // Worker: reports progress of long work that is not part of a step: the time of the phase starts
  // again. Costs no system call.
  void Progress();

  // Worker: records a checkpoint save: empty `error` for a success, else its error.
  void RecordSave(absl::string_view error);

  // Worker: tells the most ranks with which the program can run, >= 1.
  void SetMaxWorldSize(int64_t ranks);

  // Worker: promises to enter Phase::kSynchronize whenever it waits for peers within a step.
  void TellWaits();

  // Worker: returns true when the agent has asked it to stop and the requested step is committed.
  // Stays true from then on. The snapshot shows the agent that the worker polls, and the answer.
  bool ShouldStop();

  // Worker: binds the page to the calling thread until that thread ends, by a robust mutex in the
  // page. The kernel marks the mutex when its owner dies, even by SIGKILL. Call it once, on a
  // thread that lives as long as the process (main). Readers see kAttached, then kDied. Errors:
  // kFailedPrecondition (a living thread is attached).
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
