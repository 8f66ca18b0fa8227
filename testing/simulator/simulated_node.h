#ifndef DDP_TESTING_SIMULATOR_SIMULATED_NODE_H_
#define DDP_TESTING_SIMULATOR_SIMULATED_NODE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "elastic/agent/agent_core.h"
#include "elastic/agent/agent_events.h"
#include "elastic/agent/job_result.h"
#include "elastic/health/hang_detector.h"
#include "elastic/health/health_page.h"
#include "elastic/rendezvous/rendezvous.h"
#include "elastic/rendezvous/round.h"
#include "testing/simulator/bugs/core_tamper.h"
#include "testing/simulator/job_checker.h"
#include "testing/simulator/random.h"
#include "testing/simulator/simulated_process.h"
#include "testing/simulator/simulated_rendezvous.h"
#include "testing/simulator/story.h"
#include "testing/simulator/trace.h"
#include "testing/simulator/training_model.h"

namespace ddp::testing {

// One run of an agent, from its start to its end; a restarted agent is a new SimulatedNode. The
// AgentCore, RendezvousCore and HangDetector are the real ones; the process and its workers are
// simulated. A SimulatedNode does what elastic/agent/agent.cc and worker_group.cc do: it gives
// events to the AgentCore and carries out its actions. The Simulation owns it. Thread-compatible.
class SimulatedNode {
 public:
  using NodeId = int;
  struct Identity {
    NodeId id = 0;
    int host = 0;
    int nproc = 1;
    bool can_start = true;  // the program can be started on this host
  };
  // The pointers are not owned; all must outlive the node.
  struct World {
    const Story* story = nullptr;
    EventQueue* queue = nullptr;
    SimulatedStore* store = nullptr;
    TrainingModel* training = nullptr;
    const AgentCode* code = nullptr;
    const Trace* trace = nullptr;
    // Returns the checker of a job, by the job's token.
    std::function<JobChecker&(const std::string& job)> checker;
    std::function<void(SimulatedNode&)> on_finished;
  };

  SimulatedNode(const Identity& identity, const World& world, Random random);
  SimulatedNode(const SimulatedNode&) = delete;
  SimulatedNode& operator=(const SimulatedNode&) = delete;

  void Start();

  // Faults. Kill() ends agent and workers at once.
  void Kill();
  // Ends the keeper. A living agent gets an event, and is killed a little later at the latest.
  void EndKeeper();
  void StopAgent();
  void ContinueAgent();
  void Freeze();
  void Thaw();
  void SetCutOff(bool cut_off);
  void Terminate();

  void OnWorkerExit(const TrainingModel::Exit& exit);

  const Identity& identity() const { return identity_; }
  const std::string& name() const { return name_; }
  bool is_alive() const { return !process_.is_over(); }
  bool has_finished() const { return finished_; }
  // Returns true when no fault lasts: the agent lives, is not stopped and not cut off.
  bool is_sound() const { return is_alive() && !process_.is_stopped() && !cut_off_; }
  elastic::JobResult result() const { return core_.result(); }
  std::string state_name() const { return core_.state_name(); }
  // The busy time of a step: of this node, and the median of the job as this node was told; -1 when
  // unknown.
  int64_t busy_us() const { return world_.training->busy_us(identity_.id); }
  int64_t median_busy_us() const { return rendezvous_.median_busy_us(); }
  // Returns true when the agent is ending, by itself or because the job has ended.
  bool is_leaving() const;
  // The token of the agent's job, and of the job of its last workers.
  const std::string& job() const { return rendezvous_.job(); }
  const std::string& job_of_workers() const { return job_of_workers_; }
  int64_t started_us() const { return started_us_; }
  // Time of the last step that the agent has seen of its workers; -1: none.
  int64_t stepped_us() const { return stepped_us_; }
  // The time for which the node has reported steps of its generation.
  int64_t stepping_for_us() const {
    return stepping_since_us_ < 0 ? 0 : world_.queue->now_us() - stepping_since_us_;
  }

 private:
  void Post(elastic::AgentEvent event);
  void Take(elastic::AgentEvent event);
  void ArmDeadline();
  void CheckDeadlines();
  elastic::NodeOffer Offer() const;
  void OnRound(const elastic::Round& round);
  void Report();
  void Look();
  void StartNext();
  void EndStart(const absl::Status& status);
  void CutStart(const std::vector<int>& local_ranks);
  void After(double chance, int64_t most_us, std::function<void()> what);
  void TellContact();
  void CheckNoSpare(const elastic::News& news);

  void Do(const elastic::RequestAction& action);
  void Do(const elastic::CancelRequestAction&) { rendezvous_.Cancel(); }
  void Do(const elastic::FallSilentAction&) { Kill(); }
  void Do(const elastic::StartWorkersAction& action);
  void Do(const elastic::SignalWorkersAction& action);
  void Do(const elastic::StopWorkersAction& action);
  void Do(const elastic::KillStraysAction& action);
  void Do(const elastic::LogRestartAction&) {}
  void Do(const elastic::FinishAction& action);

  const Identity identity_;
  const World world_;
  const std::string name_;
  SimulatedProcess process_;
  const std::unique_ptr<CoreTamper> tamper_;  // may be null
  elastic::AgentCore core_;
  SimulatedRendezvous rendezvous_;
  elastic::Round round_;
  std::string job_of_workers_;
  elastic::HangDetector hangs_;
  std::map<int, elastic::HealthPage::Snapshot> pages_;  // of workers whose end was not seen yet
  uint64_t look_serial_ = 0;
  Random random_;  // of slow effects
  // Local ranks already started, while workers are being started.
  std::optional<std::vector<int>> started_;
  uint64_t start_serial_ = 0;
  uint64_t strays_serial_ = 0;
  int64_t highest_step_ = -1;
  int64_t stepped_us_ = -1;
  int64_t joined_us_ = -1;    // of the last join
  bool is_stopping_ = false;  // the workers were asked to stop

  std::deque<elastic::AgentEvent> events_;
  bool stepping_ = false;
  bool finished_ = false;
  bool cut_off_ = false;
  bool kill_sent_ = false;  // to the workers of this generation
  int64_t started_us_ = 0;
  int64_t stepping_since_us_ = -1;
  absl::Time armed_deadline_ = absl::InfiniteFuture();
  uint64_t timer_serial_ = 0;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_SIMULATED_NODE_H_
