#ifndef DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_
#define DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_

#include <signal.h>

#include <array>
#include <string>
#include <vector>

#include "elastic/job/job_spec.h"

namespace ddp::elastic {

// LaunchConfig describes the work of one agent: the job, and this node's part in it. ddprun makes
// it from its flags, parsed and checked. It is a plain value; no defaults are looked up later.
struct LaunchConfig {
  static constexpr int kDefaultNprocPerNode = 1;
  static constexpr std::array kDefaultSignals = {SIGTERM, SIGINT, SIGHUP, SIGQUIT};

  JobSpec job;

  // This node.
  int nproc_per_node = kDefaultNprocPerNode;  // workers of this node, >= 1
  std::string host;                           // name of this node for people and other nodes
  int node_rank = -1;                         // wanted group rank; -1: any

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

  // On one of these signals the agent stops its workers with the same signal, and then ends. The
  // list must not hold SIGKILL.
  std::vector<int> signals_to_handle{kDefaultSignals.begin(), kDefaultSignals.end()};
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_LAUNCH_CONFIG_H_
