#ifndef DDP_TESTING_SIMULATOR_SIMULATION_H_
#define DDP_TESTING_SIMULATOR_SIMULATION_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "testing/simulator/core_tamper.h"
#include "testing/simulator/simulated_store.h"
#include "testing/simulator/story.h"
#include "testing/simulator/trace.h"

namespace ddp::testing {

// Lives a story to its end: agents, workers, store and network, with the story's faults, checked at
// every step (see JobChecker) and at the end: every agent ends within a bounded time after the last
// fault, in a way that the documentation knows and that fits what happened.
//
//   const AgentCode code;
//   const SimulationResult result = Simulate(MakeStory(17), code);
//   if (result.violation) ...
//
// Equal stories give equal results, to the last event. Any number may run at once, each in a thread
// of its own.
struct SimulationResult {
  std::optional<std::string> violation;  // one line
  uint64_t fingerprint = 0;              // of everything that happened
  int64_t simulated_us = 0;
  uint64_t events = 0;
  int agents = 0;       // that ever lived
  int generations = 0;  // that a node took part in
  int charged = 0;      // of them, restarts that cost something
  std::array<int, kFaultKinds> faults{};
  SimulatedStore::Counts messages;
  std::map<std::string, int> ends;  // how agents ended: reason -> agents
};

// `trace` gets the lines of the story, where given.
SimulationResult Simulate(const Story& story, const AgentCode& code,
                          const Trace::Writer& trace = nullptr);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_SIMULATION_H_
