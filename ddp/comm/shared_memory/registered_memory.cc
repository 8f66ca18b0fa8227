#include "ddp/comm/shared_memory/registered_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "ddp/comm/arena/arena.h"

namespace ddp::internal {

at::Tensor AllocateRegistered(int64_t count, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty({count}, options);
  const auto block =
      Arena::OfProcess().AllocateAlone(static_cast<size_t>(count) * options.dtype().itemsize());
  if (!block.ok()) return at::empty({count}, options);
  return at::from_blob(
      block->get(), {count}, [kept = *block](void* /*memory*/) {}, options);
}

}  // namespace ddp::internal
