#ifndef DDP_COMM_ABANDONED_BACKENDS_H_
#define DDP_COMM_ABANDONED_BACKENDS_H_

#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
}  // namespace c10d

namespace ddp::internal {

// The backend of a destroyed communicator whose operations are unfinished, with the tensors of
// these operations. The destructor of the backend would block until its operations have ended.
struct AbandonedBackend {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;  // of its unfinished operations
  std::vector<std::shared_ptr<void>> operations;                 // kept alive
  // Ends the operations of the backend with errors, soon. Null: nothing can.
  void (*end_operations)(c10d::Backend& backend) = nullptr;
  // The futures say nothing about the operations: the backend is never freed.
  bool for_good = false;
};

// Keeps a backend until its operations have ended. At the exit of the process they are ended, where
// the backend can do this. Otherwise a thread of the backend would go on while LibTorch destroys
// its global objects, and crash a program that has done its work. Thread: any.
void Abandon(AbandonedBackend backend);

// Frees the backends whose operations have all ended. Blocks for some milliseconds for each.
// Thread: any.
void FreeEndedBackends();

}  // namespace ddp::internal

#endif  // DDP_COMM_ABANDONED_BACKENDS_H_
