#ifndef DDP_TESTING_ACCELERATOR_SIM_COMMUNICATOR_H_
#define DDP_TESTING_ACCELERATOR_SIM_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "testing/accelerator/peer_sockets.h"

namespace ddp::testing {

// One collective of a rank.
struct SimCall {
  // Exchanges messages with the peers: `outgoing[p]` goes to rank p, and `incoming[p]` comes from
  // it. An undefined tensor is no message. Throws when that fails; the exception must pass.
  using Exchange = std::function<void(const std::vector<at::Tensor>& outgoing,
                                      const std::vector<at::Tensor>& incoming)>;

  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<at::Tensor> inputs = {};       // both: on the communicator's device
  std::vector<at::Tensor> outputs = {};      // of the work's result and its future
  bool blocks_host = false;                  // Work::wait() blocks the host
  std::function<void(const Exchange&)> run;  // on the stream's thread, with kernels' views
};

// The connected ranks of a backend on one device, as an ncclComm_t. Its collectives run on a stream
// of its own. Held by a std::shared_ptr: works and tasks share it. Thread-safe, but one thread at a
// time may launch: the order of the launches is that of the collectives.
//
// A collective that fails, or that a peer's end cuts off, records the communicator's error and
// keeps its stream busy until Abort(), as a kernel of NCCL's does.
class SimCommunicator : public std::enable_shared_from_this<SimCommunicator> {
 public:
  SimCommunicator(PeerSockets sockets, PeerSockets::Place place, c10::Stream stream);

  // Enqueues the collective after the work that the current stream has so far. Throws
  // c10::DistBackendError after Abort().
  c10::intrusive_ptr<c10d::Work> Launch(SimCall call);

  // Ends the collectives in progress, and does not run those in the queue: their outputs are left
  // as they are. Fails later launches.
  void Abort();

  // Blocks until no collective is left. Returns false after `timeout`.
  bool AwaitIdle(absl::Duration timeout);

  // Returns the reason why no collective completes any more; "": none.
  std::string error() const;

  const c10::Stream& stream() const { return stream_; }

 private:
  // A collective's tensors. The work's first synchronize() empties the shelf, as NCCL's does;
  // else the tensors stay until the collective is complete.
  struct Shelf;
  class SimWork;
  struct Task;

  void Run(const Task& task);
  absl::Status RunCall(const Task& task, absl::Time deadline);
  // Blocks until Abort().
  void Hang(const absl::Status& why, const Task& task, absl::Time deadline);
  void DropFinished() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const PeerSockets::Place place_;
  const c10::Stream stream_;
  PeerSockets sockets_;  // of the stream's thread; Abort() is any thread's

  mutable Mutex mutex_;
  CondVar changed_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::string error_ ABSL_GUARDED_BY(mutex_);
  int64_t launched_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t left_ ABSL_GUARDED_BY(mutex_) = 0;  // collectives that the stream has not passed
  std::deque<std::shared_ptr<Shelf>> shelves_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::testing

#endif  // DDP_TESTING_ACCELERATOR_SIM_COMMUNICATOR_H_
