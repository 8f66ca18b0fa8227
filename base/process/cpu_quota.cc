#include "base/process/cpu_quota.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "base/process/control_group.h"

namespace ddp {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

// A quota that is not positive is none.
double Ratio(double quota, double period) {
  return quota > 0 && period > 0 ? quota / period : kNone;
}

double QuotaOf(int version, const std::string& folder) {
  double quota = 0;
  double period = 0;
  if (version == 2) {
    std::ifstream both(folder + "/cpu.max");
    return both >> quota >> period ? Ratio(quota, period) : kNone;
  }
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us");
  std::ifstream period_file(folder + "/cpu.cfs_period_us");
  return quota_file >> quota && period_file >> period ? Ratio(quota, period) : kNone;
}

int CoresOfMask() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (::sched_getaffinity(0, sizeof mask, &mask) == 0) return CPU_COUNT(&mask);
  // There are more CPUs than a cpu_set_t holds.
  return static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace

double CpuQuota(const std::string& root) {
  const ControlGroup group = FindControlGroup("cpu", root);
  double least = kNone;
  for (const std::string& folder : group.folders) {
    least = std::min(least, QuotaOf(group.version, folder));
  }
  return least;
}

int UsableCores(const std::string& root) {
  return std::max(1, static_cast<int>(std::min<double>(CoresOfMask(), CpuQuota(root))));
}

}  // namespace ddp
