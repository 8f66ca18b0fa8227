#include "base/process/cpu_quota.h"

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

}  // namespace

double CpuQuota(const std::string& root) {
  const ControlGroup group = FindControlGroup("cpu", root);
  double least = kNone;
  for (const std::string& folder : group.folders) {
    least = std::min(least, QuotaOf(group.version, folder));
  }
  return least;
}

}  // namespace ddp
