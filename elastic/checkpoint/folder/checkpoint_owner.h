#ifndef DDP_ELASTIC_CHECKPOINT_FOLDER_CHECKPOINT_OWNER_H_
#define DDP_ELASTIC_CHECKPOINT_FOLDER_CHECKPOINT_OWNER_H_

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
  int64_t instance = 0;  // the number of the job among the jobs of the run ID; 0: unknown
  std::string job;       // the token of the job, from its rendezvous; empty: unknown

  // Returns true when both are the same writer. Ignores `job`, which is empty when the rendezvous
  // did not answer.
  bool IsSame(const CheckpointOwner& other) const {
    return run_id == other.run_id && instance == other.instance && generation == other.generation &&
           nonce == other.nonce;
  }
};

// Makes the nonce of a writer from its generation's number and nonce, or at random when the nonce
// is empty. A launcher without generations (number 0) gives every job the same nonce, so
// OwnerNonce() adds a random part.
std::string OwnerNonce(uint64_t generation, const std::string& generation_nonce);

// Asks the rendezvous of a job whether the generation of this process is still the newest, and
// returns the job's token. Errors: kFailedPrecondition when the generation is not the newest. Every
// other error means that there is no answer.
using AskRendezvous = std::function<absl::StatusOr<std::string>()>;

// Returns OK when `next` may take over a folder that `current` owns. Pure.
//
// Writers of one job are ordered by (instance, generation), or by the generation alone when an
// instance is unknown. A lower one never follows a higher one.
// Writers with different run IDs, or with different known tokens, are of two jobs. Between two jobs
// the later claim wins, because a new job counts its generations from 1 again.
//
// Errors: kFailedPrecondition when `next` is the older writer; the message has both numbers.
absl::Status MayFollow(const CheckpointOwner& next, const CheckpointOwner& current);

// Returns true when both may be writers of one job. Known run IDs must be equal. Then the tokens
// decide when both are known, else the instances; an unknown instance equals any. The instance is
// the weaker sign, because a server that starts empty counts instances anew. Pure.
bool MayBeOfOneJob(const CheckpointOwner& a, const CheckpointOwner& b);

// Returns "generation 3 (<nonce>) of instance 1 of run \"digits\"", for messages.
std::string OwnerText(const CheckpointOwner& owner);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_FOLDER_CHECKPOINT_OWNER_H_
