#ifndef DDP_BASE_PROCESS_CPU_QUOTA_H_
#define DDP_BASE_PROCESS_CPU_QUOTA_H_

#include <string>

namespace ddp {

// Returns how many cores this process may use at once, on average: the smallest CPU quota, over its
// period, of its control group and of the outer groups that it can see. Infinity when there is no
// quota or the files cannot be read. `root` is as in FindControlGroup().
double CpuQuota(const std::string& root = "");

// Returns how many cores the calling thread may use: those of its affinity mask that the CPU quota
// allows, rounded down (two threads on 1.5 cores would both stand still for a quarter of the time);
// at least 1. `root`: of the quota.
int UsableCores(const std::string& root = "");

}  // namespace ddp

#endif  // DDP_BASE_PROCESS_CPU_QUOTA_H_
