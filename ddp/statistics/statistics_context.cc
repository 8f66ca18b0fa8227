#include "ddp/statistics/statistics_context.h"

#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/reducer/buckets/gradient_context.h"

namespace ddp::internal {
namespace {

constexpr char kHeader[] = "the size of a sum of a SyncBatchNorm";
constexpr char kSum[] = "the sum of a SyncBatchNorm under a Join";

int64_t BroadcastSize(int64_t mine, int source, ModelGroup& group) {
  const at::Tensor header = at::full({1}, mine, at::TensorOptions(at::kLong)).to(group.device());
  Communicator::Pending pending = group.communicator().Broadcast(header, source, kHeader);
  group.communicator().Wait(pending);
  return group.communicator().ToHost(header, kHeader).item<int64_t>();
}

void AllReduce(const at::Tensor& tensor, const char* what, ModelGroup& group) {
  Communicator::Pending pending = group.communicator().AllReduce(tensor, what);
  group.communicator().Wait(pending);
}

struct State {
  std::shared_ptr<StatisticsContext> context;
  std::vector<std::vector<StatisticsRanks>*> recordings;
  StatisticsReplay* replay = nullptr;
};

State& OfThread() {
  static thread_local State state;
  return state;
}

// The pool threads of such a backward must not wait for other ranks, and the reducer has its
// collectives on another thread.
void RefuseDistributedContext() {
  if (GradientContext::OfHook() == nullptr) return;
  throw ConfigurationError(
      "the backward of a SyncBatchNorm is not supported in a distributed autograd context: use a "
      "plain backward, or a BatchNorm");
}

// A failure of this rank is reported to the groups that the wrapper knows, and to no others.
void CheckIsKnown(const ModelGroup& own, const StatisticsContext& context) {
  for (const auto& group : context.own_groups) {
    if (group->SameAs(own)) return;
  }
  throw ConfigurationError(
      "a SyncBatchNorm has got its process group after the DistributedDataParallel was "
      "constructed: "
      "give layers their groups first, then construct the DistributedDataParallel");
}

}  // namespace

// ---- What this thread runs.

StatisticsScope::StatisticsScope(std::shared_ptr<StatisticsContext> context)
    : before_(std::exchange(OfThread().context, std::move(context))) {}

StatisticsScope::~StatisticsScope() { OfThread().context = std::move(before_); }

std::shared_ptr<StatisticsContext> StatisticsScope::Current() { return OfThread().context; }

StatisticsRecording::StatisticsRecording(std::vector<StatisticsRanks>* ranks) {
  OfThread().recordings.push_back(ranks);
}

StatisticsRecording::~StatisticsRecording() { OfThread().recordings.pop_back(); }

StatisticsReplay::StatisticsReplay(const std::vector<StatisticsRanks>& ranks,
                                   std::vector<at::Tensor>* markers)
    : ranks_(ranks),
      markers_(markers),
      before_(std::exchange(OfThread().replay, this)),
      recordings_before_(std::exchange(OfThread().recordings, {})) {}

StatisticsReplay::~StatisticsReplay() {
  OfThread().replay = before_;
  OfThread().recordings = std::move(recordings_before_);
}

StatisticsReplay* StatisticsReplay::Current() { return OfThread().replay; }

const StatisticsRanks& StatisticsReplay::Next() {
  if (next_ < ranks_.size()) return ranks_[next_++];
  throw ConfigurationError(
      "a checkpointed segment runs a SyncBatchNorm in training that it did not run in its forward: "
      "it must do the same both times");
}

// ---- The ranks of a layer.

StatisticsRanks::StatisticsRanks(std::shared_ptr<ModelGroup> group,
                                 std::shared_ptr<StatisticsContext> context)
    : group_(std::move(group)), context_(std::move(context)), incarnation_(group_->incarnation()) {}

StatisticsRanks StatisticsRanks::OfForward(const std::shared_ptr<ModelGroup>& own) {
  StatisticsReplay* const replay = StatisticsReplay::Current();
  StatisticsRanks ranks = replay != nullptr ? replay->Next() : Find(own);
  for (std::vector<StatisticsRanks>* const recording : OfThread().recordings) {
    recording->push_back(ranks);
  }
  return ranks;
}

StatisticsRanks StatisticsRanks::Find(const std::shared_ptr<ModelGroup>& own) {
  const std::shared_ptr<StatisticsContext> context = StatisticsScope::Current();
  if (context != nullptr && !context->has_layers) {
    throw ConfigurationError(
        "a SyncBatchNorm runs under a DistributedDataParallel that was constructed before the "
        "layer: call convert_sync_batchnorm() first, then construct the DistributedDataParallel");
  }
  if (own != nullptr && (context == nullptr || !own->SameAs(*context->group))) {
    if (context != nullptr && context->announce) ThrowOwnGroupUnderJoin();
    if (context != nullptr) CheckIsKnown(*own, *context);
    own->ensure_usable();
    return {own, nullptr};
  }
  if (context == nullptr) {
    throw ConfigurationError(
        "a SyncBatchNorm in training has no process group: run it by the forward of a "
        "DistributedDataParallel, or give the group to its constructor or to "
        "convert_sync_batchnorm()");
  }
  return {context->group, context};
}

bool StatisticsRanks::Announced() const {
  return context_ != nullptr && context_->announce && group_->SameAs(*context_->group);
}

at::Tensor StatisticsRanks::Sum(const at::Tensor& part, const char* what) const {
  RefuseDistributedContext();
  if (group_->incarnation() != incarnation_) {
    throw ReductionError(absl::StrCat(
        "rank ", group_->rank(),
        ": the process group was renewed between the forward and the backward of a SyncBatchNorm: "
        "run the forward again"));
  }
  const at::Tensor sum = part.to(group_->device());
  const bool announced = Announced();
  if (announced) {
    const auto announce = context_->announce;  // a call may end the Join and unset it
    CompareSize(sum.numel(), announce());
  }
  // A joined rank knows the number of elements and not the shape.
  AllReduce(sum.view({-1}), announced ? kSum : what, *group_);
  return sum.to(part.device());
}

// A joined rank takes the size of `source`, so a rank with another size must not start its sum.
void StatisticsRanks::CompareSize(int64_t size, int source) const {
  const int64_t theirs = BroadcastSize(size, source, *group_);
  if (theirs == size) return;
  const std::string message = absl::StrCat(
      "rank ", group_->rank(), ": a SyncBatchNorm adds up ", size, " numbers, and that of rank ",
      source, " adds up ", theirs, ": all ranks must run the same layers in the same order");
  group_->report_failure(message);
  throw CommunicationError(message);
}

void ThrowOwnGroupUnderJoin() {
  throw ConfigurationError(
      "a SyncBatchNorm has a process group of its own, which joined ranks do not know: under a "
      "Join, leave its group unset, or give it the model's");
}

void ShadowSum(ModelGroup& group, int source) {
  const int64_t size = BroadcastSize(0, source, group);
  AllReduce(at::zeros({size}, at::TensorOptions(at::kDouble).device(group.device())), kSum, group);
}

}  // namespace ddp::internal
