#ifndef DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_
#define DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_

#include <signal.h>

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
  int min_nodes = 1;             // that a generation needs, >= 1
  int max_nodes = 1;             // that it can use, >= min_nodes
  int max_restarts = 0;          // failures that the whole job may recover from, >= 0

  // This node.
  std::string host;    // what people and the other nodes call it
  int node_rank = -1;  // the group rank that it wants; -1: any

  // The program: argv as the workers get it, interpreter included. `${local_rank}` in an argument
  // stands for the worker's local rank.
  std::vector<std::string> command;
  std::string entrypoint;  // what the user called the program; the failure report's title

  // Where the workers' store of a generation is, should this node hold rank 0. `master_port` 0: a
  // port of its own for each generation.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;

  // The interface that has this node's address, for Gloo; empty: the workers find their own.
  std::string socket_interface;

  // Each worker sees one device, as its first.
  bool virtual_local_rank = false;

  // A named pipe for timers that workers set for themselves (TORCHELASTIC_TIMER_FILE), made by the
  // agent; empty: none.
  std::string timer_file;

  // Timing.
  absl::Duration lease = absl::Seconds(3);  // of this node in the rendezvous
  absl::Duration rendezvous_timeout = absl::Minutes(10);
  absl::Duration fault_grace = absl::Milliseconds(200);     // SIGTERM to SIGKILL after a fault
  absl::Duration shutdown_timeout = absl::Seconds(30);      // the same after a user's signal
  absl::Duration kill_timeout = absl::Seconds(10);          // for the kernel, after SIGKILL
  absl::Duration exit_barrier_timeout = absl::Minutes(5);   // for the other nodes to succeed too
  absl::Duration store_outage_timeout = absl::Minutes(10);  // that training goes on without a store
  absl::Duration farewell_timeout = absl::Seconds(2);  // for what a node that leaves has to say

  // Signals that stop the job in order, besides being forwarded. SIGKILL is none.
  std::vector<int> signals_to_handle = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};

  // A worker that made no step for so long, and for five of its longest steps, hangs; 0: never.
  absl::Duration hang_floor = absl::Seconds(30);
  // A worker whose own time for a step is so many times the median's is reported; 0: never.
  double straggler_factor = 1.5;

  // Where the agent's event log goes, as JSON lines; empty: nowhere.
  std::string event_log_file;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_
