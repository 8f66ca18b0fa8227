#ifndef DDP_COMM_COMMUNICATOR_H_
#define DDP_COMM_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/backend/operation_fault.h"
#include "ddp/comm/check/inquiry.h"
#include "ddp/comm/check/operation_name.h"
#include "ddp/comm/collective.h"
#include "ddp/comm/completion_wait.h"
#include "ddp/comm/device_proof.h"
#include "ddp/comm/point_to_point.h"
#include "ddp/comm/reports/failure_monitor.h"
#include "ddp/common/membership.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d
namespace c10::ivalue {
struct Future;
}  // namespace c10::ivalue

namespace ddp::internal {

class CollectiveCheck;
class CollectiveLog;
class DeviceWatch;

// Starts operations on a c10d backend, and waits for them on behalf of all of ddp/. A wait ends
// when the operation is complete, another operation has failed, a peer has reported a failure, or
// the timeout has passed. A ProcessGroup owns one communicator per incarnation of the group. All
// ranks must call the same collectives in the same order; messages are outside this order. See
// docs/architecture.md: how a wait ends, collectives that differ, a broken connection, streams.
//
// Threads. Thread-compatible. Wait(), WaitFuture(), Barrier() and EndBarrier() block the calling
// thread, except on a stream (see BackendTraits::RunsOnStream()): there the current stream waits. A
// call that finds a failure may block for about 8 s while it looks for the cause. Never start an
// operation or wait in a continuation of a future: ranks run continuations in different orders, so
// they would deadlock.
//
// Retired. A communicator is retired when one of its operations has failed, or a wait has ended
// without a result, or by Retire(). Every later call that starts an operation, or waits for one
// that was not complete at its start, throws. The backend may still write into the tensors of an
// unfinished operation, so they are kept: see Abandon(). The destructor waits for operations on
// streams only.
//
// Tensors. Complex numbers are summed as pairs of real numbers. In an all-reduce, a sparse (COO)
// tensor may have different indices on every rank; with LibTorch's Gloo its start, and the start of
// the next collective, block until the earlier ones are complete, and throw as Wait() does. A
// collective on strided tensors without elements, or in a group of one, completes in Start().
//
// Errors. This rank first looks for the rank that is gone (see Inquiry::Explain). It then throws
// PeerFailedError with the rank at fault, or CommunicationError when no other rank is.
class Communicator {
 public:
  struct Options {
    Membership membership;                       // of the group's incarnation
    absl::Duration timeout = absl::Minutes(30);  // of one operation
    BackendTraits traits = {};
  };

  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  // An operation that was started and not yet waited for. Keeps its tensor alive.
  struct Operation;
  struct Pending {
    std::shared_ptr<Operation> operation;  // null when the operation is complete
    at::Tensor tensor;
    OperationName what = "";
    bool on_stream = false;  // see BackendTraits::RunsOnStream()
  };

  // Frees the backends of destroyed communicators whose operations have ended. `check` compares
  // every collective across the ranks before it starts; null compares nothing. A null `backend` is
  // for a group of one; in a larger group it makes a communicator that is retired from the start.
  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<FailureMonitor> monitor,
               const Options& options, std::unique_ptr<CollectiveCheck> check = nullptr);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // The local last step of an operation. `finish` runs after the backend has completed the
  // operation, and the future's value is then `results`. With a null `finish` there is no last
  // step, and `results` is ignored. Thread: the one that completes the operation (the backend's,
  // "ddp-messages" or "ddp-work"), or the caller of Start() when the operation completes there.
  // `finish` must not start an operation or wait for one.
  struct AfterIt {
    std::function<void()> finish = {};
    std::vector<at::Tensor> results = {};
  };

  // Starts a collective. With a `check`, first blocks until all ranks have called Start().
  // Throws CommunicationError (PeerFailedError when a peer is at fault) when the communicator is
  // retired, a failure is known, an earlier operation has failed, `check` finds a difference, or
  // the launch fails.
  Pending Start(const Collective& collective, OperationName what, AfterIt after);

