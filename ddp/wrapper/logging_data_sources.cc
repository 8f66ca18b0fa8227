#include "ddp/wrapper/logging_data_sources.h"

#include <initializer_list>

#include "ddp/reducer/iteration_timer.h"

namespace ddp::internal {
namespace {

constexpr char kUnset[] = "N/A";

// Returns the value of the first variable in `names` that is set.
std::string Read(const VariableGetter& get, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (std::optional<std::string> value = get(name)) return *std::move(value);
  }
  return kUnset;
}

}  // namespace

void FillEnvironment(DDPLoggingData& data, const VariableGetter& get) {
  data.master_addr = Read(get, {"MASTER_ADDR"});
  data.master_port = Read(get, {"MASTER_PORT"});
  data.cuda_visible_devices = Read(get, {"CUDA_VISIBLE_DEVICES"});
  data.torch_distributed_debug = Read(get, {"TORCH_DISTRIBUTED_DEBUG"});
  if (data.backend_name == "nccl") {
    data.nccl_socket_ifname = Read(get, {"NCCL_SOCKET_IFNAME"});
    data.nccl_blocking_wait = Read(get, {"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"});
    data.nccl_async_error_handling =
        Read(get, {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"});
    data.nccl_debug = Read(get, {"NCCL_DEBUG"});
    data.nccl_nthreads = Read(get, {"NCCL_NTHREADS"});
    data.nccl_ib_timeout = Read(get, {"NCCL_IB_TIMEOUT"});
  } else if (data.backend_name == "gloo") {
    data.gloo_socket_ifname = Read(get, {"GLOO_SOCKET_IFNAME"});
    data.gloo_device_transport = Read(get, {"GLOO_DEVICE_TRANSPORT"});
  }
}

void FillTimes(DDPLoggingData& data, const IterationTimer& timer) {
  const IterationTimer::Durations& last = timer.last();
  data.forward_compute_time = last.forward_compute;
  data.backward_compute_time = last.backward_compute;
  data.backward_comm_time = last.backward_comm;
  data.backward_compute_comm_overlap_time = last.backward_compute_comm_overlap;
  const IterationTimer::Durations average = timer.average();
  data.avg_forward_compute_time = average.forward_compute;
  data.avg_backward_compute_time = average.backward_compute;
  data.avg_backward_comm_time = average.backward_comm;
  data.avg_backward_compute_comm_overlap_time = average.backward_compute_comm_overlap;
  const IterationTimer::Stamps& stamps = timer.stamps();
  data.forward_compute_time_start = stamps.forward_compute_start;
  data.backward_compute_time_start = stamps.backward_compute_start;
  data.backward_comm_time_start = stamps.backward_comm_start;
  data.backward_compute_time_end = stamps.backward_compute_end;
  data.backward_comm_time_end = stamps.backward_comm_end;
  data.overlap_ratio = timer.overlap_ratio();
}

}  // namespace ddp::internal
