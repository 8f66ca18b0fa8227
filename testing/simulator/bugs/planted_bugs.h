#ifndef DDP_TESTING_SIMULATOR_BUGS_PLANTED_BUGS_H_
#define DDP_TESTING_SIMULATOR_BUGS_PLANTED_BUGS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "testing/simulator/bugs/core_tamper.h"

namespace ddp::testing {

// A bug that the shipped code does not have, to test that the simulator finds it. It is either in
// the scripts (texts are replaced in all scripts that contain them) or in an agent (a CoreTamper
// changes the events or actions of a core). The texts are replaced through the parameter `edit` of
// RendezvousScripts; the cores have no hook for this.
struct PlantedBug {
  std::string name;
  std::string what;     // description, for people
  std::string symptom;  // part of the violation that the simulator reports
  // Changes of the scripts. Each `from` must be in a script: Plant() checks it (CHECK).
  struct Edit {
    std::string from, to;
  };
  std::vector<Edit> edits = {};
  // Change of a core, or null.
  std::function<std::unique_ptr<CoreTamper>()> make_tamper = nullptr;
  // Seed from which on the simulator finds the bug soon. Most bugs show within a hundred seeds from
  // any seed; a few are rarer.
  uint64_t first_seed = 30000001;
};

const std::vector<PlantedBug>& PlantedBugs();

// Returns null for an unknown name.
const PlantedBug* FindPlantedBug(const std::string& name);

// Returns the shipped code with the bug.
AgentCode Plant(const PlantedBug& bug);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_BUGS_PLANTED_BUGS_H_
