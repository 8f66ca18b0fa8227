#ifndef DDP_TESTING_SIMULATOR_BUGS_CORE_BUGS_H_
#define DDP_TESTING_SIMULATOR_BUGS_CORE_BUGS_H_

#include <vector>

#include "testing/simulator/bugs/planted_bugs.h"

namespace ddp::testing {

// Returns the bugs of PlantedBugs() that are in AgentCore or RendezvousCore.
std::vector<PlantedBug> CoreBugs();

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_BUGS_CORE_BUGS_H_
