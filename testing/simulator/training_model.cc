#include "testing/simulator/training_model.h"

#include <signal.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace ddp::testing {
namespace {

constexpr double kSecond = 1e6;
constexpr double kVictimMeanUs = 50000;
constexpr double kFinishMeanUs = 20000;

}  // namespace

TrainingModel::TrainingModel(const Story* story, EventQueue* queue, Random random,
                             const Trace* trace, std::function<void(const Exit&)> on_exit)
    : story_(story),
      queue_(queue),
      random_(random),
      trace_(trace),
      on_exit_(std::move(on_exit)),
      total_steps_(std::max<int64_t>(1, story->training_s * story->steps_per_second)),
      is_stop_aware_(random_.Chance(story->stop_aware_chance)) {}

// Runs `what` later, if the process still lives. While its host is frozen, `what` waits.
void TrainingModel::Do(NodeId node, pid_t pid, int64_t delay_us,
                       std::function<void(Worker&)> what) {
  queue_->After(delay_us, [this, node, pid, what = std::move(what)] {
    Node& host = nodes_[node];
    if (host.is_frozen) {
      host.held.push_back([this, node, pid, what] { Do(node, pid, 0, what); });
      return;
    }
    for (auto& [local_rank, worker] : host.workers) {
      if (worker->pid == pid) return what(*worker);
    }
  });
}

pid_t TrainingModel::Start(NodeId node, int local_rank, const elastic::Round& round) {
  Node& host = nodes_[node];
  if (const auto old = host.workers.find(local_rank); old != host.workers.end()) {
    Exit exit = ExitOf(*old->second);
    exit.status.signal = SIGKILL;
    End(*old->second, exit);
  }
  Generation& generation = generations_[{round.generation.number, round.generation.nonce}];
  generation.id = round.generation;
  generation.world_size = round.placement.world_size;
  auto worker = std::make_unique<Worker>();
  worker->node = node;
  worker->local_rank = local_rank;
  worker->rank = round.placement.first_rank + local_rank;
  worker->pid = next_pid_++;
  worker->generation = &generation;
  worker->is_stubborn = random_.Chance(story_->stubborn_chance);
  generation.workers[{node, local_rank}] = worker.get();
  const pid_t pid = worker->pid;
  host.workers[local_rank] = std::move(worker);
  Do(node, pid, random_.Exponential(story_->worker_start_s * kSecond),
     [this](Worker& self) { GetReady(self); });
  return pid;
}

void TrainingModel::GetReady(Worker& worker) {
  Generation& generation = *worker.generation;
  worker.is_ready = true;
  ++generation.ready;
  if (generation.is_broken) return MissPeers(worker);
  if (generation.ready == generation.world_size) Run(generation);
}

void TrainingModel::Run(Generation& generation) {
  if (generation.base_step < 0) generation.base_step = generation.first_step = checkpoint_step_;
  if (generation.frozen > 0 || generation.hangs) return;
  generation.pace = PaceOf(generation);
  generation.running_since_us = queue_->now_us();
  Plan(generation);
}

void TrainingModel::Halt(Generation& generation) {
  if (generation.running_since_us < 0) return;
  generation.last_step_us = LastStepUs(generation);
  generation.base_step = StepOf(generation);
  generation.running_since_us = -1;
  ++generation.serial;
}

int64_t TrainingModel::StepOf(const Generation& generation) const {
  if (generation.running_since_us < 0) return generation.base_step;
  const double seconds =
      static_cast<double>(queue_->now_us() - generation.running_since_us) / kSecond;
  // Adds a margin, because microseconds are rounded: a step that is nearly done counts as done.
  const auto steps = static_cast<int64_t>(seconds * StepsPerSecond(generation) + 1e-3);
  return std::min(total_steps_, generation.base_step + steps);
}

// Plans the event of the next step at which a worker ends.
void TrainingModel::Plan(Generation& generation) {
  if (generation.running_since_us < 0) return;
  const int64_t now_step = StepOf(generation);
  int64_t target = total_steps_;
  for (const auto& [key, worker] : generation.workers) {
    if (worker->stop_at_step.has_value()) {
      target = std::min(target, std::max(*worker->stop_at_step, now_step));
    }
  }
  const uint64_t serial = ++generation.serial;
  const double seconds =
      static_cast<double>(target - generation.base_step) / StepsPerSecond(generation);
  queue_->At(generation.running_since_us + std::llround(seconds * kSecond),
             [this, &generation, serial] {
               if (generation.serial == serial) OnStep(generation);
             });
}

