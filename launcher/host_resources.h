#ifndef DDP_LAUNCHER_HOST_RESOURCES_H_
#define DDP_LAUNCHER_HOST_RESOURCES_H_

#include <optional>
#include <string>

namespace ddp::launcher {

// What this host has to run workers on.
struct HostResources {
  int cpus = 1;  // that this process may run on
  int gpus = 0;  // that a worker would see
  // How many devices CUDA_VISIBLE_DEVICES names, whether they exist or not; unset: it is not set.
  std::optional<int> named_devices = {};
};

// CPUs from this process's affinity mask; GPUs from /dev/nvidia<number>, narrowed by
// CUDA_VISIBLE_DEVICES. Touches no driver, so it takes microseconds.
HostResources ReadHostResources();

// How many of `devices` GPUs CUDA_VISIBLE_DEVICES lets a program see: numbers count until the
// first one that does not exist, as in CUDA; names (GPU-..., MIG-...) count one each. Unset: all.
int CountVisibleGpus(int devices, const std::optional<std::string>& cuda_visible_devices);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_HOST_RESOURCES_H_
