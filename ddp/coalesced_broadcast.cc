#include "ddp/coalesced_broadcast.h"

#include <deque>
#include <map>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "ddp/bucket_plan.h"
#include "ddp/comm/communicator.h"
#include "ddp/error.h"

namespace ddp {
namespace {

constexpr size_t kInFlight = 2;

BucketPlan Chunks(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes) {
  std::map<std::pair<std::string, at::ScalarType>, int> kinds;
  std::vector<BucketPlan::Tensor> descriptions;
  std::vector<int> order;
  for (const at::Tensor& tensor : tensors) {
    const auto kind = kinds.try_emplace({tensor.device().str(), tensor.scalar_type()},
                                        static_cast<int>(kinds.size()));
    descriptions.push_back({.bytes = tensor.numel() * static_cast<int64_t>(tensor.element_size()),
                            .kind = kind.first->second});
    order.push_back(static_cast<int>(order.size()));
  }
  absl::StatusOr<BucketPlan> plan = BucketPlan::Assign(descriptions, {chunk_bytes}, order);
  if (!plan.ok()) throw ConfigurationError(std::string(plan.status().message()));
  return *std::move(plan);
}

void Receive(const at::Tensor& flat, const std::vector<at::Tensor>& tensors,
             const std::vector<int>& members, bool fresh_memory) {
  int64_t offset = 0;
  for (const int index : members) {
    at::Tensor tensor = tensors[index];
    // Shares the memory and not the version counter.
    const at::Tensor target = tensor.variable_data();
    const at::Tensor value = flat.narrow(0, offset, target.numel()).view(target.sizes());
    offset += target.numel();
    if (at::equal(target, value)) continue;
    if (fresh_memory) {
      tensor.set_data(at::empty_like(target).copy_(value));
    } else {
      target.copy_(value);
    }
  }
}

}  // namespace

void BroadcastCoalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                        const CoalescedBroadcastOptions& options) {
  if (tensors.empty()) return;
  at::NoGradGuard no_grad;
  const BucketPlan plan = Chunks(tensors, options.chunk_bytes);
  std::deque<std::pair<Communicator::Pending, const std::vector<int>*>> in_flight;
  const auto finish_oldest = [&] {
    auto [pending, members] = std::move(in_flight.front());
    in_flight.pop_front();
    const at::Tensor flat = pending.tensor;
    communicator.Wait(pending);
    if (options.rank != options.root) Receive(flat, tensors, *members, options.fresh_memory);
  };
  for (const BucketPlan::Bucket& chunk : plan.buckets()) {
    std::vector<at::Tensor> parts;
    for (const int index : chunk.parameters) {
      parts.push_back(tensors[index].variable_data().reshape({-1}));
    }
    if (in_flight.size() == kInFlight) finish_oldest();
    in_flight.emplace_back(communicator.Broadcast(at::cat(parts), options.root, {options.what}),
                           &chunk.parameters);
  }
  while (!in_flight.empty()) finish_oldest();
}

}  // namespace ddp
