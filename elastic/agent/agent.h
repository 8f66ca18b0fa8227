#ifndef DDP_ELASTIC_AGENT_AGENT_H_
#define DDP_ELASTIC_AGENT_AGENT_H_

#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/process/oom_kills.h"
#include "base/task_thread.h"
#include "elastic/agent/event_log.h"
#include "elastic/agent/job_result.h"
#include "elastic/agent/launch_config.h"
#include "elastic/agent/node_status_tracker.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/rendezvous/rendezvous.h"
#include "store/tcp_store/tcp_store_server.h"

namespace ddp::elastic {

// Runs the workers of one node until the job has ended: joins the rendezvous, starts the workers of
// each generation, stops them when the generation ends on any node, and stops them on a user's
// signal.
//
//   Agent agent(config, {event_loop.get(), &spawner, &rendezvous, &clock, &event_log, &status});
//   JobResult result = agent.Run();
//
// AgentCore decides, WorkerGroup owns the processes, and this class passes events and actions
// between them. It also serves a TCPStore to programs that cannot use Redis: an empty one for each
// generation in which this node holds rank 0. It prints a line for the user at each change of the
// job: a wait for nodes, a failure or restart with its reason, a signal, the loss of the
// rendezvous. It does not print the result.
//
// Signals: Run() blocks LaunchConfig::signals_to_handle on the calling thread and reads them from a
// signalfd. The mask is restored when Run() returns. Signals that are still pending then stay so
// if the caller had blocked them, and are dropped otherwise. The first signal stops the workers
// within `shutdown_timeout`; a second SIGINT or SIGTERM kills them at once. A SIGHUP that was
// ignored from the start (nohup) stays ignored. Every other thread of the process must block these
// signals; otherwise such a thread may get the signal, which ends the process.
//
// Thread-compatible. Call Run() once per object.
class Agent {
 public:
  // Not owned; must outlive the agent. Used on the thread of Run() only.
  struct Dependencies {
    EventLoop* event_loop = nullptr;
    ProcessSpawner* spawner = nullptr;
    Rendezvous* rendezvous = nullptr;
    const Clock* clock = nullptr;
    EventLog* event_log = nullptr;
    NodeStatusTracker* status = nullptr;
    // Prints a line for the user with "ddprun: " before it and a line end behind it. Must not
    // block: a console that is not read must not stop the agent. Empty: writes to stderr, blocking.
    std::function<void(const std::string& line)> say;
    // The same without a prefix, for the line of a restart.
    std::function<void(const std::string& line)> say_as_it_is;
    // Reads the workers' files, which may be on a stalled mount. Null: the thread of Run() reads
    // them, blocking.
    TaskThread* files = nullptr;
    // Explains workers that the kernel ended. Null: their SIGKILL is not explained.
    OomKills* oom_kills = nullptr;
    // Descriptor of the keeper, the process that the user started: readable once the keeper has
    // ended. This process and its descendants are being killed then, and no failure is reported any
    // more. -1: there is no keeper. Not owned.
    int keeper_fd = -1;
    // Called after the keeper's end, when this agent has no request left. May be empty.
    std::function<void()> on_silent;
    // The TCPStore of a static rendezvous, on the node that serves it. Null: the agent makes its
    // own.
    store::TcpStoreServer* worker_store = nullptr;
  };

  Agent(LaunchConfig config, Dependencies dependencies);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  ~Agent();

  // Returns when the job has ended for this node. No worker is left then, except workers that did
  // not end within kill_timeout after SIGKILL. Does not return after the keeper's end. Never
  // throws; every error is in the result.
  JobResult Run();

  // Returns the time of the first signal that Run() has received: from then on the user wants
  // ddprun to end. absl::InfiniteFuture(): none.
  absl::Time signalled_at() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_AGENT_H_
