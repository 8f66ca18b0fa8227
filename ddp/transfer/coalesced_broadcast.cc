#include "ddp/transfer/coalesced_broadcast.h"

#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include "absl/strings/str_cat.h"
#include "ddp/comm/communicator.h"
#include "ddp/common/error.h"
#include "ddp/common/name_list.h"
#include "ddp/reducer/buckets/bucket_plan.h"

namespace ddp::internal {
namespace {

constexpr size_t kInFlight = 2;
constexpr size_t kNamesInMessage = 4;

int64_t Bytes(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// Returns the bytes in one dimension. Shares a contiguous tensor's memory, never its version.
at::Tensor AsBytes(const at::Tensor& tensor) {
  return tensor.variable_data().contiguous().view({-1}).view(at::kByte);
}

// Assigns tensors to messages of one type each, so that a tensor is aligned to its element size.
BucketPlan Chunks(const std::vector<at::Tensor>& tensors, int64_t chunk_bytes) {
  std::map<std::pair<std::string, at::ScalarType>, int> kinds;
  std::vector<BucketPlan::Tensor> descriptions;
  std::vector<int> order;
  for (const at::Tensor& tensor : tensors) {
    const auto kind = kinds.try_emplace({tensor.device().str(), tensor.scalar_type()},
                                        static_cast<int>(kinds.size()));
    descriptions.push_back({.bytes = Bytes(tensor), .kind = kind.first->second});
    order.push_back(static_cast<int>(order.size()));
  }
  absl::StatusOr<BucketPlan> plan = BucketPlan::Assign(descriptions, {chunk_bytes}, order);
  if (!plan.ok()) throw ConfigurationError(std::string(plan.status().message()));
  return *std::move(plan);
}

void CheckDense(const at::Tensor& tensor, const std::string& name,
                const CoalescedBroadcastOptions& options) {
  if (tensor.layout() == at::kStrided && !tensor.is_quantized()) return;
  throw ConfigurationError(absl::StrCat(
      "rank ", options.rank, ": ", options.what, " takes dense tensors, and ", name, " is ",
      tensor.is_quantized() ? "quantized" : c10::str(tensor.layout()),
      ": register a dense one, or name it in params_and_buffers_to_ignore on all ranks"));
}

// Writes `value` into `tensor`'s memory. A dimension of stride 0 (an expanded tensor) holds one
// element, which is written once.
void Write(const at::Tensor& tensor, at::Tensor value) {
  at::Tensor target = tensor.variable_data();
  for (int64_t dim = 0; dim < target.dim(); ++dim) {
    if (target.stride(dim) != 0 || target.size(dim) < 2) continue;
    target = target.narrow(dim, 0, 1);
    value = value.narrow(dim, 0, 1);
  }
  target.copy_(value);
}

// Writes one received message into the tensors. `flat`: the root's bytes of that message.
void Receive(const at::Tensor& flat, const std::vector<at::Tensor>& tensors,
             const std::vector<int>& members, const CoalescedBroadcastOptions& options,
             std::vector<at::Tensor>& values) {
  int64_t offset = 0;
  for (const int index : members) {
    const at::Tensor& tensor = tensors[index];
    const at::Tensor bytes = flat.narrow(0, offset, Bytes(tensor));
    offset += bytes.numel();
    values[index] = bytes.view(tensor.scalar_type()).view(tensor.sizes());
    if (options.rank == options.root) continue;
    // On a device a comparison would make the host wait for it.
    if (tensor.is_cpu() && SameBits(tensor, values[index])) continue;
    const bool raise = !options.keeps_version || !options.keeps_version(index);
    Write(tensor, values[index]);
    c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    if (raise && impl->version_counter().enabled()) impl->bump_version();
  }
}

std::string NamesOf(const std::vector<int>& members, const std::vector<std::string>& names) {
  std::vector<std::string> chosen;
  for (const int index : members) chosen.push_back(names[index]);
  return NameList(chosen, kNamesInMessage);
}

}  // namespace

bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor a_bytes = AsBytes(a);
  const at::Tensor b_bytes = AsBytes(b);
  const auto count = static_cast<size_t>(a_bytes.numel());
  return count == 0 || std::memcmp(a_bytes.const_data_ptr(), b_bytes.const_data_ptr(), count) == 0;
}

std::vector<at::Tensor> BroadcastCoalesced(Communicator& communicator,
                                           const std::vector<at::Tensor>& tensors,
                                           const std::vector<std::string>& names,
                                           const CoalescedBroadcastOptions& options) {
  std::vector<at::Tensor> values(tensors.size());
  if (tensors.empty()) return values;
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < tensors.size(); ++i) CheckDense(tensors[i], names[i], options);
  const BucketPlan plan = Chunks(tensors, options.chunk_bytes);
  std::deque<std::pair<Communicator::Pending, const std::vector<int>*>> in_flight;
  const auto finish_oldest = [&] {
    auto [pending, members] = std::move(in_flight.front());
    in_flight.pop_front();
    const at::Tensor flat = pending.tensor;
    communicator.Wait(pending);
    Receive(flat, tensors, *members, options, values);
  };
  for (const BucketPlan::Bucket& chunk : plan.buckets()) {
    std::vector<at::Tensor> parts;
    for (const int index : chunk.parameters) parts.push_back(AsBytes(tensors[index]));
    if (in_flight.size() == kInFlight) finish_oldest();
    const std::string what =
        absl::StrCat(options.what, " (", NamesOf(chunk.parameters, names), ")");
    in_flight.emplace_back(communicator.Broadcast(at::cat(parts), options.root, {what}),
                           &chunk.parameters);
  }
  while (!in_flight.empty()) finish_oldest();
  return values;
}

}  // namespace ddp::internal
