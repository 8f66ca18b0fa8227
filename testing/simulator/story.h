#ifndef DDP_TESTING_SIMULATOR_STORY_H_
#define DDP_TESTING_SIMULATOR_STORY_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "testing/simulator/simulated_store.h"

namespace ddp::testing {

enum class FaultKind {
  kWorkerCrash,      // one worker dies by itself
  kWorkerHangs,      // one worker gets no further, and lives
  kHostSlows,        // its workers take longer for their steps from now on
  kAgentKilled,      // SIGKILL; its workers go with it
  kAgentStopped,     // SIGSTOP, and later SIGCONT; its workers run on
  kAgentTerminated,  // SIGTERM: the host is preempted
  kFamilyKilled,     // SIGKILL of a worker, and of the keeper a moment later
  kHostLost,         // agent, workers and connection, without a goodbye
  kHostFrozen,       // agent and workers stand still, and go on later
  kCutOff,           // the host does not hear the store for a while, nor the store it
  kStorePaused,
  kStoreRestarted,   // comes back with all it knew
  kStoreRolledBack,  // comes back without the last second of it
  kStoreWiped,       // comes back with nothing
  kRoundForgotten,   // rolled back to before the next round; who completed it was not told
  kNewcomer,         // a host more
};
inline constexpr int kFaultKinds = 16;
const char* FaultName(FaultKind kind);

struct Fault {
  int64_t at_us = 0;
  FaultKind kind = FaultKind::kWorkerCrash;
  int64_t duration_us = 0;    // where it lasts
  int64_t clock_jump_us = 0;  // of the server, where it restarts
};

// Everything that a seed decides before the job starts: the job, the machines, the network and when
// which fault strikes (whom, is drawn when it does). Durations in microseconds.
struct Story {
  uint64_t seed = 0;

  // The job.
  bool has_id = true;  // else agents meet by a fingerprint, and there may be several jobs
  int hosts = 2;       // at the start
  int min_nodes = 2;
  int max_nodes = 2;
  int max_restarts = 3;
  int no_progress_limit = 3;
  int quarantine_strikes = 3;
  int64_t quarantine_cooldown_us = 10000000;
  int64_t lease_us = 3000000;
  int full_heartbeats = 32;  // of all nodes per interval; the others are light
  int64_t last_call_us = 2000000;
  int64_t rendezvous_timeout_us = 60000000;
  int64_t store_outage_timeout_us = 60000000;
  int64_t exit_barrier_timeout_us = 60000000;
  int64_t fault_grace_us = 200000;
  int64_t shutdown_timeout_us = 3000000;

  // Its training.
  double training_s = 10;  // without interruption
  double steps_per_second = 20;
  int checkpoint_every = 20;       // steps
  double worker_start_s = 0.3;     // mean, from its start to its first step
  double victim_chance = 0.3;      // that a worker fails soon after a peer did; else it hangs
  bool commits_steps = true;       // to the health page, so that progress is known
  double stop_aware_chance = 0.5;  // that the program asks should_stop(); of the job
  double stubborn_chance = 0.1;    // that a worker ignores SIGTERM
  int bad_host = -1;               // where the program cannot be started; -1: nowhere
  double slow_end_s = 0.02;        // mean, from SIGTERM to the end
  double slow_factor = 2;          // of a slow host's steps
  int64_t hang_floor_us = 0;       // HangDetector's limit for a step; 0: nobody looks for hangs

  // The machines.
  int nproc_max = 1;
  bool node_ranks = false;            // every host wants a group rank: its own number
  int64_t start_spread_us = 2000000;  // of the agents' starts
  int64_t clock_skew_us = 0;          // of a node's clock, at most, to either side
  double clock_drift = 0;             // the same, relative
  // Slow effects of an agent's node, until faults_end_us: their chance, and what they take at most.
  double slow_stray_chance = 0;  // that what workers left behind takes time to kill
  int64_t slow_stray_us = 0;
  double slow_exec_chance = 0;  // that a worker takes time to be started
  int64_t slow_exec_us = 0;
  int64_t kill_timeout_us = 10000000;
  double comeback_chance = 0.8;  // that a lost host's agent is started anew
  double comeback_mean_s = 3;

  NetworkConditions network;
  int64_t faults_end_us = 0;  // from then on nothing breaks, messages included
  std::vector<Fault> faults;  // by time
};

// `hosts` 0: the seed decides, and every hundredth seed is a job of 1,000 agents.
Story MakeStory(uint64_t seed, int hosts = 0);

// After which a worker that hangs is found, and one that waits for it: the latter takes longer than
// the loss of a host. 0: never.
int64_t HangLimitUs(const Story& story);
int64_t HangWaitingLimitUs(const Story& story);

// One line: the job and how often what strikes.
std::string DebugString(const Story& story);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_STORY_H_
