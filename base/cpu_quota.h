#ifndef DDP_BASE_CPU_QUOTA_H_
#define DDP_BASE_CPU_QUOTA_H_

#include <string>

namespace ddp {

// Returns how many cores the control group of this process may use at once, on average: its CPU
// quota over its period, in version 1 or 2 of the cgroup file system below `root`. Infinity when
// there is no quota or the files cannot be read. Quotas of outer groups that the process cannot see
// are unknown.
double CpuQuota(const std::string& root = "/sys/fs/cgroup");

}  // namespace ddp

#endif  // DDP_BASE_CPU_QUOTA_H_
