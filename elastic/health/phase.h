#ifndef DDP_ELASTIC_HEALTH_PHASE_H_
#define DDP_ELASTIC_HEALTH_PHASE_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace ddp::elastic {

// What a rank is doing. A trainer names it for the agent, which then can tell a rank that works
// from one that waits for others, and a long checkpoint from a hang. All of it is time as the host
// sees it: on a GPU, work is in the phase that waits for it.
enum class Phase : uint8_t {
  kStartup,      // from the start of the process to its first committed step
  kData,         // gets the next batch
  kForward,      // model and loss
  kBackward,     // gradients
  kSynchronize,  // waits for peers, or for the device, and does nothing else; //ddp enters it
                 // itself
  kOptimizer,    // updates the parameters
  kCheckpoint,   // saves or restores state
  kEvaluation,   // validation and the like, between the steps of training
  kOther,        // of a step, but none of the above; and all of it in a trainer without phases
};

inline constexpr int kPhaseCount = 9;

// "data", "forward", ...; "other" for what is no phase.
absl::string_view PhaseName(Phase phase);

// Whether a rank that is stuck in `phase` may well be the victim of a peer that is stuck elsewhere.
// `tells_waits`: it enters kSynchronize by itself whenever it waits, as ranks of //ddp do, so that
// its backward is work.
constexpr bool WaitsForPeers(Phase phase, bool tells_waits) {
  return phase == Phase::kSynchronize || (phase == Phase::kBackward && !tells_waits);
}

// Whether time in `phase` is time of an optimizer step. The length of the others says nothing about
// how long a step takes.
constexpr bool IsPartOfStep(Phase phase) {
  return phase != Phase::kStartup && phase != Phase::kCheckpoint && phase != Phase::kEvaluation;
}

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_HEALTH_PHASE_H_
