#ifndef DDP_TESTING_SIMULATOR_RUN_SEEDS_H_
#define DDP_TESTING_SIMULATOR_RUN_SEEDS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "testing/simulator/bugs/core_tamper.h"
#include "testing/simulator/simulation.h"

namespace ddp::testing {

// A range of seeds, whose stories run on several threads.
struct SeedRange {
  uint64_t first = 1;
  uint64_t count = 1;
  int hosts = 0;  // 0 when each seed decides
  int threads = 1;
  int failures_max = 5;  // number of failures after which the run stops
};

struct SeedSummary {
  struct SizeClass {
    uint64_t seeds = 0, events = 0, agents = 0;
    double simulated_hours = 0;
  };
  std::vector<std::pair<uint64_t, std::string>> failures;  // seed, violation
  std::map<int, SizeClass> by_hosts;                       // by smallest number of hosts of a class
  SimulationResult total;                                  // sums over all stories
};

// Runs `range.count` seeds, or fewer after `failures_max` failures. Blocks until all threads end.
SeedSummary RunSeeds(const SeedRange& range, const AgentCode& code);

// Returns several lines for people, without the failures.
std::string DebugString(const SeedSummary& summary);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_RUN_SEEDS_H_
