#ifndef DDP_TESTING_SIMULATOR_STORY_H_
#define DDP_TESTING_SIMULATOR_STORY_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "elastic/job/job_spec.h"
#include "testing/simulator/simulated_store.h"

namespace ddp::testing {

enum class FaultKind {
  kWorkerCrash,      // a worker dies by itself
  kWorkerHangs,      // a worker makes no more steps, and lives
  kHostSlows,        // the workers of a host take longer for their steps from now on
  kAgentKilled,      // SIGKILL; the workers die with the agent
  kAgentStopped,     // SIGSTOP, and later SIGCONT; the workers continue
  kAgentTerminated,  // SIGTERM: the host is preempted
  kFamilyKilled,     // SIGKILL of a worker, and of the keeper a moment later
  kHostLost,         // agent, workers and connection end without a message
  kHostFrozen,       // agent and workers stop, and continue later
  kCutOff,           // no message passes between the host and the store for a while
  kStorePaused,
  kStoreRestarted,   // comes back with all data
  kStoreRolledBack,  // comes back without the writes of the last second
  kStoreWiped,       // comes back empty
  kRoundForgotten,   // comes back without the next round; its last joiner got no reply
  kNewcomer,         // another host joins
  kNewcomers,        // many hosts join, one after the other
  kStoreAway,        // for 15 minutes, with all data
  kHostLostForever,  // a host is lost, comes back, and is lost again, until the faults end
};
inline constexpr int kFaultKinds = 19;
const char* FaultName(FaultKind kind);

struct Fault {
  int64_t at_us = 0;
  FaultKind kind = FaultKind::kWorkerCrash;
  int64_t duration_us = 0;    // of a fault that lasts
  int64_t clock_jump_us = 0;  // of the server, when it restarts
};

// All that a seed decides before the job starts: the job, the machines, the network and the faults
// with their times. (The victim of a fault is drawn when the fault strikes.) A value.
struct Story {
  uint64_t seed = 0;

  // The job.
  bool has_id = true;  // without an id, agents use a fingerprint, and there may be several jobs
  int hosts = 2;       // at the start
  int min_nodes = 2;
  int max_nodes = 2;
  int max_restarts = 3;
  int no_progress_limit = 3;
  int quarantine_strikes = 3;
  int max_node_losses = 1000;
  int64_t scale_up_delay_us = 0;
  int node_unit = 1;
  int max_world = 0;  // most workers that the program accepts; 0: any number
  int64_t quarantine_cooldown_us = 10000000;
  int64_t lease_us = 3000000;
  int64_t last_call_us = 2000000;
  int64_t rendezvous_timeout_us = 60000000;
  int64_t store_outage_timeout_us = 60000000;
  int64_t exit_barrier_timeout_us = 60000000;
  int64_t fault_grace_us = 200000;
  int64_t shutdown_timeout_us = 3000000;

  // The training.
  double training_s = 10;  // without interruption
  double steps_per_second = 20;
  int checkpoint_every = 20;       // steps
  double worker_start_s = 0.3;     // mean, from a worker's start to its first step
  double victim_chance = 0.3;      // that a worker fails soon after a peer did, instead of hanging
  bool commits_steps = true;       // to the health page, so that progress is known
  double stop_aware_chance = 0.5;  // that the job's program calls should_stop()
  double stubborn_chance = 0.1;    // that a worker ignores SIGTERM
  int bad_host = -1;               // host on which the program cannot be started, or -1
  double slow_end_s = 0.02;        // mean, from SIGTERM to the end
  double slow_factor = 2;          // of the step time on a slow host
  int64_t hang_floor_us = 0;       // HangDetector's limit for a step; 0 for no hang detection

  // The machines.
  int nproc_max = 1;
  bool node_ranks = false;            // every host asks for its own number as group rank
  int64_t start_spread_us = 2000000;  // of the agents' starts
  int64_t clock_skew_us = 0;          // largest error of a node's clock, in both directions
  double clock_drift = 0;             // largest relative error, likewise
  // Slow effects on an agent's node, until faults_end_us: their chance and longest duration.
  double slow_stray_chance = 0;  // that strays (processes left by workers) take time to kill
  int64_t slow_stray_us = 0;
  double slow_exec_chance = 0;  // that a worker takes time to start
  int64_t slow_exec_us = 0;
  int64_t kill_timeout_us = 10000000;
  double comeback_chance = 0.8;  // that a lost host's agent is started again
  double comeback_mean_s = 3;

  NetworkConditions network;
  int64_t faults_end_us = 0;  // no faults from then on, also none of messages
  std::vector<Fault> faults;  // by time
};

// Makes the story of a seed. With `hosts` 0 the seed decides the number of hosts, and every
// hundredth seed is a job of 1,000 agents.
Story MakeStory(uint64_t seed, int hosts = 0);

// Returns the job as every node of the story describes it.
elastic::JobSpec JobOf(const Story& story);

// Return the time after which a worker that hangs is found (0 for never), and a worker that waits
// for it. The latter is longer than the detection of a lost host.
int64_t HangLimitUs(const Story& story);
int64_t HangWaitingLimitUs(const Story& story);

// Returns the time within which what happens on a node has reached the store, if no fault hits.
int64_t WayUs(const Story& story);

// Returns one line: the job, and each fault with its time in seconds.
std::string DebugString(const Story& story);

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_STORY_H_
