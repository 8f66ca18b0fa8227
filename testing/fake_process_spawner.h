#ifndef DDP_TESTING_FAKE_PROCESS_SPAWNER_H_
#define DDP_TESTING_FAKE_PROCESS_SPAWNER_H_

#include <sys/types.h>

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "elastic/agent/process_spawner.h"

namespace ddp::testing {

// A ProcessSpawner without processes: the test decides when and how each worker ends. Pids are
// numbers from 1001 on, of no process. Thread-compatible.
class FakeProcessSpawner final : public elastic::ProcessSpawner {
 public:
  struct Worker {
    elastic::WorkerSpec spec;
    pid_t pid = 0;
    std::vector<int> signals;  // sent to the worker, in order
    bool running = true;
  };

  void Spawn(const elastic::WorkerSpec& spec, StartCallback on_start,
             ExitCallback on_exit) override;
  void CancelStart() override { held_start_ = nullptr; }
  void Signal(pid_t pid, int signal) override;
  void KillStrays(std::function<void()> on_gone) override;

  // Set callbacks for each worker that starts, and for each signal to a worker. A callback within
  // Spawn() must not call Exit(); it can set a timer that does. Other callbacks may call Exit().
  void OnSpawn(std::function<void(const Worker&)> on_spawn) { on_spawn_ = std::move(on_spawn); }
  void OnSignal(std::function<void(const Worker&, int signal)> on_signal) {
    on_signal_ = std::move(on_signal);
  }

  // Makes every later start of `local_rank` fail with `status`.
  void FailSpawn(int local_rank, absl::Status status);

  // Delays the next start of `local_rank` until FinishStart().
  void HoldStart(int local_rank) { slow_rank_ = local_rank; }
  void FinishStart();
  bool start_is_held() const { return held_start_ != nullptr; }

  // Lets the strays (processes that workers left behind) live until EndStrays(). `on_kill` is
  // called by KillStrays().
  void HoldStrays(std::function<void()> on_kill = nullptr) {
    strays_are_slow_ = true;
    on_kill_strays_ = std::move(on_kill);
  }
  void EndStrays();

  // Ends a running worker; does nothing when it has ended.
  void Exit(pid_t pid, const elastic::ExitStatus& status);

  // All workers that were ever started, in order.
  const std::vector<Worker>& workers() const { return workers_; }
  // Returns the number of calls of KillStrays().
  int strays_killed() const { return strays_killed_; }

 private:
  Worker* Find(pid_t pid);

  std::vector<Worker> workers_;
  std::map<pid_t, ExitCallback> exit_callbacks_;
  std::map<int, absl::Status> spawn_failures_;
  int slow_rank_ = -1;
  std::function<void()> held_start_;
  bool strays_are_slow_ = false;
  std::function<void()> on_kill_strays_;
  std::function<void()> on_strays_gone_;
  std::function<void(const Worker&)> on_spawn_;
  std::function<void(const Worker&, int)> on_signal_;
  int strays_killed_ = 0;
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_FAKE_PROCESS_SPAWNER_H_
