#include "ddp/reducer/buckets/bucket_plan.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace ddp::internal {
namespace {

// The bucket of one kind that takes the next parameters.
struct OpenBucket {
  BucketPlan::Bucket bucket;
  int64_t bytes = 0;
  size_t limit = 0;  // index into the limits
};

absl::Status CheckOrder(const std::vector<int>& order, size_t count) {
  std::vector<bool> seen(count, false);
  for (const int index : order) {
    if (index < 0 || static_cast<size_t>(index) >= count || seen[index]) {
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", index, " is out of range or twice in the order"));
    }
    seen[index] = true;
  }
  if (order.size() != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("the order names ", order.size(), " of ", count, " parameters"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BucketPlan> BucketPlan::Assign(const std::vector<Tensor>& tensors,
                                              const std::vector<int64_t>& limits_bytes,
                                              const std::vector<int>& order) {
  DDP_RETURN_IF_ERROR(CheckOrder(order, tensors.size()));
  if (limits_bytes.empty() || *std::min_element(limits_bytes.begin(), limits_bytes.end()) < 1) {
    return absl::InvalidArgumentError("a bucket needs a limit of at least one byte");
  }
  std::vector<Bucket> buckets;
  std::map<int, OpenBucket> open;
  for (const int index : order) {
    if (tensors[index].sparse) {
      buckets.push_back({{index}});
      continue;
    }
    OpenBucket& current = open[tensors[index].kind];
    current.bucket.parameters.push_back(index);
    current.bytes += tensors[index].bytes;
    if (current.bytes < limits_bytes[current.limit]) continue;
    buckets.push_back(std::exchange(current.bucket, {}));
    current.bytes = 0;
    current.limit = std::min(current.limit + 1, limits_bytes.size() - 1);
  }
  for (auto& [kind, current] : open) {
    if (!current.bucket.parameters.empty()) buckets.push_back(std::move(current.bucket));
  }
  return BucketPlan(std::move(buckets));
}

absl::StatusOr<BucketPlan> BucketPlan::AssignReversed(const std::vector<Tensor>& tensors,
                                                      const std::vector<int64_t>& limits_bytes) {
  std::vector<int> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  DDP_ASSIGN_OR_RETURN(BucketPlan plan, Assign(tensors, limits_bytes, order));
  // Kinds close their buckets in any order; the first parameter of a bucket decides.
  std::sort(plan.buckets_.begin(), plan.buckets_.end(), [](const Bucket& a, const Bucket& b) {
    return a.parameters.front() > b.parameters.front();
  });
  return plan;
}

absl::StatusOr<BucketPlan> BucketPlan::FromNames(
    const std::vector<std::vector<std::string>>& buckets,
    const std::vector<std::string>& parameter_names, const std::vector<Tensor>& tensors) {
  std::unordered_map<std::string, int> index_of;
  for (size_t i = 0; i < parameter_names.size(); ++i) {
    index_of[parameter_names[i]] = static_cast<int>(i);
  }
  std::vector<bool> seen(parameter_names.size(), false);
  BucketPlan plan;
  for (const std::vector<std::string>& names : buckets) {
    Bucket& bucket = plan.buckets_.emplace_back();
    for (const std::string& name : names) {
      const auto found = index_of.find(name);
      if (found == index_of.end()) {
        return absl::InvalidArgumentError(absl::StrCat("the model has no parameter ", name));
      }
      if (seen[found->second]) {
        return absl::InvalidArgumentError(absl::StrCat("parameter ", name, " is in two buckets"));
      }
      seen[found->second] = true;
      bucket.parameters.push_back(found->second);
    }
  }
  const auto missing = std::find(seen.begin(), seen.end(), false);
  if (missing != seen.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", parameter_names[missing - seen.begin()], " is in no bucket"));
  }
  DDP_RETURN_IF_ERROR(plan.Validate(tensors));
  return plan;
}

std::vector<int32_t> BucketPlan::Encode() const {
  std::vector<int32_t> words;
  for (const Bucket& bucket : buckets_) {
    words.insert(words.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  const int64_t parameters = static_cast<int64_t>(words.size());
  words.push_back(static_cast<int32_t>(buckets_.size()));
  for (const Bucket& bucket : buckets_) {
    words.push_back(static_cast<int32_t>(bucket.parameters.size()));
  }
  words.resize(EncodedSize(parameters), 0);
  return words;
}

absl::StatusOr<BucketPlan> BucketPlan::Decode(const std::vector<int32_t>& words,
                                              const std::vector<Tensor>& tensors) {
  const int64_t parameters = static_cast<int64_t>(tensors.size());
  if (static_cast<int64_t>(words.size()) != EncodedSize(parameters)) {
    return absl::InvalidArgumentError(absl::StrCat("a plan for ", parameters, " parameters has ",
                                                   EncodedSize(parameters), " words, not ",
                                                   words.size()));
  }
  const int64_t count = words[parameters];
  if (count < 0 || count > parameters) {
    return absl::InvalidArgumentError(
        absl::StrCat("a plan of ", count, " buckets for ", parameters, " parameters"));
  }
  BucketPlan plan;
  int64_t next = 0;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t size = words[parameters + 1 + b];
    if (size < 1 || size > parameters - next) {
      return absl::InvalidArgumentError(absl::StrCat("bucket ", b, " of ", size, " parameters"));
    }
    plan.buckets_.push_back({{words.begin() + next, words.begin() + next + size}});
    next += size;
  }
  DDP_RETURN_IF_ERROR(plan.Validate(tensors));
  return plan;
}

std::vector<std::vector<std::string>> BucketPlan::Names(
    const std::vector<std::string>& parameter_names) const {
  std::vector<std::vector<std::string>> names;
  for (const Bucket& bucket : buckets_) {
    std::vector<std::string>& bucket_names = names.emplace_back();
    for (const int index : bucket.parameters) bucket_names.push_back(parameter_names[index]);
  }
  return names;
}

BucketPlan BucketPlan::Reversed() const {
  BucketPlan reversed = *this;
  std::reverse(reversed.buckets_.begin(), reversed.buckets_.end());
  for (Bucket& bucket : reversed.buckets_) {
    std::reverse(bucket.parameters.begin(), bucket.parameters.end());
  }
  return reversed;
}

std::string BucketPlan::ToString(const std::vector<std::string>& parameter_names) const {
  std::string text;
  int number = 0;
  for (const std::vector<std::string>& names : Names(parameter_names)) {
    absl::StrAppend(&text, "bucket ", number++, ": ", absl::StrJoin(names, ", "), "\n");
  }
  return text;
}

absl::Status BucketPlan::Validate(const std::vector<Tensor>& tensors) const {
  std::vector<int> order;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const std::vector<int>& parameters = buckets_[b].parameters;
    if (parameters.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("bucket ", b, " is empty"));
    }
    order.insert(order.end(), parameters.begin(), parameters.end());
  }
  DDP_RETURN_IF_ERROR(CheckOrder(order, tensors.size()));
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (const int index : buckets_[b].parameters) {
      if (tensors[index].kind != tensors[buckets_[b].parameters.front()].kind) {
        return absl::InvalidArgumentError(
            absl::StrCat("bucket ", b, " mixes parameters of different types or devices"));
      }
      if (tensors[index].sparse && buckets_[b].parameters.size() > 1) {
        return absl::InvalidArgumentError(absl::StrCat(
            "bucket ", b, " holds a parameter with a sparse gradient together with others"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace ddp::internal
