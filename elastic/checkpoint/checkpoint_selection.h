#ifndef DDP_ELASTIC_CHECKPOINT_CHECKPOINT_SELECTION_H_
#define DDP_ELASTIC_CHECKPOINT_CHECKPOINT_SELECTION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/checkpoint_id.h"

namespace ddp::elastic {

// How the ranks agree on the checkpoint that all of them load. In each round every rank proposes
// the newest checkpoint below the bound that is not damaged; the verdict is about the newest of all
// proposals. Every rank can read it: it is loaded. It is damaged for a rank, or a file of it is
// missing to every rank: the bound is lowered. Any other obstacle may pass: the ranks look again a
// few times, and then the restore fails. Pure.

// What a rank has found.
struct Proposal {
  // Keeps the rank from reading a checkpoint, and is no damage of it.
  struct Obstacle {
    std::optional<CheckpointId> id;  // of the checkpoint; none: the folder of all cannot be listed
    std::string file;     // the path of a file that is not there; empty: another obstacle
    std::string message;  // names the file and the reason
  };

  int64_t listed = 0;                    // checkpoints in the folder as it sees it, whole or not
  std::optional<CheckpointId> id;        // the newest below the bound that it has read in full
  std::string manifest_hash;             // of that one
  std::optional<Obstacle> obstacle;      // to the newest below the bound; then there is no `id`
  std::vector<CheckpointId> damaged;     // found damaged in any round
  std::vector<std::string> absent;       // files of the last verdict's look_for: not there
  std::vector<std::string> passed_over;  // newer ones and why not, of all rounds so far
  std::vector<std::string> mismatches;   // of `id` with the rank's own model; none: it fits
};

struct Verdict {
  enum class Kind {
    kLoad,      // every rank has it
    kEmpty,     // there is no checkpoint
    kTryOlder,  // another round, with ids below `bound`; `reason`, if any, is to be remembered
    kRetry,     // another round with the same bound; each rank also looks for `look_for`
    kFail,      // `reason`; `does_not_fit`: it can be read, but is of another model or job
  };
  Kind kind = Kind::kFail;
  CheckpointId bound;
  bool does_not_fit = false;
  bool is_damage = false;  // of kFail: every checkpoint is damaged
  std::string reason;
  std::vector<std::string> look_for;     // paths of files
  bool read_again = false;               // of kRetry: what a rank has read, it reads once more
  std::vector<std::string> passed_over;  // over all ranks; with the ranks where not all agree
};

// proposals[r] is rank r's; not empty. `folder` is the path of all checkpoints. `may_retry`:
// obstacles have not been looked at often enough yet.
Verdict SelectCheckpoint(const std::vector<Proposal>& proposals, const std::string& folder,
                         bool may_retry = false);

// For the way between ranks. Parsing trusts nothing: kDataLoss.
std::string EncodeProposal(const Proposal& proposal);
absl::StatusOr<Proposal> ParseProposal(const std::string& text);
std::string EncodeVerdict(const Verdict& verdict);
absl::StatusOr<Verdict> ParseVerdict(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINT_SELECTION_H_
