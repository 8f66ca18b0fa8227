#ifndef DDP_ELASTIC_HEALTH_PHASE_H_
#define DDP_ELASTIC_HEALTH_PHASE_H_

#include <cstdint>
#include <string_view>

namespace ddp::elastic {

// The phase that a rank is in. A trainer names it, so that the agent can tell a working rank from a
// waiting one, and a long checkpoint from a hang. Times are host times: on a GPU, work counts in
// the phase that waits for it.
enum class Phase : uint8_t {
  kStartup,      // from the start of the process to its first committed step
  kData,         // gets the next batch
  kForward,      // model and loss
  kBackward,     // gradients
  kSynchronize,  // only waits, for peers or the device; //ddp enters it itself
  kOptimizer,    // updates the parameters
  kCheckpoint,   // saves or restores state
  kEvaluation,   // validation and the like, between the steps of training
  kOther,        // the rest of a step; all of it in a trainer without phases
};

inline constexpr int kPhaseCount = 9;

// Returns "data", "forward", ...; "other" for invalid values.
std::string_view PhaseName(Phase phase);

// Returns true when a rank that is stuck in `phase` may be the victim of a stuck peer.
// `tells_waits`: the rank enters kSynchronize whenever it waits, as ranks of //ddp do, so its
// backward is work.
constexpr bool WaitsForPeers(Phase phase, bool tells_waits) {
  return phase == Phase::kSynchronize || (phase == Phase::kBackward && !tells_waits);
}

// Returns true when `phase` is part of an optimizer step. The length of other phases says nothing
// about the length of a step.
constexpr bool IsPartOfStep(Phase phase) {
  return phase != Phase::kStartup && phase != Phase::kCheckpoint && phase != Phase::kEvaluation;
}

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_HEALTH_PHASE_H_
