#include "ddp/reducer/plan_agreement.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/process_group/model_group.h"

namespace ddp::internal {
namespace {

std::vector<int32_t> ToVector(const at::Tensor& words, const OperationName& what,
                              ModelGroup& group) {
  const at::Tensor local = group.communicator().ToHost(words, what);
  const int32_t* first = local.const_data_ptr<int32_t>();
  return {first, first + local.numel()};
}

}  // namespace

std::vector<BucketPlan::Tensor> DescribeTensors(const std::vector<at::Tensor>& parameters,
                                                const std::vector<bool>& sparse) {
  std::map<std::pair<std::string, at::ScalarType>, int> kinds;
  std::vector<BucketPlan::Tensor> descriptions;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i];
    const auto kind = kinds.try_emplace({tensor.device().str(), tensor.scalar_type()},
                                        static_cast<int>(kinds.size()));
    descriptions.push_back({.bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size()),
                            .kind = kind.first->second,
                            .sparse = sparse[i]});
  }
  return descriptions;
}

BucketPlan PlanOrThrow(absl::StatusOr<BucketPlan> plan) {
  if (plan.ok()) return *std::move(plan);
  throw ConfigurationError(
      absl::StrCat("the gradient buckets: ", std::string(plan.status().message())));
}

// The minimum over all ranks of every number, and of its negative, equals this rank's own when all
// ranks have the same.
PlanComparison ComparePlans(const BucketPlan& plan, const PassRecord& record, ModelGroup& group) {
  std::vector<int32_t> words = plan.Encode();
  words.push_back(record.rebuilt ? 1 : 0);
  const auto of_plan = static_cast<int64_t>(words.size());
  words.push_back(static_cast<int32_t>(record.passes));
  const auto count = static_cast<int64_t>(words.size());
  for (int64_t i = 0; i < count; ++i) words.push_back(-words[i]);
  words.push_back(record.rebuild_requested ? 0 : 1);
  words.push_back(-static_cast<int32_t>(record.doubt));
  const at::Tensor least = at::tensor(words, at::kInt).to(group.device());
  Communicator::Pending pending = group.communicator().AllReduceMin(
      least, {"the agreement on gradient buckets after a failure"});
  group.communicator().Wait(pending);
  const std::vector<int32_t> found = ToVector(least, pending.what, group);
  const auto equal = [&](int64_t begin, int64_t end) {
    return std::equal(words.begin() + begin, words.begin() + end, found.begin() + begin);
  };
  return {.equal = equal(0, of_plan) && equal(count, count + of_plan),
          .rebuild_requested = found[2 * count] == 0,
          .equal_passes = equal(of_plan, count) && equal(count + of_plan, 2 * count),
          .doubt = static_cast<PassRecord::Doubt>(-found.back())};
}

BucketPlan BroadcastPlan(const BucketPlan& plan, const std::vector<BucketPlan::Tensor>& tensors,
                         int source, ModelGroup& group) {
  std::vector<int32_t> words(BucketPlan::EncodedSize(static_cast<int64_t>(tensors.size())), 0);
  if (group.rank() == source) words = plan.Encode();
  const at::Tensor message = at::tensor(words, at::kInt).to(group.device());
  Communicator::Pending pending =
      group.communicator().Broadcast(message, source, {"a broadcast from rank", source});
  group.communicator().Wait(pending);
  return PlanOrThrow(BucketPlan::Decode(ToVector(message, pending.what, group), tensors));
}

}  // namespace ddp::internal
