#ifndef DDP_ELASTIC_HEALTH_HEALTH_PAGE_H_
#define DDP_ELASTIC_HEALTH_HEALTH_PAGE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace ddp::elastic {

// The environment variable that carries the number of the inherited descriptor.
inline constexpr char kHealthFdVariable[] = "DDP_HEALTH_FD";

// One page of memory that a worker writes and its agent reads: how far the worker has come, and
// when. Neither side ever waits for the other, and a commit costs no system call.
//
//   agent:   Create() -> BeginGeneration(g) -> pass fd() to the worker as DDP_HEALTH_FD -> Read()
//   worker:  Map(fd) -> Attach() -> CommitStep(step) after each optimizer step
//
// The page is a sealed memfd: it cannot shrink under a reader. What a reader sees is data, never
// trusted: no size, offset or pointer is taken from the page, and Read() ends after a bounded
// number of tries whatever the writer does.
//
// Threads: one writer at a time over all processes (BeginGeneration, CommitStep, Attach); Read()
// from any number of threads and processes. Move-only; unmaps and closes when destroyed, which
// does not affect the other side.
class HealthPage {
 public:
  // Whether a worker vouches for the page with its life (see Attach).
  enum class Worker { kNotAttached, kAttached, kDied };

  struct Snapshot {
    uint64_t generation = 0;
    bool has_step = false;   // a step was committed in this generation; else the rest is 0
    int64_t step = 0;        // of the last commit
    int64_t first_step = 0;  // of the generation's first commit
    int64_t first_commit_monotonic_ns = 0;  // CLOCK_MONOTONIC, of the generation's first commit
    int64_t last_commit_monotonic_ns = 0;
    Worker worker = Worker::kNotAttached;
  };

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

  // Starts `generation`: what was committed before is forgotten.
  void BeginGeneration(uint64_t generation);

  // States that the optimizer step `step` is done, now.
  void CommitStep(int64_t step);

  // Binds the page to the calling thread until that thread ends: takes the robust mutex in the
  // page, which the kernel marks when the owner dies, SIGKILL included. Call it once, on a thread
  // that lives as long as the process (main). Readers see kAttached, then kDied. Errors:
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
