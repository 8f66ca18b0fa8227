#ifndef DDP_TESTING_SIMULATOR_PLANTED_BUGS_H_
#define DDP_TESTING_SIMULATOR_PLANTED_BUGS_H_

#include <string>
#include <vector>

#include "elastic/rendezvous/rendezvous_scripts.h"

namespace ddp::testing {

// A bug that the shipped scripts do not have, to see that the simulator finds it: in all scripts
// that have it, a text is replaced by another. Nothing shipped knows of this.
struct PlantedBug {
  std::string name;
  std::string what;      // for people
  std::string from, to;  // `from` must be there, or the bug is out of date
  std::string symptom;   // part of what the simulator says of it
};

const std::vector<PlantedBug>& PlantedBugs();

// Null: there is none of that name.
const PlantedBug* FindPlantedBug(const std::string& name);

// The scripts with the bug.
elastic::RendezvousScripts Plant(const PlantedBug& bug);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_PLANTED_BUGS_H_
