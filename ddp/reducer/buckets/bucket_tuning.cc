#include "ddp/reducer/buckets/bucket_tuning.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace ddp::internal {
namespace {

constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr double kDefaultFirstMb = 1;
constexpr double kDefaultMb = 25;

// Other limits replace the default ones for a gain of this part of the time after the last
// gradient, and of this part of the whole. Smaller gains are within the noise of the samples.
constexpr double kLeastGainOfTail = 0.1;
constexpr double kLeastGainOfAll = 0.001;

constexpr double kThousandths = 1e3;

BucketChoice ChoiceOf(double first_mb, double mb, bool last_is_small) {
  return {.first_limit_bytes = static_cast<int64_t>(first_mb * kMebibyte),
          .limit_bytes = static_cast<int64_t>(mb * kMebibyte),
          .last_is_small = last_is_small};
}

std::vector<BucketChoice> Candidates() {
  std::vector<BucketChoice> candidates;
  for (const double mb : {1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0}) {
    for (const double first_mb : {0.25, 1.0, 4.0}) {
      if (first_mb > mb) continue;
      candidates.push_back(ChoiceOf(first_mb, mb, false));
      candidates.push_back(ChoiceOf(first_mb, mb, true));
    }
    candidates.push_back(ChoiceOf(mb, mb, false));
  }
  return candidates;
}

}  // namespace

CollectiveCost FitCost(const CollectiveSample& small, const CollectiveSample& large) {
  const double bytes = static_cast<double>(large.bytes - small.bytes);
  const double ns_per_byte = std::max(0.0, (large.ns - small.ns) / bytes);
  const double fixed = small.ns - ns_per_byte * static_cast<double>(small.bytes);
  return {.fixed_ns = std::max(0.0, fixed), .ns_per_byte = ns_per_byte};
}

std::vector<int64_t> BucketChoice::Encode() const {
  return {first_limit_bytes,
          limit_bytes,
          last_is_small ? 1 : 0,
          std::llround(cost.fixed_ns * kThousandths),
          std::llround(cost.ns_per_byte * kThousandths),
          std::llround(end_ns * kThousandths),
          std::llround(default_end_ns * kThousandths)};
}

absl::StatusOr<BucketChoice> BucketChoice::Decode(const std::vector<int64_t>& words) {
  if (words.size() != kWords || words[0] < 1 || words[1] < 1) {
    return absl::InvalidArgumentError("the bucket sizes of another rank are no sizes");
  }
  return BucketChoice{
      .first_limit_bytes = words[0],
      .limit_bytes = words[1],
      .last_is_small = words[2] != 0,
      .cost = {.fixed_ns = static_cast<double>(words[3]) / kThousandths,
               .ns_per_byte = static_cast<double>(words[4]) / kThousandths},
      .end_ns = static_cast<double>(words[5]) / kThousandths,
      .default_end_ns = static_cast<double>(words[6]) / kThousandths,
  };
}

std::string BucketChoice::ToString() const {
  const auto mib = [](int64_t bytes) {
    return absl::StrFormat("%g MiB", static_cast<double>(bytes) / kMebibyte);
  };
  return absl::StrCat(
      last_is_small ? "the last bucket " : "the first bucket ", mib(first_limit_bytes),
      ", the others ", mib(limit_bytes),
      absl::StrFormat(": an all-reduce takes %.0f us and %.3f ns per byte, so the reduction ends "
                      "%.3f ms after the first gradient (with the default sizes %.3f ms)",
                      cost.fixed_ns / 1e3, cost.ns_per_byte, end_ns / 1e6, default_end_ns / 1e6));
}

absl::StatusOr<BucketPlan> PlanOf(const BucketChoice& choice,
                                  const std::vector<BucketPlan::Tensor>& tensors,
                                  std::vector<int> order) {
  if (choice.last_is_small) std::reverse(order.begin(), order.end());
  DDP_ASSIGN_OR_RETURN(BucketPlan plan, BucketPlan::Assign(tensors, choice.limits_bytes(), order));
  return choice.last_is_small ? plan.Reversed() : std::move(plan);
}

double SimulateEnd(const BucketPlan& plan, const std::vector<BucketPlan::Tensor>& tensors,
                   const std::vector<double>& ready_ns, const CollectiveCost& cost) {
  double end = 0;
  for (const BucketPlan::Bucket& bucket : plan.buckets()) {
    double bytes = 0;
    for (const int parameter : bucket.parameters) {
      end = std::max(end, ready_ns[parameter]);
      bytes += static_cast<double>(tensors[parameter].bytes);
    }
    end += cost.fixed_ns + bytes * cost.ns_per_byte;
  }
  return end;
}

absl::StatusOr<BucketChoice> ChooseBuckets(const std::vector<BucketPlan::Tensor>& tensors,
                                           const std::vector<int>& order,
                                           const std::vector<double>& ready_ns,
                                           const CollectiveCost& cost) {
  const auto simulate = [&](BucketChoice& choice) -> absl::StatusOr<size_t> {
    DDP_ASSIGN_OR_RETURN(const BucketPlan plan, PlanOf(choice, tensors, order));
    choice.cost = cost;
    choice.end_ns = SimulateEnd(plan, tensors, ready_ns, cost);
    return plan.buckets().size();
  };
  BucketChoice standard = ChoiceOf(kDefaultFirstMb, kDefaultMb, false);
  DDP_ASSIGN_OR_RETURN(size_t buckets, simulate(standard));
  standard.default_end_ns = standard.end_ns;
  BucketChoice best = standard;
  for (BucketChoice& candidate : Candidates()) {
    DDP_ASSIGN_OR_RETURN(const size_t count, simulate(candidate));
    candidate.default_end_ns = standard.end_ns;
    if (candidate.end_ns > best.end_ns) continue;
    if (candidate.end_ns == best.end_ns && count >= buckets) continue;
    best = candidate;
    buckets = count;
  }
  const double last_ready = *std::max_element(ready_ns.begin(), ready_ns.end());
  const double least_gain = std::max(kLeastGainOfTail * (standard.end_ns - last_ready),
                                     kLeastGainOfAll * standard.end_ns);
  return standard.end_ns - best.end_ns >= least_gain ? best : standard;
}

}  // namespace ddp::internal
