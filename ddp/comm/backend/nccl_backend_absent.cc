// Implements nccl_backend.h in a build without --config=cuda.
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "ddp/comm/backend/nccl_backend.h"
#include "ddp/common/error.h"

namespace ddp::internal {

int VisibleCudaDevices() { return 0; }

c10::intrusive_ptr<c10d::Backend> MakeNcclBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const NcclBackendOptions& options) {
  throw ConfigurationError(
      "the NCCL backend is not in this program: build it with --config=cuda, or choose gloo");
}

}  // namespace ddp::internal
