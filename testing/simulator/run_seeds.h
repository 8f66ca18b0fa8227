#ifndef DDP_TESTING_SIMULATOR_RUN_SEEDS_H_
#define DDP_TESTING_SIMULATOR_RUN_SEEDS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "testing/simulator/core_tamper.h"
#include "testing/simulator/simulation.h"

namespace ddp::testing {

// Many stories, one after the other in each of some threads.
struct SeedRange {
  uint64_t first = 1;
  uint64_t count = 1;
  int hosts = 0;  // 0: each seed decides
  int threads = 1;
  int failures_max = 5;  // stops after so many
};

struct SeedSummary {
  struct SizeClass {
    uint64_t seeds = 0, events = 0, agents = 0;
    double simulated_hours = 0;
  };
  std::vector<std::pair<uint64_t, std::string>> failures;  // seed, what was violated
  std::map<int, SizeClass> by_hosts;                       // smallest number of hosts in the class
  SimulationResult total;  // sums; its times and messages are of all stories
};

// Runs `range.count` seeds, or stops early because of failures.
SeedSummary RunSeeds(const SeedRange& range, const AgentCode& code);

// Several lines for people, without the failures.
std::string DebugString(const SeedSummary& summary);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_RUN_SEEDS_H_
