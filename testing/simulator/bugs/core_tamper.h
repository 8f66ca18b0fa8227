#ifndef DDP_TESTING_SIMULATOR_BUGS_CORE_TAMPER_H_
#define DDP_TESTING_SIMULATOR_BUGS_CORE_TAMPER_H_

#include <functional>
#include <memory>
#include <vector>

#include "elastic/agent/agent_events.h"
#include "elastic/rendezvous/rendezvous_core.h"
#include "elastic/rendezvous/rendezvous_scripts.h"

namespace ddp::testing {

// Changes the events and actions that pass between an agent's two cores (AgentCore, RendezvousCore)
// and the rest of the agent. A subclass gives the agent a bug in this way, without a change of the
// cores. This base class changes nothing. A simulated agent with such a bug owns one.
class CoreTamper {
 public:
  virtual ~CoreTamper() = default;

  // Called before an event reaches AgentCore. May change the event. Returns false to drop it.
  virtual bool TellsAgent(elastic::AgentEvent& /*event*/) { return true; }
  // Called with the actions of AgentCore. May change them. AgentCore gets the events that the call
  // adds to `events` afterwards.
  virtual void AfterAgent(std::vector<elastic::AgentAction>& /*actions*/,
                          std::vector<elastic::AgentEvent>& /*events*/) {}

  // Like the two above, for RendezvousCore.
  virtual bool TellsRendezvous(elastic::RendezvousCore::Event& /*event*/) { return true; }
  virtual void AfterRendezvous(std::vector<elastic::RendezvousCore::Action>& /*actions*/) {}
};

// Code that simulated agents run beside the cores: the shipped code by default, or code with a bug.
struct AgentCode {
  elastic::RendezvousScripts scripts;
  std::function<std::unique_ptr<CoreTamper>()> make_tamper;  // null for no tampering
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_BUGS_CORE_TAMPER_H_
