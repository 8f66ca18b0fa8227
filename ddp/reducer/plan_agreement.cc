#include "ddp/reducer/plan_agreement.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/reducer/reducer_group.h"

namespace ddp::internal {
namespace {

template <typename Word = int32_t>
std::vector<Word> ToVector(const at::Tensor& words, const OperationName& what,
                           ReducerGroup& group) {
  const at::Tensor local = group.communicator().ToHost(words, what);
  const Word* first = local.const_data_ptr<Word>();
  return {first, first + local.numel()};
}

// Returns the shortest of a few all-reduces: the others were disturbed.
CollectiveSample SampleAllReduce(int64_t bytes, ReducerGroup& group) {
  constexpr int kRounds = 4;  // the first one may set up connections
  const at::Tensor tensor =
      at::zeros({bytes / 4}, at::TensorOptions().dtype(at::kFloat).device(group.device()));
  CollectiveSample sample{.bytes = bytes};
  for (int round = 0; round < kRounds; ++round) {
    const int64_t start = MonotonicNanoseconds();
    Communicator::Pending pending =
        group.communicator().AllReduce(tensor, {"the measurement of an all-reduce", round});
    group.communicator().Wait(pending);
    if (!tensor.is_cpu()) tensor.narrow(0, 0, 1).to(at::kCPU);  // waits for the GPU
    const auto ns = static_cast<double>(MonotonicNanoseconds() - start);
    if (round <= 1 || ns < sample.ns) sample.ns = ns;
  }
  return sample;
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
PlanComparison ComparePlans(const BucketPlan& plan, const PassRecord& record, ReducerGroup& group) {
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
                         int source, ReducerGroup& group) {
  std::vector<int32_t> words(BucketPlan::EncodedSize(static_cast<int64_t>(tensors.size())), 0);
  if (group.rank() == source) words = plan.Encode();
  const at::Tensor message = at::tensor(words, at::kInt).to(group.device());
  Communicator::Pending pending =
      group.communicator().Broadcast(message, source, {"a broadcast from rank", source});
  group.communicator().Wait(pending);
  return PlanOrThrow(BucketPlan::Decode(ToVector(message, pending.what, group), tensors));
}

CollectiveCost MeasureAllReduce(ReducerGroup& group) {
  const CollectiveSample small = SampleAllReduce(int64_t{4} << 10, group);
  const CollectiveSample large = SampleAllReduce(int64_t{4} << 20, group);
  return FitCost(small, large);
}

BucketChoice BroadcastChoice(const BucketChoice& choice, int source, ReducerGroup& group) {
  std::vector<int64_t> words(BucketChoice::kWords, 0);
  if (group.rank() == source) words = choice.Encode();
  const at::Tensor message = at::tensor(words, at::kLong).to(group.device());
  Communicator::Pending pending =
      group.communicator().Broadcast(message, source, {"a broadcast from rank", source});
  group.communicator().Wait(pending);
  const absl::StatusOr<BucketChoice> decoded =
      BucketChoice::Decode(ToVector<int64_t>(message, pending.what, group));
  if (!decoded.ok()) throw ConfigurationError(std::string(decoded.status().message()));
  return *decoded;
}

}  // namespace ddp::internal
