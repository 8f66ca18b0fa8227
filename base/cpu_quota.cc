#include "base/cpu_quota.h"

#include <fstream>
#include <limits>

namespace ddp {
namespace {

constexpr double kNone = std::numeric_limits<double>::infinity();

// A quota that is not positive is none.
double Ratio(double quota, double period) {
  return quota > 0 && period > 0 ? quota / period : kNone;
}

}  // namespace

double CpuQuota(const std::string& root) {
  double quota = 0;
  double period = 0;
  if (std::ifstream both(root + "/cpu.max"); both >> quota >> period) return Ratio(quota, period);
  std::ifstream quota_file(root + "/cpu/cpu.cfs_quota_us");
  std::ifstream period_file(root + "/cpu/cpu.cfs_period_us");
  if (quota_file >> quota && period_file >> period) return Ratio(quota, period);
  return kNone;
}

}  // namespace ddp
