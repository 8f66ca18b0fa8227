#ifndef DDP_COMM_COMMUNICATOR_H_
#define DDP_COMM_COMMUNICATOR_H_

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace ddp {

class FailureNotice;

// A c10d backend together with the rule by which everything in ddp/ waits for it: until the
// operation is complete, or a peer is known to have failed, or the timeout has passed.
//
// A communicator in which an operation failed or was given up is retired: the backend may still
// write into the tensors of that operation, so it and they are kept until the process ends, every
// further call throws, and the destructor does not block. (LibTorch 2.11's Gloo cannot abort.)
//
// On a GPU the host never waits: a peer's failure is then seen by the next Wait, and a broken
// operation by NCCL's own watchdog, after the timeout.
//
// All ranks call the same operations in the same order. Thread-compatible.
class Communicator {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    absl::Duration timeout = absl::Minutes(30);  // of one operation
  };

  // An operation under way. Keeps its tensor alive.
  struct Operation;
  struct Pending {
    std::shared_ptr<Operation> operation;  // null: complete
    at::Tensor tensor;
    std::string what;  // for messages: "the all-reduce of bucket 3"
  };

  Communicator(c10::intrusive_ptr<c10d::Backend> backend, std::shared_ptr<FailureNotice> notice,
               const Options& options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Starts a sum over all ranks, in place. Throws CommunicationError.
  Pending AllReduce(at::Tensor tensor, std::string what);

  // Starts the same with the element-wise minimum.
  Pending AllReduceMin(at::Tensor tensor, std::string what);

  // Starts a copy of `root`'s tensor into the others'.
  Pending Broadcast(at::Tensor tensor, int root, std::string what);

  // Returns when the tensor may be read: on the CPU the operation is complete, on a GPU the current
  // stream waits for it. Throws PeerFailedError, or CommunicationError (timeout, network), after
  // which the communicator is retired and the peers have been told.
  void Wait(Pending& pending);

  // Blocks until every rank has come here; `device` is where the backend wants its tensors.
  void Barrier(at::Device device);

 private:
  template <typename Start>
  Pending StartOperation(at::Tensor tensor, std::string what, Start start);
  void OrderStreams(Pending& pending);
  [[noreturn]] void Fail(Pending& pending, const std::string& reason);
  void ThrowIfRetired() const;

  const Options options_;
  const std::shared_ptr<FailureNotice> notice_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  int in_flight_ = 0;
  bool retired_ = false;
};

}  // namespace ddp

#endif  // DDP_COMM_COMMUNICATOR_H_
