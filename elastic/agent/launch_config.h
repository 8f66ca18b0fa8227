#ifndef DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_
#define DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_

#include <signal.h>

#include <string>
#include <vector>

#include "absl/time/time.h"

namespace ddp::elastic {

// The configuration of one agent: ddprun's flags, parsed and checked. A plain value; no defaults
// are looked up later.
struct LaunchConfig {
  // The job.
  std::string run_id;            // the user's, or a random one
  std::string role = "default";  // ROLE_NAME of every worker
  int nproc_per_node = 1;        // workers of this node, >= 1
  int min_nodes = 1;             // minimum for a generation, >= 1
  int max_nodes = 1;             // maximum for a generation, >= min_nodes
  int max_restarts = 0;          // charged failures that the whole job may recover from, >= 0

  // This node.
  std::string host;    // name of this node for people and other nodes
  int node_rank = -1;  // wanted group rank; -1: any

  // The program: argv of the workers, including the interpreter. `${local_rank}` in an argument is
  // replaced by the worker's local rank.
  std::vector<std::string> command;
  std::string entrypoint;  // the program's name as the user gave it; title of the failure report

  // Address of a generation's worker store if this node holds rank 0. `master_port` 0: each
  // generation uses a new port.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;

  // Network interface with this node's address, for Gloo; empty: the workers choose.
  std::string socket_interface;

  // True: each worker sees one device only, as device 0.
  bool virtual_local_rank = false;

  // Path of a named pipe for the workers' own timers (TORCHELASTIC_TIMER_FILE). The agent makes the
  // pipe. Empty: none.
  std::string timer_file;

  // Timing.
  absl::Duration lease = absl::Seconds(3);  // of this node in the rendezvous
  absl::Duration rendezvous_timeout = absl::Minutes(10);
  absl::Duration fault_grace = absl::Milliseconds(200);  // SIGTERM to SIGKILL after a fault
  absl::Duration shutdown_timeout = absl::Seconds(30);   // the same after a user's signal
  absl::Duration kill_timeout = absl::Seconds(10);  // for the kernel to end a process after SIGKILL
  absl::Duration exit_barrier_timeout = absl::Minutes(5);   // wait for the other nodes to succeed
  absl::Duration store_outage_timeout = absl::Minutes(10);  // of training without the store
  absl::Duration farewell_timeout = absl::Seconds(2);  // for the last requests of a leaving node

  // Signals that stop the job in order and are forwarded to the workers. Without SIGKILL.
  std::vector<int> signals_to_handle = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};

  // A worker hangs when its step lasts this long and five times its longest step; 0: never.
  absl::Duration hang_floor = absl::Seconds(30);
  // A worker is reported when its own time per step is this many times the median; 0: never.
  double straggler_factor = 1.5;

  // Path of the agent's event log, JSON lines; empty: none.
  std::string event_log_file;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_
