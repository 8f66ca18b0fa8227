#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINT_OWNER_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINT_OWNER_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ddp::elastic {

// A writer of checkpoints: one generation of a job.
struct CheckpointOwner {
  std::string run_id;
  uint64_t generation = 0;
  std::string nonce;     // unique to the generation; see IsPlainNonce
  int64_t instance = 0;  // the number of the job among the jobs of the run id; 0: unknown
  std::string job;       // unique to the job, from its rendezvous; empty: unknown

  // Whether both are the same writer. `job` does not count: the rendezvous may not have answered.
  bool IsSame(const CheckpointOwner& other) const {
    return run_id == other.run_id && instance == other.instance && generation == other.generation &&
           nonce == other.nonce;
  }
};

// Asks the rendezvous of a job whether the generation of this process is still the newest one, and
// returns the job's token. kFailedPrecondition: it is not. Every other error: there is no answer.
using AskRendezvous = std::function<absl::StatusOr<std::string>()>;

// Whether `next` may take a folder over that `current` owns. Pure.
//
// Two writers of one job are ordered by (instance, generation): a lower one never follows a higher
// one. Two writers that differ in their run id, or in their token where both are known, are of two
// jobs: the later claim counts. A job that is started anew counts its generations from 1 again.
//
// kFailedPrecondition: `next` is the older one; the message has both numbers.
absl::Status MayFollow(const CheckpointOwner& next, const CheckpointOwner& current);

// Whether both may be writers of one job: nothing that is known of both differs. The token tells
// jobs apart. Without it the instance does: a server that starts empty counts instances anew, so an
// instance says less. Pure.
bool MayBeOfOneJob(const CheckpointOwner& a, const CheckpointOwner& b);

// "generation 3 of instance 1 of run \"digits\"", for messages.
std::string OwnerText(const CheckpointOwner& owner);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINT_OWNER_H_
