#ifndef DDP_TESTING_SHARED_MEMORY_STAGE_MEMBER_H_
#define DDP_TESTING_SHARED_MEMORY_STAGE_MEMBER_H_

#include "testing/shared_memory/stage.h"

namespace ddp::internal {

// A process of a stage. Builds each planned group that it has a part in, and runs random
// collectives in it until one fails. Checks every result. Reports, and goes on to the next plan.
// Never returns: the process is killed.
[[noreturn]] void RunStageMember(Stage* stage, int slot);

}  // namespace ddp::internal

#endif  // DDP_TESTING_SHARED_MEMORY_STAGE_MEMBER_H_
