#include "ddp/comm/shared_memory/registered_memory.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "ddp/comm/arena/arena.h"

namespace ddp::internal {

at::Tensor AllocateRegistered(int64_t count, const at::TensorOptions& options) {
  Arena& arena = Arena::OfProcess();
  const size_t bytes =
      std::max(Arena::kSmallestBlock, static_cast<size_t>(count) * options.dtype().itemsize());
  const bool fits = options.device().is_cpu() && arena.status().ok();
  auto demand = fits ? arena.AddDemand({.gradient_bytes = {bytes}, .capacity_bytes = bytes})
                     : absl::StatusOr<ArenaDemand>(arena.status());
  if (!fits || !demand.ok()) return at::empty({count}, options);
  void* const block = arena.Allocate(bytes);
  if (block == nullptr) return at::empty({count}, options);
  // The demand outlives the block.
  const auto kept = std::make_shared<ArenaDemand>(*std::move(demand));
  return at::from_blob(
      block, {count}, [&arena, kept](void* memory) { arena.Free(memory); }, options);
}

}  // namespace ddp::internal
