#include "testing/fake_process_spawner.h"

#include <utility>

namespace ddp::testing {

absl::StatusOr<pid_t> FakeProcessSpawner::Spawn(const elastic::WorkerSpec& spec,
                                                ExitCallback on_exit) {
  const auto failure = spawn_failures_.find(spec.local_rank);
  if (failure != spawn_failures_.end()) return failure->second;
  const pid_t pid = 1001 + static_cast<pid_t>(workers_.size());
  workers_.push_back({.spec = spec, .pid = pid, .signals = {}, .running = true});
  exit_callbacks_[pid] = std::move(on_exit);
  if (on_spawn_) on_spawn_(workers_.back());
  return pid;
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
