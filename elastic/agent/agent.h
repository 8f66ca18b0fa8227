#ifndef DDP_ELASTIC_AGENT_AGENT_H_
#define DDP_ELASTIC_AGENT_AGENT_H_

#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/task_thread.h"
#include "elastic/agent/event_log.h"
#include "elastic/agent/launch_config.h"
#include "elastic/agent/node_status_tracker.h"
#include "elastic/agent/process_spawner.h"
#include "elastic/agent/worker_failure.h"
#include "elastic/rendezvous/rendezvous.h"
#include "store/tcp_store_server.h"

namespace ddp::elastic {

// Runs the workers of one node until the job has ended: joins the rendezvous, starts the workers of
// the generation, stops and starts them anew when a generation ends, wherever that began, and stops
// them on a user's signal.
//
//   Agent agent(config, {event_loop.get(), &spawner, &rendezvous, &clock, &event_log, &status});
//   JobResult result = agent.Run();
//
// The shell around AgentCore, which decides; WorkerGroup has the processes; this class carries
// events in and actions out, and serves the TCPStore of programs that know no other store: a fresh
// one for each generation, while this node holds rank 0. It says on stderr, one line each: every
// new generation and why, the forwarding of a signal, the loss of the rendezvous. It does not print
// the result.
//
// Signals: Run() blocks LaunchConfig::signals_to_handle for the calling thread and takes them from
// a signalfd; the mask is restored when it returns, and signals that the caller had blocked and
// that came after the last worker's end are left to him. The first one stops the workers, which
// have `shutdown_timeout` to end; a second SIGINT or SIGTERM kills them at once. SIGHUP that was
// ignored from the start (nohup) stays ignored. Other threads of the process must block these
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
    NodeStatusTracker* status = nullptr;
    // Takes each line for the user, puts "ddprun: " before it and its line end behind it, and must
    // not wait: a console that nobody reads must not stop the agent. Empty: lines are written to
    // stderr, waiting for it.
    std::function<void(const std::string& line)> say;
    // The same for the line of a restart, before which nothing is put.
    std::function<void(const std::string& line)> say_as_it_is;
    // Where files of workers are read, which may be on a mount that has stalled; null: on the
    // thread of Run(), waiting for it.
    TaskThread* files = nullptr;
    // Readable once the process that the user started is gone, and this one and all below it are
    // being killed: then no failure is reported any more. -1: there is no such process. Not owned.
    int keeper_fd = -1;
    // Called when the keeper is gone and nothing more is to be said. Empty: nobody wants to know.
    std::function<void()> on_silent;
    // The TCPStore of a static rendezvous, on its node 0; null: the agent makes its own.
    store::TcpStoreServer* worker_store = nullptr;
  };

  Agent(LaunchConfig config, Dependencies dependencies);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;
  ~Agent();

  // Returns when no worker is left. Never throws; whatever goes wrong is in the result.
  JobResult Run();

  // Whether Run() has taken a signal: then somebody wants the end soon, whatever the result is.
  bool was_signalled() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_AGENT_AGENT_H_
