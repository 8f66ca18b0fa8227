#ifndef DDP_TESTING_SIMULATOR_TRAINING_MODEL_H_
#define DDP_TESTING_SIMULATOR_TRAINING_MODEL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "elastic/agent/process_spawner.h"
#include "elastic/health/health_page.h"
#include "elastic/rendezvous/round.h"
#include "testing/simulator/event_queue.h"
#include "testing/simulator/random.h"
#include "testing/simulator/story.h"
#include "testing/simulator/trace.h"

namespace ddp::testing {

// Models all worker processes of a job, in simulated time. Workers start, and make steps at one
// pace while every rank of their generation is there. When a rank is missing, they hang, or fail
// soon after it. They obey or ignore signals, stop at the step they are asked to, and end when the
// training is done. A generation begins at the last checkpoint.
//
// A step is no event: the number of steps follows from the start time. Thread-compatible.
class TrainingModel {
 public:
  using NodeId = int;
  struct Exit {
    NodeId node = -1;
    int local_rank = 0;
    int rank = 0;
    pid_t pid = 0;
    elastic::GenerationId generation;
    elastic::ExitStatus status;
    bool is_victim = false;         // failed because of a peer, and its error says so
    bool stopped_as_asked = false;  // before the work was done
    bool by_itself = false;         // failed by itself
    bool hung = false;
    bool is_unprompted = false;  // polls for requests to stop, and had got no signal
    int64_t step = -1;           // last committed step of the generation
    bool with_its_node = false;  // no agent is left to see the end
  };

  // Calls `on_exit` when a worker is gone. The pointers are not owned.
  TrainingModel(const Story* story, EventQueue* queue, Random random, const Trace* trace,
                std::function<void(const Exit&)> on_exit);

  // Returns the pid. A worker of this local rank that still lives on the node is killed.
  pid_t Start(NodeId node, int local_rank, const elastic::Round& round);
  void Signal(NodeId node, int local_rank, int signal);
  // Asks workers to stop by the health page, as StopWorkersAction says. Workers whose program does
  // not read the page get `signal`.
  void Stop(NodeId node, const std::vector<int>& local_ranks, std::optional<int64_t> stop_at_step,
            int signal);

  // Faults. Crash() ends a worker of the node; returns false when the node has none. Hang() stops
  // the steps of a worker of the node; returns its generation, or null when the worker makes no
  // steps, or too few for hang detection. Slow() multiplies the step time of the node's workers by
  // `factor`. Vanish() ends the processes together with their agent or host.
  bool Crash(NodeId node);
  const elastic::GenerationId* Hang(NodeId node);
  void Slow(NodeId node, double factor);
  void Vanish(NodeId node);
  void Freeze(NodeId node);
  void Thaw(NodeId node);

  int living(NodeId node) const;
  // Returns the last step that the node's workers have committed in this generation, or -1.
  int64_t step(NodeId node);
  // Returns the health page of a worker, or nullopt when there is no such worker.
  std::optional<elastic::HealthPage::Snapshot> Page(NodeId node, int local_rank) const;
  // Returns the time of a step of the node's own workers, without waiting for peers.
  int64_t busy_us(NodeId node) const;
  double steps_per_second() const { return story_->steps_per_second; }
  int64_t total_steps() const { return total_steps_; }
  bool all_trained() const { return checkpoint_step_ >= total_steps_; }

 private:
  struct Generation;
  struct Worker {
    NodeId node = -1;
    int local_rank = 0;
    int rank = 0;
    pid_t pid = 0;
    Generation* generation = nullptr;
    bool is_ready = false;  // to make steps
    bool is_ending = false;
    bool is_stubborn = false;
    bool hangs = false;
    bool is_signalled = false;
    std::optional<int64_t> stop_at_step;
  };
  struct Generation {
    elastic::GenerationId id;
    int world_size = 0;
    int ready = 0;
    int frozen = 0;          // number of frozen nodes with workers of the generation
    bool hangs = false;      // a worker of the generation hangs
    double pace = 1;         // steps per second, relative to the story's
    int64_t first_step = 0;  // step at which the generation began
    int64_t last_step_us = -1;
    bool is_broken = false;  // a rank is gone before the generation's end
    int64_t base_step = -1;  // at `running_since_us`
    int64_t running_since_us = -1;
    uint64_t serial = 0;  // of the plan: events of an earlier one are void
    std::map<std::pair<NodeId, int>, Worker*> workers;
  };
  struct Node {
    std::map<int, std::unique_ptr<Worker>> workers;
    bool is_frozen = false;
    double factor = 1;
    std::vector<std::function<void()>> held;  // actions of its workers, delayed while frozen
  };

  void Do(NodeId node, pid_t pid, int64_t delay_us, std::function<void(Worker&)> what);
  void GetReady(Worker& worker);
  void Run(Generation& generation);
  double StepsPerSecond(const Generation& generation) const {
    return story_->steps_per_second * generation.pace;
  }
  int64_t LastStepUs(const Generation& generation) const;
  double PaceOf(const Generation& generation) const;
  void Halt(Generation& generation);
  void Plan(Generation& generation);
  void Break(Generation& generation);
  void MissPeers(Worker& worker);
  int64_t StepOf(const Generation& generation) const;
  void OnStep(Generation& generation);
  void End(Worker& worker, Exit exit);
  Exit ExitOf(const Worker& worker) const;

  const Story* const story_;
  EventQueue* const queue_;
  Random random_;
  const Trace* const trace_;
  const std::function<void(const Exit&)> on_exit_;
  const int64_t total_steps_;
  const bool is_stop_aware_;

  std::map<std::pair<uint64_t, std::string>, Generation> generations_;
  std::map<NodeId, Node> nodes_;
  int64_t checkpoint_step_ = 0;
  pid_t next_pid_ = 1000;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_SIMULATOR_TRAINING_MODEL_H_
