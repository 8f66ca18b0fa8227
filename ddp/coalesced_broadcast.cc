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

// variable_data() shares the storage and not the version counter.
void Receive(const at::Tensor& flat, const std::vector<at::Tensor>& tensors,
             const std::vector<int>& members) {
  int64_t offset = 0;
  for (const int index : members) {
    const at::Tensor target = tensors[index].variable_data();
    const at::Tensor value = flat.narrow(0, offset, target.numel()).view(target.sizes());
    offset += target.numel();
    if (!at::equal(target, value)) target.copy_(value);
  }
}

}  // namespace

void BroadcastCoalesced(Communicator& communicator, const std::vector<at::Tensor>& tensors,
                        int rank, int root, int64_t chunk_bytes, const std::string& what) {
  if (tensors.empty()) return;
  at::NoGradGuard no_grad;
  const BucketPlan plan = Chunks(tensors, chunk_bytes);
  std::deque<std::pair<Communicator::Pending, const std::vector<int>*>> in_flight;
  const auto finish_oldest = [&] {
    auto [pending, members] = std::move(in_flight.front());
    in_flight.pop_front();
    const at::Tensor flat = pending.tensor;
    communicator.Wait(pending);
    if (rank != root) Receive(flat, tensors, *members);
  };
  for (const BucketPlan::Bucket& chunk : plan.buckets()) {
    std::vector<at::Tensor> parts;
    for (const int index : chunk.parameters) {
      parts.push_back(tensors[index].variable_data().reshape({-1}));
    }
    if (in_flight.size() == kInFlight) finish_oldest();
    in_flight.emplace_back(communicator.Broadcast(at::cat(parts), root, what), &chunk.parameters);
  }
  while (!in_flight.empty()) finish_oldest();
}

}  // namespace ddp
