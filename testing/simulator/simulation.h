#ifndef DDP_TESTING_SIMULATOR_SIMULATION_H_
#define DDP_TESTING_SIMULATOR_SIMULATION_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "testing/simulator/bugs/core_tamper.h"
#include "testing/simulator/simulated_store.h"
#include "testing/simulator/story.h"
#include "testing/simulator/trace.h"

namespace ddp::testing {

// Result of Simulate().
struct SimulationResult {
  std::optional<std::string> violation;  // one line
  uint64_t fingerprint = 0;              // of all events
  int64_t simulated_us = 0;
  uint64_t events = 0;
  int agents = 0;       // lives of agents
  int generations = 0;  // in which a node took part
  int charged = 0;      // generations whose restart was charged
  std::array<int, kFaultKinds> faults{};
  SimulatedStore::Counts messages;
  std::map<std::string, int> ends;  // reason of the end -> number of agents
};

// Runs `story` to its end with `code`: agents, workers, store and network, with the story's faults.
// The job is checked at every step (see JobChecker) and at its end. At its end, every agent must
// have ended within a bounded time after the last fault, with a documented result that matches the
// faults. `trace` gets the lines of the story, unless it is null.
//
//   const AgentCode code;
//   const SimulationResult result = Simulate(MakeStory(17), code);
//   if (result.violation) ...
//
// Equal stories give equal results, to the last event. Several threads may run one simulation each.
SimulationResult Simulate(const Story& story, const AgentCode& code,
                          const Trace::Writer& trace = nullptr);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_SIMULATION_H_