void TrainingModel::OnStep(Generation& generation) {
  Halt(generation);
  const int64_t step = generation.base_step;
  const bool is_done = step >= total_steps_;
  const int64_t kept = is_done ? step : step / story_->checkpoint_every * story_->checkpoint_every;
  checkpoint_step_ = std::max(checkpoint_step_, kept);
  std::vector<Worker*> ending;
  for (const auto& [key, worker] : generation.workers) {
    const bool stops = worker->stop_at_step.has_value() && *worker->stop_at_step <= step;
    if (is_done || stops) ending.push_back(worker);
  }
  // A worker that stops as asked has saved a checkpoint.
  if (!ending.empty()) checkpoint_step_ = std::max(checkpoint_step_, step);
  generation.is_broken = true;
  for (Worker* const worker : ending) {
    worker->is_ending = true;
    Do(worker->node, worker->pid, random_.Exponential(kFinishMeanUs),
       [this, is_done](Worker& self) {
         Exit exit = ExitOf(self);
         exit.stopped_as_asked = !is_done;
         End(self, exit);
       });
  }
  for (const auto& [key, worker] : generation.workers) MissPeers(*worker);
}

TrainingModel::Exit TrainingModel::ExitOf(const Worker& worker) const {
  return {.node = worker.node,
          .local_rank = worker.local_rank,
          .rank = worker.rank,
          .pid = worker.pid,
          .generation = worker.generation->id,
          .hung = worker.hangs,
          .is_unprompted = is_stop_aware_ && !worker.is_signalled,
          .step = StepOf(*worker.generation)};
}

// Ends and destroys `worker`.
void TrainingModel::End(Worker& worker, Exit exit) {
  Generation& generation = *worker.generation;
  const bool was_ending = worker.is_ending;
  if (worker.is_ready) --generation.ready;
  generation.workers.erase({worker.node, worker.local_rank});
  nodes_[worker.node].workers.erase(worker.local_rank);
  if (trace_->on()) {
    trace_->Add(absl::StrCat("node ", exit.node),
                absl::StrCat("(rank ", exit.rank, " of generation ", exit.generation.number,
                             exit.status.signal != 0
                                 ? absl::StrCat(" killed by ", exit.status.signal)
                                 : absl::StrCat(" exits with code ", exit.status.exit_code),
                             exit.is_victim ? ", a victim)" : ")"));
  }
  if (!was_ending) Break(generation);
  on_exit_(exit);
}

// Handles a rank that is gone before the end: its peers fail or hang.
void TrainingModel::Break(Generation& generation) {
  Halt(generation);
  const int64_t step = generation.base_step;
  if (step >= 0) {
    checkpoint_step_ =
        std::max(checkpoint_step_, step / story_->checkpoint_every * story_->checkpoint_every);
  }
  if (std::exchange(generation.is_broken, true)) return;
  for (const auto& [key, worker] : generation.workers) MissPeers(*worker);
}

void TrainingModel::MissPeers(Worker& worker) {
  if (!worker.is_ready || worker.is_ending || worker.hangs ||
      !random_.Chance(story_->victim_chance))
    return;
  const bool says_so = random_.Chance(0.8);
  Do(worker.node, worker.pid, random_.Exponential(kVictimMeanUs), [this, says_so](Worker& self) {
    Exit exit = ExitOf(self);
    exit.status.exit_code = 1;
    exit.is_victim = says_so;
    End(self, exit);
  });
}

void TrainingModel::Signal(NodeId node, int local_rank, int signal) {
  const auto found = nodes_[node].workers.find(local_rank);
  if (found == nodes_[node].workers.end()) return;
  Worker& worker = *found->second;
  worker.is_signalled = true;
  if (signal != SIGKILL && worker.is_stubborn) return;
  const int64_t delay_us =
      signal == SIGKILL ? 1000 : random_.Exponential(story_->slow_end_s * kSecond);
  Do(node, worker.pid, delay_us, [this, signal](Worker& self) {
    Exit exit = ExitOf(self);
    exit.status.signal = signal;
    self.is_ending = false;
    End(self, exit);
  });
}

void TrainingModel::Stop(NodeId node, const std::vector<int>& local_ranks,
                         std::optional<int64_t> stop_at_step, int signal) {
  for (const int local_rank : local_ranks) {
    const auto found = nodes_[node].workers.find(local_rank);
    if (found == nodes_[node].workers.end()) continue;
    if (!is_stop_aware_) {
      Signal(node, local_rank, signal);
      continue;
    }
    Worker& worker = *found->second;
    const int64_t soon = StepOf(*worker.generation) + 2;
    worker.stop_at_step = stop_at_step.value_or(soon);
    Plan(*worker.generation);
  }
}

bool TrainingModel::Crash(NodeId node) {
  Node& host = nodes_[node];
  if (host.workers.empty() || host.is_frozen) return false;
  auto at = std::next(host.workers.begin(),
                      random_.Between(0, static_cast<int64_t>(host.workers.size()) - 1));
  Worker& worker = *at->second;
  Exit exit = ExitOf(worker);
  // After the step at which it was asked to stop, a worker fails because its peers have stopped.
  exit.by_itself = !worker.stop_at_step.has_value() || exit.step < *worker.stop_at_step;
  if (random_.Chance(0.5)) {
    exit.status.signal = random_.Chance(0.5) ? SIGKILL : SIGSEGV;
  } else {
    exit.status.exit_code = static_cast<int>(random_.Between(1, 255));
  }
  worker.is_ending = false;
  End(worker, exit);
  return true;
}

