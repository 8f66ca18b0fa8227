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
#include "ddp/comm/collective.h"
#include "ddp/comm/failure_notice.h"
#include "ddp/comm/inquiry.h"
#include "ddp/comm/operation_name.h"
#include "ddp/comm/point_to_point.h"

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

// A c10d backend together with the rule by which everything in ddp/ waits for it: until the
// operation is complete, or a peer is known to have failed, or the timeout has passed.
//
// A communicator in which an operation failed or was given up is retired: the backend may still
// write into the tensors of that operation, so it and they are kept until that has ended (looked at
// when the next communicator is made or retired), and every further call throws. The destructor
// never blocks, whatever is in flight. (LibTorch 2.11's Gloo cannot abort.)
//
// On a GPU the host never waits: a peer's failure is then seen by the next Wait, and a broken
// operation by NCCL's own watchdog, after the timeout.
//
// Sums of complex tensors are sums of their parts. A sparse (COO) tensor may have other indices on
// every rank; after Wait it holds the sum. A strided tensor without elements is complete at once
// and sends nothing. In a group of one everything is.
//
// Collectives that differ between the ranks never meet in LibTorch's Gloo, which would end the
// process: each carries a tag of its own (see CollectiveLog), so both ranks wait. A rank that has
// waited for a second asks all ranks where they are, and then less and less often. Where that shows
// ranks in different collectives, or a rank that has left, every rank throws an error that names
// the ranks and their collectives.
//
// Messages between two ranks (Send, Receive) stand outside of that order. A rank that waits for one
// learns when its peer is gone or has left, but not that the peer will never send.
//
// A broken connection is a symptom: the rank then looks for the rank that is gone, waits for news
// of it where it cannot tell, and throws PeerFailedError with that rank.
//
// Whatever here throws PeerFailedError or CommunicationError notes in the FailureNotice that this
// rank has raised. All ranks call the same operations in the same order. Thread-compatible.
class Communicator {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    absl::Duration timeout = absl::Minutes(30);  // of one operation
    int64_t incarnation = 0;                     // of the group; says which failures count
    // Sets the tag of the backend's next operation; null: the backend has no tags.
    void (*set_tag)(c10d::Backend& backend, uint32_t tag) = nullptr;
    // See Inquiry::Options.
    int local_begin = 0;
    int local_end = 0;
    bool store_is_rank_0 = false;
  };

  using Future = c10::intrusive_ptr<c10::ivalue::Future>;

  // An operation under way. Keeps its tensor alive.
  struct Operation;
  struct Pending {
    std::shared_ptr<Operation> operation;  // null: complete
    at::Tensor tensor;
    OperationName what = "";
  };

  // `check` compares every operation across the ranks before it starts; null: none does. A null
  // backend makes a communicator that is retired from the start, or one of a group of one.
  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<FailureNotice> notice,
               const Options& options, std::unique_ptr<CollectiveCheck> check = nullptr);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // The last step of an operation, on this rank alone. `finish` runs when the backend is through,
  // in a thread of the backend; the future's value is then `results`. Null: there is none.
  struct AfterIt {
    std::function<void()> finish = {};
    std::vector<at::Tensor> results = {};
  };

  // Starts a collective. Throws CommunicationError.
  Pending Start(const Collective& collective, OperationName what, AfterIt after);

  // The library's own collectives: the element-wise sum, minimum or maximum over all ranks, in
  // place, and a copy of `root`'s tensor into the others'. The tensor is contiguous.
  Pending AllReduce(at::Tensor tensor, OperationName what);
  Pending AllReduceMin(at::Tensor tensor, OperationName what);
  Pending AllReduceMax(at::Tensor tensor, OperationName what);
  Pending Broadcast(at::Tensor tensor, int root, OperationName what);

  // Starts one half of a message between this rank and `peer`, another one. See PointToPoint.
  Pending Send(at::Tensor tensor, int peer, int tag, OperationName what);
  Pending Receive(at::Tensor tensor, int peer, int tag, OperationName what, AfterIt after);

  // The future of an operation under way; null: the operation is complete. The value is the
  // backend's, or that of AfterIt. A rank waits for a future, or for one that comes from it, by
  // WaitFuture().
  static Future FutureOf(const Pending& pending);

  // Returns when the tensor may be read: on the CPU the operation is complete, on a GPU the current
  // stream waits for it. Throws PeerFailedError, or CommunicationError (timeout, network), after
  // which the communicator is retired and the peers have been told.
  void Wait(Pending& pending);

  // The same for any future that this rank's peers, too, wait for: one that a comm hook returned.
  // Afterwards its value() is there, ordered before the current stream's further work. `keep_alive`
  // are the tensors that it may still write to if it is given up. An error in the future that no
  // operation of ours caused (a hook's `then` threw) is reported to the peers and thrown as
  // ReductionError, naming `what`.
  void WaitFuture(const Future& future, std::vector<at::Tensor> keep_alive, OperationName what);

  // Starts a wait for every rank; `device` is where the backend wants its tensors.
  Pending StartBarrier(at::Device device, OperationName what);

  // Blocks until every rank has come here; on a GPU the host waits as well.
  void Barrier(at::Device device);

  // The same in two steps: Begin launches, and End waits for the last Begin, at once where there is
  // none. For work that peers may not disturb before this rank is through with it.
  void BeginBarrier(at::Device device, OperationName what);
  void EndBarrier();

  // A zeroed buffer of `count` elements for operations to run on. With DDP_DISABLE_COMM_MEM=0 in
  // the environment it lies in memory that is registered with the network, where the backend has
  // such (NCCL); else it is an ordinary one.
  at::Tensor AllocateBuffer(int64_t count, const at::TensorOptions& options);

  // The collectives launched so far. Null in a group of one.
  CollectiveLog* log() const { return log_.get(); }

  // From now on every call throws. For a group whose incarnation has ended.
  void Retire() { retired_ = true; }
  bool retired() const { return retired_; }

 private:
  Pending StartMessage(bool send, at::Tensor tensor, int peer, int tag, OperationName what,
                       AfterIt after);
  static void Finish(Operation& operation, AfterIt after);
  void CheckAcrossRanks(const Collective& collective, const OperationName& what);
  std::shared_ptr<Operation> NewOperation();
  int64_t Record(const Collective& collective, const OperationName& what);
  Inquiry::Awaited Awaited(const Future& future, const OperationName& what);
  FailureNotice::WaitResult Await(const Future& future, const OperationName& what);
  void Inquire(const Future& future, const OperationName& what, int64_t since_ns);
  void ForgetComplete();
  const Operation* FailedOperation() const;
  void ThrowForgottenError();
  [[noreturn]] void FailOperation(const Operation& operation);
  void OrderStreams(Pending& pending);
  std::string LateRanks(const Future& future, const OperationName& what);
  [[noreturn]] void Fail(const OperationName& what, const std::string& reason);
  [[noreturn]] void FailBroken(const Future& future, const OperationName& what,
                               const std::string& reason);
  // Runs `launch`, which gives an operation to the backend. An exception of it retires this
  // communicator, and leaves as a CommunicationError that names `what`.
  template <typename Launch>
  void LaunchOrFail(const OperationName& what, const Launch& launch);
  void ThrowIfUnusable(const OperationName& what);

  const Options options_;
  const std::shared_ptr<FailureNotice> notice_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  const std::unique_ptr<CollectiveCheck> check_;
  const std::shared_ptr<CollectiveLog> log_;
  Inquiry inquiry_;
  PointToPoint point_to_point_;
  Pending barrier_;
  bool retired_ = false;

  // Collectives that the backend has started and not completed, in the order of starting, whether
  // or not a thread waits for them. The vectors keep their capacity and operations are used again,
  // so that a step allocates nothing here.
  std::vector<std::shared_ptr<Operation>> in_flight_;
  std::vector<std::shared_ptr<Operation>> messages_;  // the same of messages
  std::vector<std::shared_ptr<Operation>> spare_;
};

}  // namespace ddp::internal

#endif  // DDP_COMM_COMMUNICATOR_H_
