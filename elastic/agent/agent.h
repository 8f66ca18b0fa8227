#ifndef DDP_ELASTIC_AGENT_AGENT_H_
#define DDP_ELASTIC_AGENT_AGENT_H_

#include <memory>

#include "base/clock.h"
#include "elastic/agent/event_log.h"
#include "base/event_loop.h"
#include "elastic/agent/launch_config.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/rendezvous/rendezvous.h"

namespace ddp::elastic {

// Runs the workers of one node until the job has ended: joins the rendezvous, starts the workers
// of the generation, restarts all of them when one fails and the job's budget lasts, stops them on
// a user's signal.
//
//   EventLog event_log = ...;
//   Agent agent(config, {event_loop.get(), &spawner, &rendezvous, &clock, &event_log});
//   JobResult result = agent.Run();
//
// The shell around AgentCore, which decides; this class only carries events in and actions out.
// It says on stderr, one line each: every restart, the forwarding of a signal, the loss of the
// rendezvous. It does not print the result.
//
// Signals: Run() blocks SIGTERM, SIGINT, SIGHUP and SIGQUIT for the calling thread and takes them
// from a signalfd; the mask is restored when it returns. The first one is forwarded to the workers,
// which have `shutdown_timeout` to end; a second SIGINT or SIGTERM kills them at once. SIGHUP that
// was ignored from the start (nohup) stays ignored. Other threads of the process must block these
// signals, or one of them gets the signal and ends the process.
//
// Not thread-safe; one Run() per object.
class Agent {
 public:
  // Not owned; must outlive the agent. All of them are used on the thread of Run() only.
  struct Dependencies {
    EventLoop* event_loop = nullptr;
    ProcessSpawner* spawner = nullptr;
    Rendezvous* rendezvous = nullptr;
    const Clock* clock = nullptr;
    EventLog* event_log = nullptr;
  };

  Agent(LaunchConfig config, Dependencies dependencies);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  ~Agent();

  // Returns when no worker is left. Never throws; whatever goes wrong is in the result.
  JobResult Run();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_AGENT_H_
