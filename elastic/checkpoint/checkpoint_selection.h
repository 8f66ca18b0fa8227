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
// the newest one that it can read in full and that is below the bound; the verdict loads it when it
// is the same everywhere, else lowers the bound. Pure.

// What a rank has found.
struct Proposal {
  int64_t listed = 0;                    // checkpoints in the folder as it sees it, whole or not
  std::optional<CheckpointId> id;        // the newest below the bound that it has read in full
  std::string manifest_hash;             // of that one
  std::vector<std::string> passed_over;  // newer ones and why not, of all rounds so far
  std::vector<std::string> mismatches;   // of that one with the rank's own model; none: it fits
};

struct Verdict {
  enum class Kind {
    kLoad,      // everybody has it
    kEmpty,     // there is no checkpoint
    kTryOlder,  // another round, with ids below `bound` (`bound_included`: or equal)
    kFail,      // `reason`; `does_not_fit`: it can be read, but is of another model or job
  };
  Kind kind = Kind::kFail;
  CheckpointId bound;
  bool bound_included = false;
  bool does_not_fit = false;
  std::string reason;
  std::vector<std::string> passed_over;  // over all ranks; with the ranks where not all agree
};

// proposals[r] is rank r's; not empty. `folder` is for messages.
Verdict SelectCheckpoint(const std::vector<Proposal>& proposals, const std::string& folder);

// For the way between ranks. Parsing trusts nothing: kDataLoss.
std::string EncodeProposal(const Proposal& proposal);
absl::StatusOr<Proposal> ParseProposal(const std::string& text);
std::string EncodeVerdict(const Verdict& verdict);
absl::StatusOr<Verdict> ParseVerdict(const std::string& text);

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_CHECKPOINT_CHECKPOINT_SELECTION_H_
