#ifndef DDP_TESTING_SIMULATOR_PLANTED_BUGS_H_
#define DDP_TESTING_SIMULATOR_PLANTED_BUGS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "testing/simulator/core_tamper.h"

namespace ddp::testing {

// A bug that what is shipped does not have, to see that the simulator finds it: in all scripts that
// have them, texts are replaced by others; or what a core is told, or wants, is tampered with, so
// that the agent behaves as if its core had the bug. Nothing shipped knows of this.
struct PlantedBug {
  std::string name;
  std::string what;     // for people
  std::string symptom;  // part of what the simulator says of it
  // In scripts: each `from` must be in one, or the bug is out of date.
  struct Edit {
    std::string from, to;
  };
  std::vector<Edit> edits = {};
  // In a core; null: none.
  std::function<std::unique_ptr<CoreTamper>()> make_tamper = nullptr;
  // From where it is found soon. Most are within a hundred seeds from anywhere, a few are rarer.
  uint64_t first_seed = 1;
};

const std::vector<PlantedBug>& PlantedBugs();

// Null: there is none of that name.
const PlantedBug* FindPlantedBug(const std::string& name);

// What is shipped, with the bug.
AgentCode Plant(const PlantedBug& bug);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_PLANTED_BUGS_H_
