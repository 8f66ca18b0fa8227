#ifndef DDP_COMM_HIERARCHICAL_COLLECTIVE_QUEUE_H_
#define DDP_COMM_HIERARCHICAL_COLLECTIVE_QUEUE_H_

#include <deque>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "ddp/comm/hierarchical/hierarchical_engine.h"
#include "ddp/comm/host_group/host_group.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace ddp::internal {

// Carries out the collectives of one rank, one after the other, on a thread of its own
// ("ddp-hosts"). Free of LibTorch.
//
// Agreement. Before a collective runs, all ranks compare its header: see
// HierarchicalEngine::Agree().
//
// End. The first collective that fails ends the queue: every later one fails with the same status.
// The queue then ends the group of the host and the traffic with other hosts, so that the ranks of
// all hosts fail. The queue leaves both open after kInvalidArgument, which all ranks get: a peer
// may not have read the answer yet.
//
// Thread-safe.
class CollectiveQueue {
 public:
  struct Collective {
    CollectiveHeader header;
    absl::Time deadline;
    // Called when all ranks have agreed. Throws nothing. Destroyed before `done` is called.
    std::function<absl::Status(absl::Time deadline)> run;
    // Called once, on the thread of the queue, without a lock.
    std::function<void(const absl::Status& status)> done;
  };

  // The objects that the queue works with. All outlive it.
  struct Parts {
    HostGroup* group = nullptr;
    CollectiveEngine* local = nullptr;
    HierarchicalEngine* engine = nullptr;  // only the thread of the queue uses it from now on
    // Ends the traffic with other hosts: operations in progress fail soon. Never blocks. May be
    // called several times, on the threads of the queue, of the group, and of the caller of
    // Abort().
    std::function<void()> close_connections;
  };

  explicit CollectiveQueue(Parts parts);
  // Aborts, and blocks until the thread has ended. Not to be called on that thread.
  ~CollectiveQueue();
  CollectiveQueue(const CollectiveQueue&) = delete;
  CollectiveQueue& operator=(const CollectiveQueue&) = delete;

  // Adds a collective. Never blocks.
  void Push(Collective collective);

  // Fails what is not complete, and every later collective. When something is not complete, also
  // ends the group of the host. Blocks until the collectives are complete, at most a second.
  // Returns false when the thread, or a peer on this host, may still use their memory.
  bool Abort();

  // Returns true on the thread of the queue.
  bool OnThread() const { return std::this_thread::get_id() == thread_.get_id(); }

 private:
  void RunThread();
  void Run(Collective& collective);

  const Parts parts_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<Collective> waiting_ ABSL_GUARDED_BY(mutex_);
  bool running_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_HIERARCHICAL_COLLECTIVE_QUEUE_H_
