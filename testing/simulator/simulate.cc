// Runs the simulator over many seeds, or prints the trace of one.

#include <gflags/gflags.h>
#include <glog/logging.h>
#include <stdio.h>

#include <algorithm>
#include <string>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "testing/simulator/bugs/core_tamper.h"
#include "testing/simulator/bugs/planted_bugs.h"
#include "testing/simulator/run_seeds.h"
#include "testing/simulator/simulation.h"
#include "testing/simulator/story.h"
#include "testing/simulator/trace.h"

DEFINE_uint64(seeds, 10000, "how many stories");
DEFINE_uint64(first_seed, 1, "the first of them");
DEFINE_uint64(seed, 0, "only this one; 0: all");
DEFINE_bool(trace, false, "with --seed: tells everything that happens");
DEFINE_int32(hosts, 0, "hosts of every story; 0: the seed decides");
DEFINE_int32(threads, 0, "0: as many as there are cores");
DEFINE_int32(failures, 5, "stops after so many failing seeds");
DEFINE_string(plant, "", "a bug to find: the name of one in planted_bugs.h");

namespace ddp::testing {
namespace {

std::string HowToReplay(uint64_t seed) {
  std::string command = "bazel run --config=opt //testing/simulator:simulate -- --trace --seed=" +
                        std::to_string(seed);
  if (FLAGS_hosts != 0) command += " --hosts=" + std::to_string(FLAGS_hosts);
  if (!FLAGS_plant.empty()) command += " --plant=" + FLAGS_plant;
  return command;
}

int RunOne(const AgentCode& code) {
  const Story story = MakeStory(FLAGS_seed, FLAGS_hosts);
  printf("%s\n", DebugString(story).c_str());
  Trace::Writer writer;
  if (FLAGS_trace) writer = [](const std::string& line) { printf("%s\n", line.c_str()); };
  const SimulationResult result = Simulate(story, code, writer);
  printf("%d agents, %d generations, %.1f s, fingerprint %016lx\n", result.agents,
         result.generations, static_cast<double>(result.simulated_us) / 1e6, result.fingerprint);
  if (!result.violation) return 0;
  printf("FAILED: %s\n", result.violation->c_str());
  return 1;
}

int RunMany(const AgentCode& code) {
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const SeedRange range = {.first = FLAGS_first_seed,
                           .count = FLAGS_seeds,
                           .hosts = FLAGS_hosts,
                           .threads = FLAGS_threads > 0 ? FLAGS_threads : static_cast<int>(cores),
                           .failures_max = FLAGS_failures};
  const absl::Time start = absl::Now();
  const SeedSummary summary = RunSeeds(range, code);
  printf("%s%.1f s on %d threads\n", DebugString(summary).c_str(),
         absl::ToDoubleSeconds(absl::Now() - start), range.threads);
  for (const auto& [seed, what] : summary.failures) {
    printf("FAILED: seed %lu: %s\n  replay: %s\n", seed, what.c_str(), HowToReplay(seed).c_str());
  }
  return summary.failures.empty() ? 0 : 1;
}

}  // namespace
}  // namespace ddp::testing

int main(int argc, char** argv) {
  gflags::SetUsageMessage("simulates jobs with faults; see docs/hacking.md");
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  google::InitGoogleLogging(argv[0]);
  ddp::testing::AgentCode code;
  if (!FLAGS_plant.empty()) {
    const ddp::testing::PlantedBug* const bug = ddp::testing::FindPlantedBug(FLAGS_plant);
    if (bug == nullptr) {
      fprintf(stderr, "simulate: --plant=%s: no such bug in planted_bugs.cc\n",
              FLAGS_plant.c_str());
      return 2;
    }
    code = ddp::testing::Plant(*bug);
  }
  return FLAGS_seed != 0 ? ddp::testing::RunOne(code) : ddp::testing::RunMany(code);
}
