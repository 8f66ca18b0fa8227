#ifndef DDP_ELASTIC_JOB_JOB_SPEC_H_
#define DDP_ELASTIC_JOB_JOB_SPEC_H_

#include <algorithm>
#include <string>

#include "absl/time/time.h"
#include "elastic/health/hang_detector.h"
#include "elastic/health/straggler_detector.h"

namespace ddp::elastic {

// The limits of a job are those of the node that opens it, and hold for all of its nodes.
struct JobLimits {
  int max_restarts = 0;  // charged failures that the whole job may recover from, >= 0
  int min_nodes = 1;     // minimum for a generation, >= 1
  int max_nodes = 1;     // maximum for a generation, >= min_nodes
  bool operator==(const JobLimits&) const = default;
};

// The rules of a job's rendezvous are those of the node that opens the job, and hold for all of its
// nodes. Only `heartbeat` is each node's own.
struct RendezvousRules {
  static constexpr int kHeartbeatsPerLease = 6;  // by default

  // The first round waits so long for max_nodes after min_nodes have joined.
  absl::Duration last_call = absl::Seconds(30);
  int no_progress_limit = 3;   // charged failures in a row without a step; 0: no limit
  int quarantine_strikes = 3;  // charged failures and losses of one machine; 0: no quarantine
  int max_node_losses = 1000;  // generations of the job that the loss of a node may end, >= 0
  // Nodes that come while the job runs are taken in together, so long after the last of them came.
  absl::Duration scale_up_delay = absl::Seconds(30);
  int node_unit = 1;  // the number of nodes is a multiple of it, and so are the limits; >= 1
  absl::Duration quarantine_cooldown = absl::Seconds(60);
  absl::Duration lease = absl::Seconds(3);  // a node that is silent for so long is lost
  absl::Duration heartbeat;                 // interval; zero: lease / kHeartbeatsPerLease

  // Returns the interval of heartbeats while the job has `job_lease`, which its opener chose.
  absl::Duration HeartbeatInterval(absl::Duration job_lease) const {
    return heartbeat > absl::ZeroDuration() ? heartbeat : job_lease / kHeartbeatsPerLease;
  }

  bool operator==(const RendezvousRules&) const = default;
};

// AgentTimes bound the waits of one agent: each field is the longest wait of its kind.
struct AgentTimes {
  absl::Duration rendezvous_timeout = absl::Minutes(10);  // for enough nodes
  absl::Duration fault_grace = absl::Milliseconds(200);   // SIGTERM to SIGKILL after a fault
  // To stop in order: after a user's signal, or when members are about to change. Progress of the
  // workers extends it up to StopLimit().
  absl::Duration shutdown_timeout = absl::Seconds(30);
  // From a user's signal until its sender kills this agent; zero: unknown.
  absl::Duration termination_grace;
  // For the kernel to end a process after SIGKILL. A process stuck in the kernel never ends.
  absl::Duration kill_timeout = absl::Seconds(10);
  // The same for a worker that the kernel still ends after kill_timeout. Pinned memory goes slowly.
  absl::Duration stuck_timeout = absl::Minutes(2);
  absl::Duration exit_barrier_timeout = absl::Minutes(5);   // for the other nodes to succeed
  absl::Duration store_outage_timeout = absl::Minutes(10);  // of training without the store
  // Of a worker in uninterruptible sleep (state D); then this node leaves. Zero: no limit.
  absl::Duration uninterruptible_timeout;
  // For rendezvous requests whose answers hardly matter to this node, as it is about to leave.
  absl::Duration farewell_timeout = absl::Seconds(2);

  absl::Duration StopLimit() const { return 10 * shutdown_timeout; }

  // Of `termination_grace`, what the workers get: the agent keeps 2 s for its own report.
  absl::Duration WorkersShareOfGrace() const {
    return std::max(termination_grace - absl::Seconds(2), termination_grace / 2);
  }

  bool operator==(const AgentTimes&) const = default;
};

// JobSpec describes a job: its names, and the settings that rendezvous, agents and hang detection
// share. ddprun makes it from its flags.
//
// The initializers here and in the options of the two detectors are ddprun's defaults. The flag
// table (launcher/flags/flag_table.h) takes the defaults of its flags from here.
//
// JobSpec is a plain value without I/O.
struct JobSpec {
  static constexpr char kDefaultRole[] = "default";

  std::string run_id;  // the user's, or one that ddprun chose; never empty in a job that runs
  // Empty: agents meet by the run id alone. Not empty: agents meet by this text as well, and do not
  // join a job that has all its nodes. Used where the user gave no run id.
  std::string fingerprint;
  // "hash text" of the program and its arguments, which must be those of the other nodes with this
  // role; empty: any. Not used with a fingerprint.
  std::string program;
  std::string role = kDefaultRole;  // ROLE_NAME of every worker

  JobLimits limits;
  RendezvousRules rules;
  AgentTimes times;
  HangDetector::Options hangs;
  StragglerDetector::Options stragglers;
  bool operator==(const JobSpec&) const = default;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_JOB_JOB_SPEC_H_
