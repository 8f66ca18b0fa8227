#include "ddp/comm/backend/nccl_backend.h"

#include <exception>

#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "absl/strings/str_cat.h"
#include "ddp/common/error.h"

namespace ddp::internal {

int VisibleCudaDevices() { return c10::cuda::device_count(); }

c10::intrusive_ptr<c10d::Backend> MakeNcclBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const NcclBackendOptions& options) {
  using Nccl = c10d::ProcessGroupNCCL;
  const int devices = VisibleCudaDevices();
  if (options.device >= devices) {
    throw ConfigurationError(absl::StrCat("rank ", options.rank, " wants CUDA device ",
                                          options.device, ", but this process sees ", devices));
  }
  try {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(options.device));
    auto nccl = Nccl::Options::create();
    nccl->timeout = absl::ToChronoMilliseconds(options.timeout);
    return c10::make_intrusive<Nccl>(store, options.rank, options.size, nccl);
  } catch (const c10::Error& error) {
    throw CommunicationError(
        absl::StrCat("rank ", options.rank, " of ", options.size,
                     ": NCCL could not be set up: ", error.what_without_backtrace()));
  } catch (const std::exception& error) {
    throw CommunicationError(absl::StrCat("rank ", options.rank, " of ", options.size,
                                          ": NCCL could not be set up: ", error.what()));
  }
}

}  // namespace ddp::internal
