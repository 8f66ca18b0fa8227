#ifndef DDP_COMM_ABANDONED_BACKENDS_H_
#define DDP_COMM_ABANDONED_BACKENDS_H_

#include <memory>
#include <vector>

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include "base/mutex.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace ddp::internal {

// The backends of destroyed communicators whose operations are unfinished, with the tensors of
// these operations. The destructor of a backend would block until its operations have ended.
//
// At the exit of the process, such operations are ended, where the backend can do this. Otherwise a
// thread of the backend would go on while LibTorch destroys its global objects, and crash a program
// that has done its work.
//
// One object for the process, because the exit of the process has to find it. It is never
// destroyed. Thread-safe.
class AbandonedBackends {
 public:
  struct Entry {
    c10::intrusive_ptr<c10d::Backend> backend;
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;  // of its unfinished operations
    std::vector<std::shared_ptr<void>> operations;                 // kept alive
    // Ends the operations of the backend with errors, soon. Null: nothing can.
    void (*end_operations)(c10d::Backend& backend) = nullptr;
    // The futures say nothing about the operations: the entry is never freed.
    bool for_good = false;
  };

  static AbandonedBackends& Instance();

  void Add(Entry entry);

  // Frees the entries whose operations have all ended. Blocks for some milliseconds for each.
  void Sweep();

  // Ends the operations of all entries, and frees those that have ended within a second. Called at
  // the exit of the process.
  void EndAll();

 private:
  AbandonedBackends() = default;

  Mutex mutex_;
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ddp::internal

#endif  // DDP_COMM_ABANDONED_BACKENDS_H_
