#ifndef DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_CHECKPOINT_SELECTION_H_
#define DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_CHECKPOINT_SELECTION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "elastic/checkpoint/format/checkpoint_id.h"

namespace ddp::elastic {

// Selects the checkpoint that all ranks load. Pure.
//
// In each round every rank proposes the newest undamaged checkpoint whose ID is below the bound.
// The first round has no bound. The verdict is about the newest of all proposals:
// - Every rank can read the checkpoint, and it fits: all ranks load it.
// - Every rank can read the checkpoint, and it does not fit a rank's model: the restore fails.
// - The checkpoint is damaged for a rank, or lacks a file for every rank: the bound becomes its ID.
// - There is another obstacle, which may pass: the ranks retry a few times, then the restore fails.

// The result of one rank's search.
struct Proposal {
  // A reason other than damage why the rank cannot read a checkpoint.
  struct Obstacle {
    std::optional<CheckpointId> id;  // of the checkpoint; none: the root cannot be listed
    std::string file;                // the path of a file that is missing; empty: another obstacle
    std::string message;             // names the file and the reason
  };

  int64_t listed = 0;                    // checkpoints that the rank sees, complete or not
  std::optional<CheckpointId> id;        // the newest below the bound that the rank could read
  std::string manifest_hash;             // of checkpoint `id`
  std::optional<Obstacle> obstacle;      // to the newest below the bound; then there is no `id`
  std::vector<CheckpointId> damaged;     // found damaged in any round
  std::vector<std::string> absent;       // files of the last verdict's look_for that are missing
  std::vector<std::string> passed_over;  // reasons against newer checkpoints, of all rounds
  std::vector<std::string> mismatches;   // of `id` with the rank's own model; none: it fits
};

// The decision of one round, equal on all ranks.
struct Verdict {
  enum class Kind {
    kLoad,      // every rank has read the checkpoint
    kEmpty,     // there is no checkpoint
    kTryOlder,  // another round with IDs below `bound`; ranks keep `reason`, if any
    kRetry,     // another round with the same bound; each rank also looks for `look_for`
    kFail,      // no checkpoint is loaded, because of `reason`
  };
  Kind kind = Kind::kFail;
  CheckpointId bound;
  bool does_not_fit = false;  // of kFail: the checkpoint is of another model or job
  bool is_damage = false;     // of kFail: every checkpoint is damaged
  std::string reason;
  std::vector<std::string> look_for;     // paths of files
  bool read_again = false;               // of kRetry: each rank reads its proposal once more
  std::vector<std::string> passed_over;  // of all ranks; names the ranks where not all agree
};

// Returns the verdict of a round. proposals[r] is rank r's; no proposals fail a CHECK. `folder`:
// the path of all checkpoints, for messages. `may_retry`: retries are left for obstacles.
Verdict SelectCheckpoint(const std::vector<Proposal>& proposals, const std::string& folder,
                         bool may_retry = false);

// Convert to and from the text that the ranks exchange. Parsing trusts nothing. Errors: kDataLoss.
std::string EncodeProposal(const Proposal& proposal);
absl::StatusOr<Proposal> ParseProposal(const std::string& text);
std::string EncodeVerdict(const Verdict& verdict);
absl::StatusOr<Verdict> ParseVerdict(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_SAVE_LOAD_CHECKPOINT_SELECTION_H_
