#ifndef DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_
#define DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_

#include <map>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace ddp::elastic {

// What one agent runs and how: the flags of ddprun, parsed and checked. A value; no defaults are
// looked up after it is made.
struct LaunchConfig {
  // The job.
  std::string run_id;            // as the user gave it, or a random one
  std::string role = "default";  // ROLE_NAME of every worker
  int nproc_per_node = 1;        // workers of this node, >= 1
  int max_restarts = 0;          // failures that the whole job may recover from, >= 0

  // The program: argv as the workers get it, interpreter included. `${local_rank}` in an argument
  // stands for the worker's local rank.
  std::vector<std::string> command;
  std::string entrypoint;  // what the user called the program; the failure report's title

  // Addresses that the workers are told. `master_port` 0: found free before each generation.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;

  // Timing.
  absl::Duration lease = absl::Seconds(3);  // of this node in the rendezvous
  absl::Duration rendezvous_timeout = absl::Minutes(10);
  absl::Duration fault_grace = absl::Milliseconds(200);  // SIGTERM to SIGKILL after a fault
  absl::Duration shutdown_timeout = absl::Seconds(30);   // the same after a user's signal

  // Where the agent's event log goes, as JSON lines; empty: nowhere.
  std::string event_log_file;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_
