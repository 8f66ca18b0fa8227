#ifndef DDP_COMM_SHARED_MEMORY_SHARED_MEMORY_BACKEND_H_
#define DDP_COMM_SHARED_MEMORY_SHARED_MEMORY_BACKEND_H_

#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "ddp/comm/backend/backend_traits.h"
#include "ddp/comm/shared_memory/collective_engine.h"

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace ddp::internal {

class HostGroup;

struct SharedMemoryOptions {
  int rank = 0;  // among the ranks of this host
  int size = 1;
  absl::Duration timeout = absl::Minutes(30);          // of one operation
  absl::Duration connect_timeout = absl::Minutes(30);  // for the last rank to come
};

inline constexpr char kSharedMemoryName[] = "shm";

// Makes a c10d backend for the ranks of one host, which all call this at the same time with the
// same `store`. Blocks until all have come. See CollectiveEngine for how it works, and HostGroup
// for what happens when a rank dies.
//
// Operations. All of c10d's collectives and messages, on CPU tensors of every type. Strides are
// free; a tensor that is not contiguous costs a copy. An all-reduce also takes sparse (COO)
// tensors. Average: the sum, divided by the number of ranks; floating and complex types only. Bool:
// sum and max are "or", product and min are "and". Bitwise operations: integers and bool.
//
// Works. Every operation is asynchronous. Work::wait() does the work on the waiting thread. A
// future completes without a wait as well. abort() fails the operations of all ranks.
//
// Memory. allocateTensor() returns memory that all ranks see; collectives use it without a copy.
//
// Errors: kDeadlineExceeded: a rank has not come. Others: the ranks cannot share memory; the same
// on all ranks. Throws what the store throws.
absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> MakeSharedMemoryBackend(
    const c10::intrusive_ptr<c10d::Store>& store, const SharedMemoryOptions& options);

// Returns the keys that MakeSharedMemoryBackend() leaves in its store.
std::vector<std::string> SharedMemoryKeys();

// Returns true when `backend` was made here.
bool IsSharedMemory(const c10d::Backend& backend);

// Returns the group of a backend that was made here. The backend's destructor leaves the group.
std::shared_ptr<HostGroup> HostGroupOf(c10d::Backend& backend);

// Starts an operation with a protocol of its own on a backend that was made here.
c10::intrusive_ptr<c10d::Work> StartAside(c10d::Backend& backend, CollectiveEngine::Aside aside);

// Sets the functions of `traits` for a backend that was made here.
void AddSharedMemoryTraits(BackendTraits& traits);

}  // namespace ddp::internal

#endif  // DDP_COMM_SHARED_MEMORY_SHARED_MEMORY_BACKEND_H_
