#include "ddp/comm/backend/nccl_backend.h"

#include <exception>
#include <string>

#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#if __has_include(<torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>)
#define DDP_HAS_NCCL2
#include <torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>
#endif

#include "absl/strings/str_cat.h"
#include "base/environment.h"
#include "ddp/comm/backend/eager_connect.h"
#include "ddp/common/error.h"

namespace ddp::internal {

namespace {

c10::intrusive_ptr<c10d::Backend> MakeEngine(const c10::intrusive_ptr<c10d::Store>& store,
                                             const NcclBackendOptions& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = absl::ToChronoMilliseconds(options.timeout);
#ifdef DDP_HAS_NCCL2
  if (!options.legacy && EnvironmentVariable("TORCH_DIST_USE_NCCL2") != "0") {
    return c10::make_intrusive<c10d::nccl2::ProcessGroupNCCL>(store, options.rank, options.size,
                                                              nccl);
  }
#endif
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, options.rank, options.size, nccl);
}

}  // namespace

int VisibleCudaDevices() { return c10::cuda::device_count(); }

c10::intrusive_ptr<c10d::Backend> MakeNcclBackend(const c10::intrusive_ptr<c10d::Store>& store,
                                                  const NcclBackendOptions& options) {
  const int devices = VisibleCudaDevices();
  if (options.device >= devices) {
    throw ConfigurationError(absl::StrCat("rank ", options.rank, " wants CUDA device ",
                                          options.device, ", but this process sees ", devices));
  }
  const std::string about =
      absl::StrCat("rank ", options.rank, " of ", options.size, ": NCCL could not be set up");
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(options.device));
    backend = MakeEngine(store, options);
  } catch (const std::exception& error) {
    throw CommunicationError(absl::StrCat(about, ": ", MessageOf(error)));
  }
  ConnectEagerly(backend, {at::kCUDA, static_cast<at::DeviceIndex>(options.device)},
                 options.connect_timeout, about);
  return backend;
}

}  // namespace ddp::internal
