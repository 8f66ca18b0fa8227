#ifndef DDP_TESTING_SIMULATOR_CORE_TAMPER_H_
#define DDP_TESTING_SIMULATOR_CORE_TAMPER_H_

#include <functional>
#include <memory>
#include <vector>

#include "elastic/agent/agent_events.h"
#include "elastic/rendezvous/rendezvous_core.h"
#include "elastic/rendezvous/rendezvous_scripts.h"

namespace ddp::testing {

// Stands between the two cores of one agent and the rest of it, so that an agent can be given a bug
// that its cores do not have. As it is, everything passes. Each agent has one of its own.
class CoreTamper {
 public:
  virtual ~CoreTamper() = default;

  // An event on its way to AgentCore, to be changed, or (false) kept from it.
  virtual bool TellsAgent(elastic::AgentEvent& /*event*/) { return true; }
  // What AgentCore wants done, to be changed. What is added to `events` happens to it afterwards.
  virtual void AfterAgent(std::vector<elastic::AgentAction>& /*actions*/,
                          std::vector<elastic::AgentEvent>& /*events*/) {}

  // The same for RendezvousCore.
  virtual bool TellsRendezvous(elastic::RendezvousCore::Event& /*event*/) { return true; }
  virtual void AfterRendezvous(std::vector<elastic::RendezvousCore::Action>& /*actions*/) {}
};

// What simulated agents run beside the cores: what is shipped, or something with a bug.
struct AgentCode {
  elastic::RendezvousScripts scripts;
  std::function<std::unique_ptr<CoreTamper>()> make_tamper;  // null: nothing is tampered with
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_CORE_TAMPER_H_
