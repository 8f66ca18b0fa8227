#ifndef DDP_COMM_BACKEND_NCCL_BACKEND_H_
#define DDP_COMM_BACKEND_NCCL_BACKEND_H_

#include <c10/util/intrusive_ptr.h>

#include "absl/time/time.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ddp::internal {

struct NcclBackendOptions {
  int rank = 0;
  int size = 1;
  int device = 0;                              // CUDA device of this rank
  absl::Duration timeout = absl::Minutes(10);  // of one operation
  absl::Duration connect_timeout = absl::Minutes(10);
  bool legacy = false;  // LibTorch's older engine, also where there is a newer one
};

// Returns the number of CUDA devices that this process sees: 0 in a build without --config=cuda.
int VisibleCudaDevices();

// Makes LibTorch's own NCCL backend, bound to `device`, and connects its ranks. Makes `device` the
// current CUDA device. The engine is the one that "nccl" means in PyTorch: from LibTorch 2.15 on
// the newer one (c10d::nccl2), unless `legacy`, or TORCH_DIST_USE_NCCL2=0 in the environment.
// Throws CommunicationError when the backend cannot be made, or the ranks are not connected within
// `connect_timeout`. Throws ConfigurationError when the process does not see `device`, and always
// in a build without --config=cuda.
c10::intrusive_ptr<c10d::Backend> MakeNcclBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const NcclBackendOptions& options);

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_NCCL_BACKEND_H_