const elastic::GenerationId* TrainingModel::Hang(NodeId node) {
  // Number of steps that HangDetector needs before it judges.
  constexpr int64_t kStepsMin = 12;
  Node& host = nodes_[node];
  if (host.workers.empty() || host.is_frozen) return nullptr;
  auto at = std::next(host.workers.begin(),
                      random_.Between(0, static_cast<int64_t>(host.workers.size()) - 1));
  Generation& generation = *at->second->generation;
  if (generation.running_since_us < 0 || at->second->stop_at_step.has_value() ||
      StepOf(generation) - generation.first_step < kStepsMin) {
    return nullptr;
  }
  Halt(generation);
  at->second->hangs = generation.hangs = true;
  return &generation.id;
}

double TrainingModel::PaceOf(const Generation& generation) const {
  double slowest = 1;
  for (const auto& [key, worker] : generation.workers) {
    slowest = std::max(slowest, nodes_.at(key.first).factor);
  }
  return 1 / slowest;
}

void TrainingModel::Slow(NodeId node, double factor) {
  Node& host = nodes_[node];
  host.factor = factor;
  if (host.workers.empty()) return;
  Generation& generation = *host.workers.begin()->second->generation;
  if (generation.running_since_us < 0) return;
  Halt(generation);
  Run(generation);
}

void TrainingModel::Vanish(NodeId node) {
  Node& host = nodes_[node];
  if (std::exchange(host.is_frozen, false)) {
    host.held.clear();
    for (const auto& [local_rank, worker] : host.workers) {
      --worker->generation->frozen;
      break;
    }
  }
  while (!host.workers.empty()) {
    Worker& worker = *host.workers.begin()->second;
    Exit exit = ExitOf(worker);
    exit.status.signal = SIGKILL;
    exit.with_its_node = true;
    worker.is_ending = false;
    End(worker, exit);
  }
}

void TrainingModel::Freeze(NodeId node) {
  Node& host = nodes_[node];
  if (std::exchange(host.is_frozen, true) || host.workers.empty()) return;
  Generation& generation = *host.workers.begin()->second->generation;
  ++generation.frozen;
  Halt(generation);
}

void TrainingModel::Thaw(NodeId node) {
  Node& host = nodes_[node];
  if (!std::exchange(host.is_frozen, false)) return;
  if (!host.workers.empty()) {
    Generation& generation = *host.workers.begin()->second->generation;
    const bool may_run = --generation.frozen == 0 && !generation.is_broken;
    if (may_run && generation.ready == generation.world_size) Run(generation);
  }
  for (const std::function<void()>& what : std::exchange(host.held, {})) what();
}

int TrainingModel::living(NodeId node) const {
  const auto found = nodes_.find(node);
  return found == nodes_.end() ? 0 : static_cast<int>(found->second.workers.size());
}

int64_t TrainingModel::LastStepUs(const Generation& generation) const {
  if (generation.running_since_us < 0) return generation.last_step_us;
  const auto steps = static_cast<double>(StepOf(generation) - generation.base_step);
  return generation.running_since_us + std::llround(steps / StepsPerSecond(generation) * kSecond);
}

std::optional<elastic::HealthPage::Snapshot> TrainingModel::Page(NodeId node,
                                                                 int local_rank) const {
  using elastic::HealthPage;
  using elastic::Phase;
  const auto host = nodes_.find(node);
  if (host == nodes_.end()) return std::nullopt;
  const auto found = host->second.workers.find(local_rank);
  if (found == host->second.workers.end()) return std::nullopt;
  const Worker& worker = *found->second;
  const Generation& generation = *worker.generation;
  HealthPage::Snapshot page;
  page.generation = generation.id.number;
  page.worker = HealthPage::Worker::kAttached;
  page.tells_waits = true;
  page.commits = std::max<int64_t>(0, StepOf(generation) - generation.first_step);
  page.has_step = worker.is_ready && page.commits > 0;
  if (!page.has_step) return page;
  page.step = StepOf(generation);
  page.longest_step_us = std::llround(kSecond / StepsPerSecond(generation));
  page.step_start_monotonic_ns = LastStepUs(generation) * 1000;
  page.phase_start_monotonic_ns = page.step_start_monotonic_ns;
  const bool waits = generation.running_since_us < 0 && !worker.hangs;
  page.phase = waits ? Phase::kSynchronize : Phase::kForward;
  page.stopped_as_asked = worker.is_ending;
  return page;
}

int64_t TrainingModel::busy_us(NodeId node) const {
  const auto host = nodes_.find(node);
  const double factor = host == nodes_.end() ? 1 : host->second.factor;
  return std::llround(kSecond / story_->steps_per_second * factor);
}

int64_t TrainingModel::step(NodeId node) {
  const Node& host = nodes_[node];
  if (host.workers.empty()) return -1;
  return StepOf(*host.workers.begin()->second->generation);
}

}  // namespace ddp::testing
