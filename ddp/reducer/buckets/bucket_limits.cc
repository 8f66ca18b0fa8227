#include "ddp/reducer/buckets/bucket_limits.h"

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace ddp::internal {
namespace {

constexpr double kMebibyte = 1 << 20;
constexpr double kMaxMebibytes = 1e9;
constexpr double kDefaultBucketCapMb = 25;
constexpr double kDefaultFirstBucketCapMb = 1;

absl::StatusOr<int64_t> LimitBytes(const std::string& name, double mebibytes) {
  if (!(mebibytes > 0) || mebibytes > kMaxMebibytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, "=", mebibytes, " must be above 0, in MiB"));
  }
  return std::max<int64_t>(1, static_cast<int64_t>(mebibytes * kMebibyte));
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> BucketLimits(const BucketCaps& caps) {
  std::vector<int64_t> limits;
  for (const double mebibytes : caps.bucket_cap_mb_list) {
    DDP_ASSIGN_OR_RETURN(limits.emplace_back(), LimitBytes("bucket_cap_mb_list", mebibytes));
  }
  if (!limits.empty()) return limits;
  const double cap = caps.bucket_cap_mb.value_or(kDefaultBucketCapMb);
  const double first = caps.first_bucket_cap_mb.value_or(
      caps.bucket_cap_mb.has_value() ? cap : kDefaultFirstBucketCapMb);
  DDP_ASSIGN_OR_RETURN(limits.emplace_back(), LimitBytes("first_bucket_cap_mb", first));
  DDP_ASSIGN_OR_RETURN(limits.emplace_back(), LimitBytes("bucket_cap_mb", cap));
  return limits;
}

}  // namespace ddp::internal
