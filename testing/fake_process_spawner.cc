#include "testing/fake_process_spawner.h"

#include <utility>

namespace ddp::testing {

void FakeProcessSpawner::Spawn(const elastic::WorkerSpec& spec, StartCallback on_start,
                               ExitCallback on_exit) {
  on_strays_gone_ = nullptr;
  if (spec.local_rank == slow_rank_) {
    held_start_ = [this, spec, on_start, on_exit] {
      slow_rank_ = -1;
      Spawn(spec, on_start, on_exit);
    };
    return;
  }
  const auto failure = spawn_failures_.find(spec.local_rank);
  if (failure != spawn_failures_.end()) return on_start(failure->second);
  const pid_t pid = 1001 + static_cast<pid_t>(workers_.size());
  workers_.push_back({.spec = spec, .pid = pid, .signals = {}, .running = true});
  exit_callbacks_[pid] = std::move(on_exit);
  if (on_spawn_) on_spawn_(workers_.back());
  on_start(pid);
}

void FakeProcessSpawner::FinishStart() {
  if (const auto start = std::exchange(held_start_, nullptr)) start();
}

void FakeProcessSpawner::KillStrays(std::function<void()> on_gone) {
  ++strays_killed_;
  if (!strays_are_slow_) return on_gone();
  on_strays_gone_ = std::move(on_gone);
  if (on_kill_strays_) on_kill_strays_();
}

void FakeProcessSpawner::EndStrays() {
  if (const auto on_gone = std::exchange(on_strays_gone_, nullptr)) on_gone();
}

void FakeProcessSpawner::Signal(pid_t pid, int signal) {
  Worker* worker = Find(pid);
  if (worker == nullptr || !worker->running) return;
  worker->signals.push_back(signal);
  if (on_signal_) on_signal_(*worker, signal);
}

void FakeProcessSpawner::FailSpawn(int local_rank, absl::Status status) {
  spawn_failures_[local_rank] = std::move(status);
}

void FakeProcessSpawner::Exit(pid_t pid, const elastic::ExitStatus& status) {
  Worker* worker = Find(pid);
  if (worker == nullptr || !worker->running) return;
  worker->running = false;
  const ExitCallback on_exit = std::move(exit_callbacks_.at(pid));
  on_exit(pid, status);
}

FakeProcessSpawner::Worker* FakeProcessSpawner::Find(pid_t pid) {
  for (Worker& worker : workers_) {
    if (worker.pid == pid) return &worker;
  }
  return nullptr;
}

}  // namespace ddp::testing
