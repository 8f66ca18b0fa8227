#ifndef DDP_COMM_HIERARCHICAL_RANK_ENGINE_H_
#define DDP_COMM_HIERARCHICAL_RANK_ENGINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/hierarchical/hierarchical_engine.h"
#include "ddp/comm/hierarchical/host_layout.h"
#include "ddp/comm/hierarchical/host_link.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace ddp::internal {

// Carries out the collectives of one rank. Free of LibTorch.
//
// One host: the CollectiveEngine does it, on the thread that waits. Several hosts: a thread of its
// own ("ddp-hosts") does it, one collective after the other, by a HierarchicalEngine.
//
// End. The first collective that fails ends the engine: every later one fails with the same status.
// The engine then ends the group of the host and the link, so that the ranks of all hosts fail. On
// several hosts both stay open after kInvalidArgument, which all ranks get: a peer may not have
// read the answer yet. When the group of the host ends, the link ends, whatever this rank is doing.
//
// Thread-safe.
class RankEngine {
 public:
  using Done = CollectiveEngine::Done;

  // `group` has the members of this host. `link` is null for one host.
  RankEngine(const HostLayout& layout, std::shared_ptr<HostGroup> group,
             std::unique_ptr<HostLink> link, const HierarchicalEngine::Options& options);
  // Leave() comes before, except in a forked child, which never destroys the engine.
  ~RankEngine();
  RankEngine(const RankEngine&) = delete;
  RankEngine& operator=(const RankEngine&) = delete;

  // As the methods of CollectiveEngine. With several hosts `done` is called on the engine's thread.
  void Start(CollectiveRequest request, absl::Duration timeout, Done done);
  bool Drive(const std::function<bool()>& stop, absl::Time deadline);
  void Poll();
  void Wake();

  // Fails what is not complete, and every later collective. When something is not complete, also
  // ends the group of the host. Blocks until the collectives are complete, at most a second.
  // Returns false when this process, or a peer on this host, may still use their memory.
  bool Abort();

  // Aborts, ends the thread, and leaves the group. Not to be called when MustNotLeave().
  void Leave();
  // Returns true on the threads of the engine and of the group.
  bool MustNotLeave() const;

  bool has_one_host() const { return hosts_ == nullptr; }
  // On one host: the engine that does all, and messages.
  CollectiveEngine& local() { return local_; }
  const std::shared_ptr<HostGroup>& group() const { return group_; }
  // Returns the rank on this host whose process has ended; -1: none.
  int dead_rank() const;

 private:
  struct Collective {
    CollectiveRequest request;
    absl::Time deadline;
    Done done;
  };

  void RunThread();
  void Run(Collective& collective);

  const int first_rank_;  // of this host
  const std::shared_ptr<HostGroup> group_;
  CollectiveEngine local_;
  const std::unique_ptr<HostLink> link_;
  const std::unique_ptr<HierarchicalEngine> hosts_;  // of the thread; null for one host

  Mutex mutex_;
  CondVar changed_;
  std::deque<Collective> waiting_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t wakes_ ABSL_GUARDED_BY(mutex_) = 0;  // of the threads in Drive()
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_RANK_ENGINE_H_