  // As Start(), for a collective that `launch` starts on the backend in its own way. `described` is
  // for the comparison of the ranks and for messages; its output keeps no memory. Not in a group of
  // one.
  using OwnLaunch = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& backend)>;
  Pending StartOwn(const Collective& described, OperationName what, const OwnLaunch& launch);

  // Returns the number of ranks.
  int size() const { return options_.membership.size; }

  // Returns the backend; null in a group of one that needs none.
  c10d::Backend* backend() const { return backend_.get(); }

  // Start the library's own collectives. The reductions put the element-wise sum, minimum or
  // maximum over all ranks into `tensor`; Broadcast() copies `root`'s tensor into the others'.
  // `tensor` is contiguous; for AllReduce() it may also be sparse (COO). Errors: as Start().
  Pending AllReduce(at::Tensor tensor, OperationName what);
  Pending AllReduceMin(at::Tensor tensor, OperationName what);
  Pending AllReduceMax(at::Tensor tensor, OperationName what);
  Pending Broadcast(at::Tensor tensor, int root, OperationName what);

  // Start one half of a message between this rank and `peer`, another rank. See PointToPoint.
  // Errors: as Start().
  Pending Send(at::Tensor tensor, int peer, int tag, OperationName what);
  Pending Receive(at::Tensor tensor, int peer, int tag, OperationName what, AfterIt after);

  // Returns the future of an operation, or null when the operation is complete. The future's value
  // is the backend's, or AfterIt::results. Wait for the future, or for a future derived from it,
  // only by WaitFuture().
  static Future FutureOf(const Pending& pending);

  // Blocks until the operation is complete. On a stream it does not block: the current stream
  // waits, in each call. Afterwards the tensor may be read. An operation that completes within 200
  // ms of a peer's failure report still counts as complete. Throws PeerFailedError when a peer has
  // failed, and CommunicationError on a timeout or a network error. The communicator is then
  // retired, and this rank has sent the peers a failure report if none was known. Throws
  // CommunicationError when the group was renewed since the operation started.
  void Wait(Pending& pending);

  // Waits like Wait() for any future that the peers wait for as well, such as a comm hook's.
  // Afterwards the future's value() is set, and ordered before further work of the current stream.
  // `keep_alive` are the tensors that the future may still write to after this call has thrown.
  // Throws as Wait(). Throws ReductionError, naming `what`, for an error that no operation of this
  // communicator caused, such as an exception in a hook's `then`; the peers get a failure report.
  void WaitFuture(const Future& future, std::vector<at::Tensor> keep_alive, OperationName what);

  // Returns true when the operation has ended, with a result or an error; on a stream, when the
  // device has ended it. Does not block.
  static bool IsComplete(const Pending& pending);

  // Returns a copy on the CPU of a tensor that operations have written, after Wait(). Blocks until
  // the device has written it. Throws as Wait() when an abort came first: the values may be wrong.
  at::Tensor ToHost(const at::Tensor& tensor, const OperationName& what);

  // Returns the proof that the device has computed what the current stream of `device` has so far
  // from complete results. Null where operations run on no stream, or none has started: the host
  // has waited for them.
  DeviceProof Prove(at::Device device);

  // Starts a barrier. `device` is the one on which the backend needs its tensors. Errors: as
  // Start().
  Pending StartBarrier(at::Device device, OperationName what);

  // Blocks until every rank has called Barrier(). On a GPU the host waits as well.
  void Barrier(at::Device device);

  // A barrier in two steps. BeginBarrier() starts one. EndBarrier() waits for it, and returns at
  // once when there is none. On a CPU, no rank returns from EndBarrier() before all have called
  // BeginBarrier(). So a peer that ends after EndBarrier() cannot disturb what this rank does
  // before BeginBarrier(). On a GPU, EndBarrier() does not block the host.
  void BeginBarrier(at::Device device, OperationName what);
  void EndBarrier();

  // Returns a zeroed buffer of `count` elements for operations to run on. With
  // DDP_DISABLE_COMM_MEM=0 in the environment (read once), the buffer is in memory registered with
  // the network, where the backend has such memory (NCCL). Otherwise the memory is ordinary.
  at::Tensor AllocateBuffer(int64_t count, const at::TensorOptions& options);

  // Returns the record of the collectives launched so far; null in a group of one.
  CollectiveLog* log() const { return log_.get(); }

  // Retires this communicator. ProcessGroup calls it when an incarnation ends, and for an error
  // that it finds itself.
  void Retire() { retired_ = true; }

  // Retires this communicator before the next incarnation begins. Call it while a failure is known.
  // Blocks until no operation of it is on a stream any more, complete or aborted: an operation that
  // ends later would be reported as a failure of the next incarnation.
  void RetireForNext();
  bool retired() const { return retired_; }

 private:
  Pending StartMessage(bool send, at::Tensor tensor, int peer, int tag, OperationName what,
                       AfterIt after);
  template <typename Launch>
  std::shared_ptr<Operation> Begin(const at::Tensor& tensor, const OperationName& what,
                                   AfterIt after, std::vector<std::shared_ptr<Operation>>& list,
                                   const Launch& launch);
  std::shared_ptr<Operation> BeginCollective(const Collective& collective,
                                             const OperationName& what, AfterIt after,
                                             const OwnLaunch& launch);
  void AwaitSparse(const Collective& next, const OperationName& what);
  void AwaitSettled(const OperationName& what);
  void CheckAcrossRanks(const Collective& collective, const OperationName& what);
  std::shared_ptr<Operation> NewOperation();
  int64_t Record(const Collective& collective, const OperationName& what);
  Inquiry::Awaited Awaited(const Future& future, const OperationName& what);
  CompletionWait::Result Await(const Future& future, const OperationName& what);
  void Inquire(const Future& future, const OperationName& what, int64_t since_ns);
  bool HurryMessages(const Future& future);
  void ForgetComplete();
  const Operation* FailedOperation() const;
  void ThrowForgottenError();
  void FailIfWatched();
  [[noreturn]] void FailOperation(const Operation& operation, bool watched);
  OperationFault FaultOfOperation(const Operation& operation, bool watched) const;
  void OrderStreams(Pending& pending);
  void Watch(const Operation& operation);
  bool ShutDown();
  std::string LateRanks(const Future& future, const OperationName& what);
  [[noreturn]] void Fail(const OperationName& what, const std::string& reason);
  [[noreturn]] void FailOwn(GroupError::Kind kind, const std::string& message);
  void FailForDeadRank(const Future& future, const OperationName& what);
  [[noreturn]] void FailBroken(const Future& future, const OperationName& what,
                               const std::string& reason, OperationFault fault);
  void ThrowIfUnusable(const OperationName& what);

  const Options options_;
  const std::shared_ptr<FailureMonitor> monitor_;
  const CompletionWait wait_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::unique_ptr<CollectiveCheck> check_;
  const std::shared_ptr<CollectiveLog> log_;
  Inquiry inquiry_;
  PointToPoint point_to_point_;
  std::unique_ptr<DeviceWatch> device_watch_;  // null before the first operation on a stream
  Pending barrier_;
  bool retired_ = false;
  bool after_sparse_ = false;  // the last collective was a sparse all-reduce: see AwaitSparse()

  // Collectives that the backend has started and not completed, in the order of starting, whether
  // or not a thread waits for them. The vectors keep their capacity, and operations are reused, so
  // a step allocates nothing here.
  std::vector<std::shared_ptr<Operation>> in_flight_;
  std::vector<std::shared_ptr<Operation>> messages_;  // messages not completed, likewise
  std::vector<std::shared_ptr<Operation>> spare_;     // operations to reuse
};

}  // namespace ddp::internal

#endif  // DDP_COMM_COMMUNICATOR_H_
