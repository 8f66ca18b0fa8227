#ifndef DDP_LAUNCHER_FLAGS_HOST_RESOURCES_H_
#define DDP_LAUNCHER_FLAGS_HOST_RESOURCES_H_

#include <optional>
#include <string>

namespace ddp::launcher {

// CPUs and GPUs of this host that workers can use, and what else ddprun's defaults depend on.
struct HostResources {
  int cpus = 1;  // CPUs that this process may run on, and whose time its CPU quota allows
  int gpus = 0;  // GPUs that a worker would see
  // Number of devices that CUDA_VISIBLE_DEVICES names, whether they exist or not; nullopt when it
  // is unset.
  std::optional<int> named_devices = {};
  bool is_kubernetes_pod = false;
};

// Reads the resources of this host: CPUs from this process's affinity mask and CPU quota (rounded
// down, at least 1), GPUs from /dev/nvidia<number>, narrowed by CUDA_VISIBLE_DEVICES, a pod from
// KUBERNETES_SERVICE_HOST. Calls no driver, so it takes microseconds. Reads /proc, /sys and /dev
// below `root`.
HostResources ReadHostResources(const std::string& root = "");

// Returns how many of `devices` GPUs a program sees under CUDA_VISIBLE_DEVICES; all when it is
// unset. As in CUDA, the list ends at the first number that does not exist. Names (GPU-...,
// MIG-...) count as one each, whether they exist or not.
int CountVisibleGpus(int devices, const std::optional<std::string>& cuda_visible_devices);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_FLAGS_HOST_RESOURCES_H_
