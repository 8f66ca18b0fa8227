#include "elastic/health/phase.h"

namespace ddp::elastic {

std::string_view PhaseName(Phase phase) {
  switch (phase) {
    case Phase::kStartup:
      return "startup";
    case Phase::kData:
      return "data";
    case Phase::kForward:
      return "forward";
    case Phase::kBackward:
      return "backward";
    case Phase::kSynchronize:
      return "synchronize";
    case Phase::kOptimizer:
      return "optimizer";
    case Phase::kCheckpoint:
      return "checkpoint";
    case Phase::kEvaluation:
      return "evaluation";
    case Phase::kOther:
      break;
  }
  return "other";
}

}  // namespace ddp::elastic
